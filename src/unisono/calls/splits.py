"""Splits of dimension 0, and the checks of tensors cut by them: local, in a fixed order, before anything moves.

The first line of an error is torch_npu's text where it has one; the second says what was expected and what was got.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NoReturn, TypeAlias

from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from .. import _core
from ..base import ops
from ..group.names import GroupLike
from .tensors import check_memory, expected_got, overlap, row_count

#: What a splits argument may be: a list, a tuple, torch.Size, a 1-D integer tensor, a numpy array of integers, or None.
SplitsLike: TypeAlias = Sequence[int] | Tensor | Any | None


# -- reading


def as_list(like: Any) -> list[Any]:
    """Splits or counts as a list, in which torch.compile may keep symbols."""
    if like is None:
        return []
    return list(like) if isinstance(like, (list, tuple)) else like.tolist()


def numbers_in(like: Any) -> tuple[int, ...]:
    """Whole numbers from any accepted form; TypeError, without words for users, for anything else."""
    if is_compiling():
        return tuple(as_list(like))
    listed = list(_listed(like))
    if any(isinstance(n, bool) for n in listed):
        raise TypeError
    return tuple(map(index, listed))


def _listed(like: Any) -> Any:
    return like.tolist() if type(like) is not list and hasattr(like, "tolist") else like


def is_number(entry: Any) -> bool:
    """Whether this is a whole number, of any type but bool."""
    try:
        index(entry)
    except TypeError:
        return False
    return not isinstance(entry, bool)


def splits_of(splits: SplitsLike) -> tuple[int, ...]:
    """Any accepted form of splits as a tuple, empty for an equal split."""
    try:
        return () if splits is None else numbers_in(splits)
    except TypeError:
        raise TypeError(
            "split sizes must be whole numbers, one per rank\n"
            + expected_got("a list, tuple, torch.Size, 1-D integer tensor or integer array", repr(_listed(splits)))
        ) from None


def named_numbers(like: Any, argument: str) -> tuple[int, ...]:
    """As :func:`numbers_in`, with an error that names the argument and the first entry that is none."""
    try:
        return numbers_in(like)
    except TypeError:
        wrong = _listed(like)
        if isinstance(wrong, (list, tuple)):
            wrong = next(n for n in wrong if not is_number(n))
        raise TypeError(f"argument '{argument}' must be a list of whole numbers, got {wrong!r}") from None


def splits_of_each(splits: Any, one: bool) -> tuple[tuple[int, ...], ...] | None:
    """Rows per rank for every tensor of a list, or for the ``one`` that there is; None and [] mean equal splits."""
    if splits is None or (isinstance(splits, (list, tuple)) and not splits):
        return None
    if one:
        return (named_numbers(splits, "split_sizes"),)
    if isinstance(splits, Tensor):
        splits = splits.tolist()
    if not isinstance(splits, (list, tuple)) or not all(hasattr(split, "__len__") for split in splits):
        raise TypeError(f"argument 'split_sizes' must be a list of lists, one per tensor, got {splits!r}")
    return tuple(named_numbers(split, f"split_sizes[{i}]") for i, split in enumerate(splits))


def refuse_splits_of(op: Any) -> NoReturn:
    """A ReduceOp in the place of the splits: the fourth place, or ``op=``, is meant."""
    raise TypeError(
        f"'input_split_sizes' is the third argument, 'op' the fourth: got {op} as the third\n"
        f"  write reduce_scatter_tensor_uneven(output, input, input_split_sizes, op={op}, ...)"
    )


# -- checking


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
            raise words.kind(f"{words.uneven}\n{expected_got(f'a multiple of {size} rows', rows)}")
        return
    if len(splits) != size:
        raise words.kind(f"{words.length}\n{expected_got(f'{size} splits', len(splits))}")
    if sum(splits) != rows:
        got = f"{list(splits)}, which add up to {sum(splits)}"
        hint = in_rows(splits, row) if sum(splits) == rows * row else ""
        raise words.kind(f"{words.total}\n{expected_got(f'splits that add up to {rows}', got)}{hint}")
    if min(splits) < 0:
        raise ValueError(f"{words.negative}\n{expected_got('0 or more rows each', list(splits))}")


def in_rows(splits: Sequence[int], row: int) -> str:
    """What to pass instead of elements per rank; empty if splits cannot be elements of rows of that many."""
    if row < 2 or any(n % row for n in splits):
        return ""
    return f"\n  splits are rows, not elements: for rows of {row} pass {[n // row for n in splits]}"


def cut(splits: SplitsLike, rows: int, row: int, size: int, words: Words = TORCH) -> tuple[int, ...]:
    """The elements of each rank's part of ``rows`` rows of ``row`` elements, checked; -1 rows: as the splits say."""
    counts = None if is_compiling() else _core.cut_rows(splits, rows, row, size)
    if counts is not None:
        return counts
    given = splits_of(splits)
    check(given, sum(given) if rows < 0 else rows, size, words, row)
    return tuple([n * row for n in given or [rows // size] * size])


def cut_if_unequal(
    splits: SplitsLike, shape: Sequence[int], size: int, words: Words = TORCH, rows_of_number: int = 1
) -> tuple[int, ...] | None:
    """Elements for or from each rank of an all-to-all of a tensor of this shape; None for equal parts."""
    rows = shape[0] if shape else rows_of_number
    return None if not splits and rows % size == 0 else cut(splits, rows, math.prod(shape[1:]), size, words)


# -- tensors that are cut


def check_whole_and_part(
    group: GroupLike, rank: int, size: int, whole: Tensor, part: Tensor, splits: SplitsLike, whole_is_output: bool
) -> tuple[int, ...]:
    """The elements of each rank's chunk of ``whole``, if everything fits; ``whole_is_output``: for messages."""
    shape = whole.shape
    if shape and part.dim():  # the usual case
        counts = _core.cut_rows(splits, shape[0], shape[1:].numel() if len(shape) > 1 else 1, size)
        if counts is not None and _core.is_part(whole, part, counts, rank, size):
            return counts
    check_memory(group, *((whole, part) if whole_is_output else (part, whole)))
    whole_name, part_name = ("output", "input") if whole_is_output else ("input", "output")
    part_elements = part.numel()
    if not shape or (part_elements == 1 and not part.dim()):
        name = part_name if shape else whole_name
        raise ValueError(f"'{name}' must have at least one dimension\n{expected_got('1 or more dimensions', 'none')}")
    counts = cut(splits, shape[0], shape[1:].numel(), size)
    if part_elements != counts[rank]:
        raise ValueError(
            f"'{part_name}' must have as many elements as this rank's rows\n"
            + expected_got(f"{counts[rank]} elements on rank {rank}", f"{part_elements} of shape {list(part.shape)}")
        )
    own = whole.data_ptr() + sum(counts[:rank]) * whole.element_size()
    if part.data_ptr() != own and overlap(whole, part):
        raise ValueError(
            f"'{part_name}' overlaps '{whole_name}' and is not exactly this rank's part\n"
            + expected_got("tensors apart, or this rank's own rows", "some shared bytes")
        )
    return counts


def uneven_rows(splits: SplitsLike, tensor: Tensor, rank: int, size: int, gathers: bool) -> tuple[int, Sequence[int]]:
    """Rows of the result, and the elements of each rank's part, checked; ``gathers``: the tensor is a part itself."""
    usual = None if is_dynamo_compiling() else _core.cut_tensor(splits, tensor, rank, size, gathers)
    if usual is not None:
        return usual
    if type(splits) is str or type(splits) in ops.TORCH_CLASSES:
        raise TypeError(f"the split sizes come before 'op': expected a list of whole numbers, or None, got {splits}")
    splits = splits_of(splits)
    shape = tensor.shape
    rows = row_count(shape)
    total = rows if not gathers else -1 if splits else rows * size
    row = 1 if len(shape) <= 1 else shape[1:].numel()
    counts = cut(splits, total, row, size)
    if total < 0:
        total = sum(splits)
    mine = splits[rank] if splits else total // size
    if gathers and mine != rows:
        hint = in_rows(splits, row) if mine == rows * row else ""
        raise ValueError(
            f"'tensor' must have as many rows as this rank's split\n"
            f"  expected {mine} rows on rank {rank}, got {rows}{hint}"
        )
    return total if gathers else mine, counts
