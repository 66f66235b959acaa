"""New outputs, for transports and operators written in Python: of what shape is the result of a verb?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..base.errors import make_argument_error


def rows_of(verb: str, tensor: Tensor, size: int) -> int:
    """The rows a verb gives a rank for this input if all parts are equal; a number counts as one row."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if verb in ("all_gather", "gather"):
        return rows * size
    if verb in ("reduce_scatter", "scatter"):
        if rows % size:
            raise make_argument_error("rows_divide", "input", size, rows)
        return rows // size
    return rows


def new_output(verb: str, rows: int, like: Tensor, size: int) -> Tensor:
    """A new output for a verb, with so many rows, -1 for as many as it gives."""
    if rows < 0:
        if verb in ("all_reduce", "reduce", "broadcast", "all_to_all"):
            return like.new_empty(like.shape)
        rows = rows_of(verb, like, size)
    return like.new_empty((rows, *like.shape[1:]))


def are_shapes(output: object) -> bool:
    """Whether an output is a list of shapes rather than of tensors."""
    return isinstance(output, Sequence) and len(output) > 0 and isinstance(output[0], Sequence)
