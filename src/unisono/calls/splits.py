"""Splits of dimension 0, and the checks of tensors cut by them: local, in a fixed order, before anything moves.

The first line of an error is torch_npu's text where it has one; the second says what was expected and what was got.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import _core
from ..group.names import GroupLike, devices_of, resolve

#: What a splits argument may be: a list, a tuple, torch.Size, a 1-D integer tensor, a numpy array of integers, or None.
SplitsLike: TypeAlias = Sequence[int] | Tensor | Any | None


def refuse_no_tensors(output: Any, input: Any) -> None:
    """Raises for the first argument that is no tensor."""
    for name, tensor in (("output", output), ("input", input)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"'{name}' must be a tensor\n{_expected_got('torch.Tensor', type(tensor).__name__)}")


def check_whole_and_part(
    group: GroupLike, rank: int, size: int, whole: Tensor, part: Tensor, splits: SplitsLike, whole_is_output: bool
) -> tuple[int, ...]:
    """The elements of each rank's chunk of ``whole``, if everything fits; ``whole_is_output``: for messages."""
    shape = whole.shape
    if shape and part.dim():  # the usual case
        counts = _core.cut_rows(splits, shape[0], shape[1:].numel() if len(shape) > 1 else 1, size)
        if counts is not None and _core.is_part(whole, part, counts, rank, size):
            return counts
    _check_memory(group, whole, part, whole_is_output)
    if whole.dtype is not part.dtype:
        raise RuntimeError(
            "output tensor must have the same type as input tensor\n"
            + _expected_got(*((part.dtype, whole.dtype) if whole_is_output else (whole.dtype, part.dtype)))
        )
    part_elements = part.numel()
    if not shape or (part_elements == 1 and not part.dim()):
        name = "output" if whole_is_output is not bool(shape) else "input"
        raise ValueError(f"'{name}' must have at least one dimension\n{_expected_got('1 or more dimensions', 'none')}")
    counts = cut(splits, shape[0], shape[1:].numel(), size)
    if part_elements != counts[rank]:
        name = "input" if whole_is_output else "output"
        raise ValueError(
            f"'{name}' must have as many elements as this rank's rows\n"
            + _expected_got(f"{counts[rank]} elements on rank {rank}", f"{part_elements} of shape {list(part.shape)}")
        )
    _check_overlap(whole, part, sum(counts[:rank]), part_elements, whole_is_output)
    return counts


def splits_of(splits: SplitsLike) -> tuple[int, ...]:
    """Any accepted form of splits as a tuple, empty for an equal split."""
    if splits is None:
        return ()
    if type(splits) is not list and hasattr(splits, "tolist"):
        splits = splits.tolist()
    try:
        return tuple(map(index, splits))
    except TypeError:
        raise TypeError(
            f"split sizes must be whole numbers, one per rank\n"
            f"{_expected_got('a list, tuple, torch.Size, 1-D integer tensor or integer array', repr(splits))}"
        ) from None


def refuse_splits_of(op: Any) -> NoReturn:
    """A ReduceOp in the place of the splits: the fourth place, or ``op=``, is meant."""
    raise TypeError(
        f"'input_split_sizes' is the third argument, 'op' the fourth: got {op} as the third\n"
        f"  write reduce_scatter_tensor_uneven(output, input, input_split_sizes, op={op}, ...)"
    )


@dataclass(frozen=True)
class Words:
    """How an error about splits begins: torch's words, unless a function has those of another library."""

    uneven: str = "Tensor's dim 0 does not divide equally across group size"
    length: str = "Number of tensor splits not equal to group size"
    total: str = "Split sizes doesn't match total dim 0 size"
    negative: str = "split sizes must not be negative"
    kind: type[Exception] = RuntimeError


TORCH = Words()


def check(splits: Sequence[int], rows: int, size: int, words: Words = TORCH, row: int = 1) -> None:
    """Raises unless the rows can be dealt out so: one number per rank that add up to ``rows``; none: equally.

    ``row`` is the number of elements of one, for a hint.
    """
    if not splits:
        if rows % size:
            raise words.kind(f"{words.uneven}\n{_expected_got(f'a multiple of {size} rows', rows)}")
        return
    if len(splits) != size:
        raise words.kind(f"{words.length}\n{_expected_got(f'{size} splits', len(splits))}")
    if sum(splits) != rows:
        got = f"{list(splits)}, which add up to {sum(splits)}"
        hint = in_rows(splits, row) if sum(splits) == rows * row else ""
        raise words.kind(f"{words.total}\n{_expected_got(f'splits that add up to {rows}', got)}{hint}")
    if min(splits) < 0:
        raise ValueError(f"{words.negative}\n{_expected_got('0 or more rows each', list(splits))}")


def in_rows(splits: Sequence[int], row: int) -> str:
    """What to pass instead of elements per rank; empty if splits cannot be elements of rows of that many."""
    if row < 2 or any(n % row for n in splits):
        return ""
    return f"\n  splits are rows, not elements: for rows of {row} pass {[n // row for n in splits]}"


