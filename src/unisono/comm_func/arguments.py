"""Errors in the words of MindSpore, and readers of what only its functions take.

The first line of a message is MindSpore's, so that code and people who know it find what they look for; what was got
follows on a second line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from .. import _core
from ..base import ops
from ..calls.splits import SplitsLike, Words, cut, in_rows, splits_of

#: The strings an ``op`` may be.
OPS = ("sum", "prod", "min", "max", "avg")
SUM = OPS[0]  # strings of a program's text are one object, so the usual op is told by "is", which costs nothing


def expect_tensor(function: str, got: object) -> None:
    """Raises for an argument that is no tensor."""
    if not isinstance(got, Tensor):
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


def row_count(tensor: Tensor) -> int:
    """Rows of a tensor; a number is one row."""
    return tensor.shape[0] if tensor.dim() else 1


def uneven_rows(sizes: SplitsLike, tensor: Tensor, rank: int, size: int, gathers: bool) -> tuple[int, Sequence[int]]:
    """Rows of the result, and the elements of each rank's part, checked; ``gathers``: the tensor is a part itself."""
    usual = None if is_dynamo_compiling() else _core.cut_tensor(sizes, tensor, rank, size, gathers)
    if usual is not None:
        return usual
    if type(sizes) is str or type(sizes) in ops.TORCH_CLASSES:
        raise TypeError(f"the split sizes come before 'op': expected a list of whole numbers, or None, got {sizes}")
    sizes = _read(sizes)
    shape = tensor.shape
    rows = shape[0] if shape else 1
    total = rows if not gathers else -1 if sizes else rows * size
    row = 1 if len(shape) <= 1 else shape[1:].numel()
    counts = cut(sizes, total, row, size)
    if total < 0:
        total = sum(sizes)
    mine = sizes[rank] if sizes else total // size
    if gathers and mine != rows:
        hint = in_rows(sizes, row) if mine == rows * row else ""
        raise ValueError(
            f"'tensor' must have as many rows as this rank's split\n"
            f"  expected {mine} rows on rank {rank}, got {rows}{hint}"
        )
    return total if gathers else mine, counts


def exchange_counts(function: str, side: str, sizes: Any, shape: Sequence[int], size: int) -> Sequence[int] | None:
    """Elements for or from each rank of an all-to-all of a tensor of this shape; None for equal parts."""
    rows = shape[0] if shape else 1
    if rows < 0:
        raise ValueError(f"For {function}, the {side} shape must not have negative sizes, got {list(shape)}")
    sizes = _read(sizes)
    if not sizes and rows % size == 0:
        return None
    row = math.prod(shape[1:])
    try:
        return cut(sizes, rows, row, size)
    except (RuntimeError, ValueError):
        uneven = f"{side} shape at dim 0 must be divided by world_size, but got {rows} and {size}."
        wrong = f"For {function}, '{side}_split_sizes' must be {size} numbers that add up to the {rows} rows"
        return cut(sizes, rows, row, size, Words(uneven, length=wrong, total=wrong, kind=ValueError))


def _read(sizes: SplitsLike) -> Sequence[int]:
    """Splits as a tuple of plain numbers, read once; symbols, while compiling."""
    if sizes is None:
        return ()
    return tuple(sizes) if is_compiling() else splits_of(sizes)
