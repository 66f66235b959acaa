"""Errors in the words of MindSpore, and readers of what only its functions take.

The first line of a message is MindSpore's, so that code and people who know it find what they look for; what was got
follows on a second line.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..base import ops
from ..calls.splits import SplitsLike, Words, check, splits_of

#: The strings an ``op`` may be.
OPS = ("sum", "prod", "min", "max", "avg")


def no_tensor(function: str, got: object) -> NoReturn:
    """Raises for an argument that is no tensor."""
    raise TypeError(f"For {function}, the input tensor must be tensor\n  got {type(got).__name__}")


def reduction(function: str, op: Any) -> tuple[str, float | None]:
    """The name of a reduce operation, and the factor of a PREMUL_SUM (None for others)."""
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


def equal_parts(rows: int, size: int) -> int:
    """Rows per rank when ``rows`` are dealt out evenly."""
    if rows % size:
        raise ValueError(
            "the first dimension for 'input_shape' must be divided by 'rank_size', "
            f"but got input_shape[0]: {rows}, rank_size: {size}"
        )
    return rows // size


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor as rows: a number is one row."""
    return tensor if tensor.dim() else tensor.reshape(1)


def uneven_splits(sizes: SplitsLike, rows: int | None, size: int) -> list[int]:
    """Rows per rank as a list, checked; empty if none were given and ``rows``, their total, is not known either."""
    if type(sizes) is str or type(sizes) in ops.TORCH_CLASSES:
        raise TypeError(f"the split sizes come before 'op': expected a list of whole numbers, or None, got {sizes}")
    given = _given(sizes)
    if rows is None:
        if not given:
            return []
        rows = sum(given)
    check(given, rows, size)
    return list(given) or [rows // size] * size


def _given(sizes: SplitsLike) -> tuple[int, ...]:
    if torch.compiler.is_compiling():  # keep sizes that are symbols
        return () if sizes is None else tuple(sizes)
    return splits_of(sizes)


def exchange_splits(function: str, side: str, sizes: Any, rows: int, size: int) -> list[int]:
    """Rows for or from each rank of an all-to-all, equal if none are given."""
    given = _given(sizes)
    try:
        check(given, rows, size)
    except (RuntimeError, ValueError):
        uneven = f"{side} shape at dim 0 must be divided by world_size, but got {rows} and {size}."
        wrong = f"For {function}, '{side}_split_sizes' must be {size} numbers that add up to the {rows} rows"
        check(given, rows, size, Words(uneven, length=wrong, total=wrong, kind=ValueError))
    return list(given) or [rows // size] * size
