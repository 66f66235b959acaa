"""What a fused matmul is asked to do: arguments in, a plan of numbers out, or an error that names what is wrong.

A *group* (of the product, not of ranks) is one pair of matrices, ``[m, k] @ [k, n]``. The products of all groups form
one flat space of elements, group after group, row after row; a *piece* is a range of rows of that space that is
computed and reduced together. Nothing here touches a tensor's numbers: plans depend on shapes only, and are kept.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..calls.splits import Words, check

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCE_OPS = ("sum", "avg", "max", "min")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Rows of consecutive groups: ``parts`` are (group, first row, end row), ``begin`` and ``count`` elements."""

    parts: tuple[tuple[int, int, int], ...]
    begin: int
    count: int


@dataclass(frozen=True)
class Plan:
    """All sizes of one call. ``counts`` has the elements of every output for every rank, if the result is scattered."""

    what: str
    rows: tuple[int, ...]
    inner: tuple[int, ...]
    columns: tuple[int, ...]
    outputs: tuple[Shape, ...]
    one_x: bool
    counts: tuple[int, ...] = ()
    _pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def total(self) -> int:
        """Elements of all products."""
        return sum(m * n for m, n in zip(self.rows, self.columns, strict=True))

    @functools.cached_property
    def words(self) -> str:
        """For messages: what ranks may disagree on."""
        cut = f"  split into {_short(self.counts)} elements" if self.counts else ""
        return f"{self.what}  rows {_short(self.rows)}  columns {_short(self.columns)}{cut}"

    @functools.cached_property
    def number(self) -> int:
        """63 bits that stand for what must be the same on all ranks; k may differ."""
        text = repr((self.what, self.rows, self.columns, self.counts))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def pieces(self, wanted: int) -> tuple[Piece, ...]:
        """The flat space in about as many pieces of nearly equal size, cut between rows."""
        pieces = self._pieces.get(wanted)
        if pieces is None:
            pieces = self._pieces[wanted] = _cut(self.rows, self.columns, self.total, wanted)
        return pieces


def _short(numbers: Sequence[int]) -> str:
    return str(list(numbers)) if len(numbers) <= 8 else f"{list(numbers[:8])}… ({len(numbers)})"