def cut(splits: SplitsLike, rows: int, row: int, size: int, words: Words = TORCH) -> tuple[int, ...]:
    """The elements of each rank's part of ``rows`` rows of ``row`` elements, checked; -1 rows: as the splits say."""
    if is_compiling():  # keep sizes that are symbols
        given = () if splits is None else tuple(splits)
    else:
        counts = _core.cut_rows(splits, rows, row, size)
        if counts is not None:
            return counts
        given = splits_of(splits)
    check(given, sum(given) if rows < 0 else rows, size, words, row)
    return tuple([n * row for n in given or [rows // size] * size])


def matrix_rows(matrix: Any, size: int) -> list[tuple[int, ...]]:
    """A matrix of counts as one row per rank, from nested or flat lists, a tensor or an array."""
    to_list = getattr(matrix, "tolist", None)
    listed = list(matrix) if to_list is None else to_list()
    nested = bool(listed) and not _is_number(listed[0])
    if nested:
        rows = [splits_of(row) for row in listed]
    else:
        flat = splits_of(listed)
        rows = [flat[i : i + size] for i in range(0, len(flat), size)]
    if len(rows) != size or any(len(row) != size for row in rows):
        got = f"rows of {[len(row) for row in rows]}" if nested else f"{len(listed)} numbers"
        raise RuntimeError(
            f"Number of tensor splits not equal to group size\n{_expected_got(f'{size} rows of {size} numbers', got)}"
        )
    if any(n < 0 for row in rows for n in row):
        raise ValueError(f"send counts must not be negative\n{_expected_got('0 or more elements each', rows)}")
    return rows


def _is_number(entry: Any) -> bool:
    try:
        index(entry)
    except TypeError:
        return False
    return True


def check_exchange(
    group: GroupLike, rank: int, size: int, output: Tensor, input: Tensor, matrix: Any
) -> tuple[Sequence[int], Sequence[int]]:
    """What this rank receives from each rank and sends to each, by a matrix of counts, if everything fits."""
    counts = _core.cut_matrix(matrix, 1, rank, size)  # the usual case
    if counts is not None and _core.is_exchange(output, input, *counts, rank, size):
        return counts
    _check_memory(group, input, output, whole_is_output=False)
    if output.dtype is not input.dtype:
        raise RuntimeError(
            f"output tensor must have the same type as input tensor\n{_expected_got(input.dtype, output.dtype)}"
        )
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
                + _expected_got(f"an '{name}' of {wanted} elements, {what} {rank} of the matrix", tensor.numel())
                + hint
            )
    if _overlap(input.data_ptr(), input.nbytes, output.data_ptr(), output.nbytes):
        raise ValueError("'output' overlaps 'input'\n" + _expected_got("tensors apart from each other", "shared bytes"))
    return received, sent


def _is_sparse_or_lazy(tensor: Tensor) -> bool:
    """Not dense, or a view whose numbers are not those in memory."""
    return tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg()


def _check_memory(group: GroupLike, whole: Tensor, part: Tensor, whole_is_output: bool) -> None:
    """Dense, contiguous, and on a device that the group's backend takes."""
    named = (("output", whole), ("input", part)) if whole_is_output else (("output", part), ("input", whole))
    for name, tensor in named:
        if tensor.layout is not torch.strided:
            raise RuntimeError(f"Tensors must be dense\n{_expected_got(f'a strided {name!r}', tensor.layout)}")
        if not tensor.is_contiguous():
            shape = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            raise RuntimeError(f"Tensors must be contiguous\n{_expected_got(f'a contiguous {name!r}', shape)}")
        if _is_sparse_or_lazy(tensor):
            raise ValueError(
                f"'{name}' is a lazily conjugated or negated view; call resolve_conj() or resolve_neg() first"
            )
    found = resolve(group)
    assert found is not None  # or there would be no transport
    kinds = ["cpu"] if getattr(found, "unisono_group", None) is not None else devices_of(found)
    for name, tensor in named:
        if tensor.device.type not in kinds or tensor.device != named[0][1].device:
            raise RuntimeError(
                "Tensors must be on a supported device\n"
                + _expected_got(" or ".join(kinds), f"'{name}' on {tensor.device}")
            )


def _check_overlap(whole: Tensor, part: Tensor, at: int, part_elements: int, whole_is_output: bool) -> None:
    """Apart, or the part is exactly this rank's rows of the whole."""
    start, begin, size = part.data_ptr(), whole.data_ptr(), whole.element_size()
    if start != begin + at * size and _overlap(begin, whole.numel() * size, start, part_elements * size):
        one, other = ("input", "output") if whole_is_output else ("output", "input")
        raise ValueError(
            f"'{one}' overlaps '{other}' and is not exactly this rank's part\n"
            + _expected_got("tensors apart, or this rank's own rows", "some shared bytes")
        )


def _overlap(a: int, a_bytes: int, b: int, b_bytes: int) -> bool:
    return a_bytes > 0 and b_bytes > 0 and a < b + b_bytes and b < a + a_bytes


def _expected_got(expected: object, got: object) -> str:
    return f"  expected {expected}, got {got}"
