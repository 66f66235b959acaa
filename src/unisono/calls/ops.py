"""Reduce operations as users write them: MindSpore's strings, torch's constants, names in a compiled graph.

The names and numbers themselves are in ``base/ops.py``, and read in the core.
"""

from __future__ import annotations

from typing import Any

from ..base import ops

#: The strings an ``op`` of comm_func may be.
OPS = ("sum", "prod", "min", "max", "avg")
SUM = OPS[0]  # strings of a program's text are one object, so the usual op is told by "is", which costs nothing

#: Those that fused products can be reduced by.
OF_PRODUCTS = ("sum", "avg", "max", "min")


def reduction(function: str, op: Any) -> tuple[str, float | None]:
    """The name of a reduce operation, and the factor of a PREMUL_SUM (None for others); errors in MindSpore's words."""
    if isinstance(op, str):
        if op in OPS:
            return op, None
        raise TypeError(f"For {function}, the input op value must be one of {', '.join(OPS)}\n  got {op!r}")
    if type(op) not in ops.TORCH_CLASSES:
        raise TypeError(
            f"For {function}, the input op type must be str\n  or a torch ReduceOp, got {type(op).__name__}"
        )
    try:
        number, factor = ops.read(op, None)
    except ValueError as error:
        raise TypeError(f"For {function}, the input op is a bare PREMUL_SUM\n  {error}") from None
    name = ops.name_of(number)
    return ("prod" if name == "product" else name), factor if number == ops.PREMUL_SUM else None


# torch.compile runs it while it traces and puts what it says into the graph.
setattr(reduction, "_dynamo_marked_constant", True)  # noqa: B010


def traced_name(op: Any) -> str:
    """The name of a reduce operation; written for torch.compile to read."""
    if isinstance(op, str):
        return op
    # By identity: of a look-up in a dict torch.compile keeps the first answer for all later ops.
    for known, name in _BY_IDENTITY:
        if op is known:
            return name
    raise ValueError("under torch.compile, 'op' must be a name or a constant such as ReduceOp.SUM")


_BY_IDENTITY = tuple((op, ops.name_of(number)) for number, op in ops.TORCH_OPS.items())


def check_of_products(name: Any) -> None:
    """Raises for a name that fused products cannot be reduced by."""
    if name not in OF_PRODUCTS:
        raise ValueError(f"argument 'reduce_op' must be one of {', '.join(OF_PRODUCTS)}, got {name!r}")
