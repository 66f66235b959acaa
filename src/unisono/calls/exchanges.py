"""Who sends how much to whom: splits of both sides, matrices of counts, lists of tensors, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import _core
from ..group.names import GroupLike
from ..transport.find import checks_itself
from ..transport.protocol import Transport
from .splits import SplitsLike, Words, as_list, cut_if_unequal, in_rows, is_number, splits_of
from .tensors import check_apart, check_memory, expected_got, overlap, row_count, shape_of

Counts = Sequence[int]

# The usual lists, and the usual splits of both sides, accepted in C++: others are for the functions below.
are_usual_lists = _core.are_exchanged
cut_usual_sides = _core.cut_exchange


def side_counts(function: str, side: str, splits: SplitsLike, shape: Sequence[int], size: int) -> Counts | None:
    """As :func:`cut_if_unequal`, in MindSpore's words."""
    rows = row_count(shape)
    if rows < 0:
        raise ValueError(f"For {function}, the {side} shape must not have negative sizes, got {list(shape)}")
    arguments = splits_of(splits), shape, size
    try:
        return cut_if_unequal(*arguments)
    except (RuntimeError, ValueError):  # only now are there words, in which torch.compile would fix sizes
        uneven = f"{side} shape at dim 0 must be divided by world_size, but got {rows} and {size}."
        wrong = f"For {function}, '{side}_split_sizes' must be {size} numbers that add up to the {rows} rows"
        return cut_if_unequal(*arguments, Words(uneven, length=wrong, total=wrong, kind=ValueError))


def check_lists(function: str, shapes: Any, tensors: Any, size: int) -> list[tuple[int, ...]]:
    """The shapes, all written as such, if the lists are fit for an exchange."""
    for items in (tensors, shapes):
        if not isinstance(items, (list, tuple)):
            raise TypeError(f"Expected list or tuple, but got {type(items)}.")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Expected tensor, but got {type(tensor)}")
    written = [shape_of(shape) for shape in shapes]
    for argument, items in (("input_tensor_list", tensors), ("output_shape_list", written)):
        if len(items) != size:
            raise ValueError(f"For {function}, '{argument}' must have one entry per rank: {size}, got {len(items)}")
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise TypeError(f"all_to_all input dtype must be the same, but got {dtype} and {tensor.dtype}.")
    return written


# -- matrices of counts


def flat_matrix(matrix: Any) -> list[Any]:
    """A matrix of counts as one list, in which torch.compile may keep symbols."""
    return [n for row in as_list(matrix) for n in (row if isinstance(row, (list, tuple)) else [row])]


def matrix_rows(matrix: Any, size: int) -> list[tuple[int, ...]]:
    """A matrix of counts as one row per rank, from nested or flat lists, a tensor or an array."""
    to_list = getattr(matrix, "tolist", None)
    listed = list(matrix) if to_list is None else to_list()
    nested = bool(listed) and not is_number(listed[0])
    if nested:
        rows = [splits_of(row) for row in listed]
    else:
        flat = splits_of(listed)
        rows = [flat[i : i + size] for i in range(0, len(flat), size)]
    if len(rows) != size or any(len(row) != size for row in rows):
        got = f"rows of {[len(row) for row in rows]}" if nested else f"{len(listed)} numbers"
        raise RuntimeError(
            f"Number of tensor splits not equal to group size\n{expected_got(f'{size} rows of {size} numbers', got)}"
        )
    if any(n < 0 for row in rows for n in row):
        raise ValueError(f"send counts must not be negative\n{expected_got('0 or more elements each', rows)}")
    return rows


def check_exchange(
    group: GroupLike, rank: int, size: int, output: Tensor, input: Tensor, matrix: Any
) -> tuple[Counts, Counts]:
    """What this rank receives from each rank and sends to each, by a matrix of elements, if everything fits."""
    counts = _core.cut_matrix(matrix, 1, rank, size)  # the usual case
    if counts is not None and _core.is_exchange(output, input, *counts, rank, size):
        return counts
    check_memory(group, output, input)
    rows = matrix_rows(matrix, size)
    sent, received = rows[rank], [row[rank] for row in rows]
    for name, tensor, wanted, what in (("input", input, sum(sent), "row"), ("output", output, sum(received), "column")):
        if tensor.numel() != wanted:
            hint = ""
            if tensor.dim() > 1 and tensor.shape[0] == wanted:
                row = tensor.numel() // wanted
                hint = f"\n  the counts are elements, not rows: for rows of {row} pass {row} times as much"
            raise RuntimeError(
                "Split sizes doesn't match total dim 0 size\n"
                + expected_got(f"an '{name}' of {wanted} elements, {what} {rank} of the matrix", tensor.numel())
                + hint
            )
    if overlap(output, input):
        raise ValueError("'output' overlaps 'input'\n" + expected_got("tensors apart from each other", "shared bytes"))
    return received, sent


def check_exchange_of_rows(transport: Transport, output: Tensor, input: Tensor, matrix: Any) -> tuple[Counts, Counts]:
    """As :func:`check_exchange`, by a flat list of rows, in MindSpore's words."""
    counts = None
    if type(matrix) is list and matrix and type(matrix[0]) is int:  # the usual case
        counts = _core.cut_by_matrix(output, input, matrix, transport.rank, transport.size)
    if counts is None:
        counts = _counts_of_rows(transport.rank, transport.size, output, input, matrix)
    if not checks_itself(transport):
        check_apart(output, input)
    return counts


def _counts_of_rows(rank: int, size: int, output: Tensor, input: Tensor, matrix: Any) -> tuple[Counts, Counts]:
    if not isinstance(matrix, list):
        raise TypeError(f"send_count_matrix must be list, but got {type(matrix)}")
    if not all(isinstance(n, int) for n in matrix):
        raise TypeError("send_count_matrix elements must be of type int")
    if size * size != len(matrix):
        raise TypeError(
            f"send_count_matrix must be square matrix, but got {len(matrix)}.\n"
            f"  Expected {size * size} entries, a row of {size} per rank"
        )
    row, other = input.shape[1:].numel(), output.shape[1:].numel()
    if row != other:
        raise ValueError(f"The input and output dimensions except 0 must be of equal size, but got {row} and {other}.")
    sent, received = matrix[rank * size : (rank + 1) * size], matrix[rank::size]
    for name, tensor, counts in (("input", input, sent), ("output", output, received)):
        rows = row_count(tensor.shape)
        if min(counts) < 0 or sum(counts) != rows:
            hint = in_rows(counts, row) if sum(counts) == rows * row else ""
            raise ValueError(
                f"For all_to_all_v_c, this rank's counts must add up to the {rows} rows of '{name}', got {counts}{hint}"
            )
    return [n * row for n in received], [n * row for n in sent]