def _cut(rows: Shape, columns: Shape, total: int, wanted: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    parts: list[tuple[int, int, int]] = []
    begin = at = 0
    for i, (m, n) in enumerate(zip(rows, columns, strict=True)):
        row = 0
        while row < m and n > 0:
            border = total * (len(pieces) + 1) // wanted if len(pieces) + 1 < wanted else total
            some = min(m - row, max(1, -(-(border - at) // n)))
            parts.append((i, row, row + some))
            row += some
            at += some * n
            if at >= border:
                pieces.append(Piece(tuple(parts), begin, at - begin))
                parts, begin = [], at
    return tuple(pieces) or (Piece((), 0, 0),)


# -- checks


def check_reduction(reduce_op: object, bias_mode: object, comm_turn: object, backward: object, bias: bool) -> None:
    """The options that are no tensors."""
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"argument 'reduce_op' must be one of {', '.join(REDUCE_OPS)}, got {reduce_op!r}")
    if bias_mode not in ("mean", "sum"):
        raise ValueError(f"argument 'bias_mode' must be 'mean' or 'sum', got {bias_mode!r}")
    if bias and bias_mode == "sum" and reduce_op != "sum":
        raise ValueError(f"argument 'bias_mode' may be 'sum' for reduce_op 'sum' only, got reduce_op {reduce_op!r}")
    if isinstance(comm_turn, bool) or not isinstance(comm_turn, int) or comm_turn < 0:
        raise ValueError(f"argument 'comm_turn' must be a number of pieces, 0 to choose, got {comm_turn!r}")
    if backward not in ("all_reduce", "identity"):
        raise ValueError(f"argument 'backward' must be 'all_reduce' or 'identity', got {backward!r}")


def check_dtypes(x: Sequence[Any], weight: Sequence[Any], bias: Sequence[Any]) -> None:
    """One dtype for x and weight, any floating one for bias, all on one device."""
    dtype, device = x[0].dtype, x[0].device
    if dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"argument 'x[0]' must have one of the dtypes {names}, got {dtype}")
    for name, tensors in (("x", x), ("weight", weight)):
        for i, t in enumerate(tensors):
            if t.dtype != dtype:
                raise TypeError(f"argument '{name}[{i}]' must have the dtype of x[0], {dtype}, got {t.dtype}")
            if t.device != device:
                raise ValueError(f"argument '{name}[{i}]' must be on the device of x[0], {device}, got {t.device}")
    for i, t in enumerate(bias):
        if not t.dtype.is_floating_point or t.dtype not in DTYPES:
            raise TypeError(f"argument 'bias[{i}]' must be of a floating-point dtype, got {t.dtype}")


def row_totals(group_list: Sequence[int], m: int, argument: str = "group_list") -> tuple[int, ...]:
    """Rows of every group, from running totals (the last is m) or counts (they add up to m).

    A list that is both means the same either way.

    >>> row_totals([2, 5, 6], 6), row_totals([2, 3, 1], 6), row_totals([0, 0, 6], 6)
    ((2, 3, 1), (2, 3, 1), (0, 0, 6))
    """
    for i, n in enumerate(group_list):
        if n < 0:
            raise ValueError(f"argument '{argument}' must not be negative, got {n} for group {i}")
    rises = all(a <= b for a, b in itertools.pairwise(group_list))
    if rises and group_list[-1] == m:
        return tuple(b - a for a, b in zip((0, *group_list), group_list, strict=False))
    if sum(group_list) == m:
        return tuple(group_list)
    raise ValueError(
        f"argument '{argument}' must be running totals that end in the {m} rows of x, or counts that add up to them, "
        f"got {_short(group_list)}: the last is {group_list[-1]}, the sum {sum(group_list)}"
    )


def plan_groups(
    what: str, x: tuple[Shape, ...], weight: tuple[Shape, ...], group_list: tuple[int, ...] | None, split_item: int
) -> Plan:
    """The plan of a grouped matmul, from shapes; see :func:`unisono.grouped_matmul_all_reduce`."""
    if not x or not weight:
        raise ValueError(f"Neither x nor weight could be empty.\n  got {len(x)} tensors in x, {len(weight)} in weight")
    if split_item not in (0, 1, 2, 3):
        raise ValueError(f"The given split_item [{split_item}] is invalid, which must be one of 0/1/2/3")
    for i, shape in enumerate(weight):
        if len(shape) != 2:
            raise ValueError(f"argument 'weight[{i}]' must have 2 dimensions [K, N], got {list(shape)}")
    if split_item in (0, 2):
        rows = _rows_of_separate(x, weight, group_list, split_item)
        inner = tuple(shape[-1] for shape in x)
    else:
        rows = _rows_of_one(x, weight, group_list, split_item)
        inner = (x[0][1],) * len(weight)
    for i, (k, shape) in enumerate(zip(inner, weight, strict=True)):
        if k != shape[0]:
            which = i if split_item in (0, 2) else 0
            raise ValueError(
                f"group {i}: the columns of x[{which}] must match the rows of weight[{i}], "
                f"got x {list(x[which])} and weight {list(shape)}: {k} against {shape[0]}"
            )
    columns = tuple(shape[1] for shape in weight)
    if split_item in (2, 3):
        for i, n in enumerate(columns):
            if n != columns[0]:
                raise ValueError(
                    f"When split_item = 2 or 3, all weights must have the same number of columns: "
                    f"weight[0] has {columns[0]}, weight[{i}] has {n}"
                )
        outputs: tuple[Shape, ...] = ((sum(rows), columns[0]),)
    elif split_item == 1:
        outputs = tuple(zip(rows, columns, strict=True))
    else:
        outputs = tuple((*shape[:-1], n) for shape, n in zip(x, columns, strict=True))
    return Plan(what, rows, inner, columns, outputs, one_x=split_item in (1, 3))


def _rows_of_separate(x: tuple[Shape, ...], weight: tuple[Shape, ...], group_list: Any, split_item: int) -> Shape:
    if len(x) != len(weight) or group_list:
        raise ValueError(
            "When split_item = 0 or 2, the num of x tensors must equal the num of weight tensors, "
            "and there is supposed not to be group_list input\n"
            f"  got {len(x)} x tensors, {len(weight)} weight tensors, group_list {group_list and list(group_list)}"
        )
    for i, shape in enumerate(x):
        if len(shape) < 2 or (split_item == 2 and len(shape) != 2):
            wanted = "2 dimensions [M, K]" if split_item == 2 else "2 or more dimensions, the last of K"
            raise ValueError(f"argument 'x[{i}]' must have {wanted}, got {list(shape)}")
    return tuple(product_of(shape[:-1]) for shape in x)


def _rows_of_one(x: tuple[Shape, ...], weight: tuple[Shape, ...], group_list: Any, split_item: int) -> Shape:
    entries = len(group_list) if group_list else 0
    if len(x) != 1 or entries != len(weight):
        raise ValueError(
            f"When split_item = {split_item}, the num of x tensors must equal 1, "
            "and the num of weight tensors is supposed to equal the length of group_list\n"
            f"  got {len(x)} x tensors, {len(weight)} weight tensors, {entries} entries in group_list"
        )
    if len(x[0]) != 2:
        raise ValueError(f"argument 'x[0]' must have 2 dimensions [M, K], got {list(x[0])}")
    return row_totals(group_list, x[0][0])


def plan_scatter(plan: Plan, splits: tuple[Shape, ...] | None, rank: int, size: int) -> Plan:
    """The plan with every output's rows cut between the ranks; ``splits`` has rows per rank for every output."""
    if splits is None:
        for i, shape in enumerate(plan.outputs):
            check((), shape[0], size, _words("output", i, shape[0], size))
        splits = tuple((shape[0] // size,) * size for shape in plan.outputs)
    check_splits(splits, [shape[0] for shape in plan.outputs], size, "output")
    pairs = list(zip(plan.outputs, splits, strict=True))
    counts = tuple(rows * product_of(shape[1:]) for shape, split in pairs for rows in split)
    outputs = tuple((split[rank], *shape[1:]) for shape, split in pairs)
    return Plan(plan.what, plan.rows, plan.inner, plan.columns, outputs, plan.one_x, counts)


def check_splits(splits: tuple[Shape, ...], rows: Sequence[int], size: int, of: str) -> None:
    """Rows per rank for every tensor: as many lists as tensors, each as :func:`unisono.calls.splits.check` wants it."""
    if len(splits) != len(rows):
        raise ValueError(f"argument 'split_sizes' must have one list per {of}: expected {len(rows)}, got {len(splits)}")
    for i, (split, m) in enumerate(zip(splits, rows, strict=True)):
        words = _words(of, i, m, size)
        if not split:
            raise ValueError(f"{words.length}\n  expected {size} splits, got none")
        check(split, m, size, words)


def _words(of: str, i: int, rows: int, size: int) -> Words:
    return Words(
        uneven=f"{of} {i} has {rows} rows, which do not divide equally between {size} ranks; give 'split_sizes'",
        length=f"argument 'split_sizes' must have one number per rank, for {of} {i}",
        total=f"argument 'split_sizes' must add up to the {rows} rows of {of} {i}",
        negative=f"argument 'split_sizes' must not be negative, for {of} {i}",
        kind=ValueError,
    )


def product_of(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


_kept_groups = functools.lru_cache(maxsize=4096)(plan_groups)
_kept_scatter = functools.lru_cache(maxsize=4096)(plan_scatter)


def planned_groups(*arguments: Any) -> Plan:
    """:func:`plan_groups`, kept, but not while compiling, where sizes may be symbols."""
    return plan_groups(*arguments) if torch.compiler.is_compiling() else _kept_groups(*arguments)


def planned_scatter(*arguments: Any) -> Plan:
    """:func:`plan_scatter`, kept likewise."""
    return plan_scatter(*arguments) if torch.compiler.is_compiling() else _kept_scatter(*arguments)
