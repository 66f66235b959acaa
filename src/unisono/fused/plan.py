"""What a fused matmul is asked to do: shapes and splits in, a plan of numbers out, or an error that says what is wrong.

A *group* (of the product, not of ranks) is one pair of matrices, ``[m, k] @ [k, n]``. The products of all groups form
one flat space of elements, group after group, row after row; a *piece* is a range of rows of that space that is
computed and reduced together. Nothing here touches a tensor's numbers: plans depend on shapes only, and are kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from ..base.counter import number_of
from ..calls.splits import Words, check, in_rows

Shape = tuple[int, ...]
Splits = tuple[Shape, ...] | None  # rows per rank for every tensor, None for equal ones


@dataclass(frozen=True)
class Piece:
    """Rows of consecutive groups: ``parts`` are (group, first row, end row), ``begin`` and ``count`` elements.

    ``counts`` is the part of the plan's counts that lies in it, None if there are none.
    """

    parts: tuple[tuple[int, int, int], ...]
    begin: int
    count: int
    counts: list[int] | None


@dataclass(frozen=True)
class Plan:
    """All sizes of one call.

    ``counts`` has the elements of every output for every rank, if the result is scattered; ``gathered`` and
    ``x_counts`` the shape of every x on all ranks together and its elements for every rank, if x is gathered.
    ``depths`` is every group's k, where it must be the same on all ranks: in the tree order.
    """

    what: str
    rows: Shape
    columns: Shape
    outputs: tuple[Shape, ...]
    counts: Shape = ()
    gathered: tuple[Shape, ...] = ()
    x_counts: Shape = ()
    depths: Shape = ()
    _pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def total(self) -> int:
        """Elements of all products."""
        return sum(m * n for m, n in zip(self.rows, self.columns, strict=True))

    @functools.cached_property
    def words(self) -> str:
        """For messages: what ranks may disagree on."""
        cut = f"  split into {_short(self.counts)} elements" if self.counts else ""
        depths = f"  in the tree order, k {_short(self.depths)}" if self.depths else ""
        return f"{self.what}  rows {_short(self.rows)}  columns {_short(self.columns)}{cut}{depths}"

    @functools.cached_property
    def number(self) -> int:
        """62 bits that stand for what must be the same on all ranks; k may differ, but for the tree order."""
        return number_of(self.what, self.rows, self.columns, self.counts, self.depths)

    @functools.cached_property
    def agreed(self) -> int:
        """The same without k."""
        return number_of(self.what, self.rows, self.columns, self.counts)

    def pieces(self, wanted: int) -> tuple[Piece, ...]:
        """The flat space in about as many pieces of nearly equal size, cut between rows."""
        pieces = self._pieces.get(wanted)
        if pieces is None:
            pieces = self._pieces[wanted] = tuple(self._cut(wanted)) or (self._piece([], 0, 0),)
        return pieces

    def _cut(self, wanted: int) -> list[Piece]:
        pieces: list[Piece] = []
        parts: list[tuple[int, int, int]] = []
        begin = at = 0
        for i, (m, n) in enumerate(zip(self.rows, self.columns, strict=True)):
            row = 0
            while row < m and n > 0:
                border = self.total * (len(pieces) + 1) // wanted if len(pieces) + 1 < wanted else self.total
                some = min(m - row, max(1, -(-(border - at) // n)))
                parts.append((i, row, row + some))
                row += some
                at += some * n
                if at >= border:
                    pieces.append(self._piece(parts, begin, at))
                    parts, begin = [], at
        return pieces

    def _piece(self, parts: list[tuple[int, int, int]], begin: int, end: int) -> Piece:
        counts, at = [], 0
        for n in self.counts:
            counts.append(max(0, min(end, at + n) - max(begin, at)))
            at += n
        return Piece(tuple(parts), begin, end - begin, counts or None)


def own_count(counts: Sequence[int] | None, rank: int, size: int, total: int) -> int:
    """The elements that a rank gets: of counts (outputs × ranks) its own, all without counts."""
    return sum(counts[rank::size]) if counts else total


def plan_groups(
    what: str,
    x: tuple[Shape, ...],
    weight: tuple[Shape, ...],
    group_list: Shape | None,
    split_item: int,
    cut: str = "",
    splits: Splits = None,
    rank: int = 0,
    size: int = 1,
    tree: bool = False,
) -> Plan:
    """The plan of a grouped matmul, from shapes; see :func:`unisono.grouped_matmul_all_reduce`.

    ``cut`` says which rows the ranks share: those of every "x", which are gathered, or of every "output", which are
    scattered. ``splits`` are rows per rank for each of them. ``tree``: in the tree order.
    """
    if split_item not in (0, 1, 2, 3):
        raise ValueError(f"The given split_item [{split_item}] is invalid, which must be one of 0/1/2/3")
    one_x, one_output = split_item in (1, 3), split_item in (2, 3)
    _check_matrices(x, weight, group_list, split_item)
    columns = tuple(shape[1] for shape in weight)
    for i, n in enumerate(columns):
        if one_output and n != columns[0]:
            raise ValueError(
                f"When split_item = 2 or 3, all weights must have the same number of columns: "
                f"weight[0] has {columns[0]}, weight[{i}] has {n}"
            )
    counts: Shape = ()
    x_counts: Shape = ()
    if cut == "x":
        splits, x_counts = _split(cut, x, splits, rank, size)
        x = tuple((sum(split), *shape[1:]) for shape, split in zip(x, splits, strict=True))
    if one_x:
        rows = row_totals(group_list or (), x[0][0])
    else:
        rows = tuple(prod(shape[:-1]) for shape in x)
    if one_output:
        outputs: tuple[Shape, ...] = ((sum(rows), columns[0]),)
    elif one_x:
        outputs = tuple(zip(rows, columns, strict=True))
    else:
        outputs = tuple((*shape[:-1], n) for shape, n in zip(x, columns, strict=True))
    if cut == "output":
        splits, counts = _split(cut, outputs, splits, rank, size)
        outputs = tuple((split[rank], *shape[1:]) for shape, split in zip(outputs, splits, strict=True))
    depths: Shape = tuple(shape[0] for shape in weight) if tree else ()
    return Plan(what, rows, columns, outputs, counts, x if cut == "x" else (), x_counts, depths)


_kept = functools.lru_cache(maxsize=4096)(plan_groups)


def planned(*arguments: Any) -> Plan:
    """:func:`plan_groups`, kept, but not while compiling, where sizes may be symbols."""
    return plan_groups(*arguments) if torch.compiler.is_compiling() else _kept(*arguments)


def row_totals(group_list: Sequence[int], m: int) -> Shape:
    """Rows of every group, from running totals (the last is m) or counts (they add up to m).

    A list that is both means the same either way.

    >>> row_totals([2, 5, 6], 6), row_totals([2, 3, 1], 6), row_totals([0, 0, 6], 6)
    ((2, 3, 1), (2, 3, 1), (0, 0, 6))
    """
    for i, n in enumerate(group_list):
        if n < 0:
            raise ValueError(f"argument 'group_list' must not be negative, got {n} for group {i}")
    rises = all(a <= b for a, b in itertools.pairwise(group_list))
    if rises and group_list[-1] == m:
        return tuple(b - a for a, b in zip((0, *group_list), group_list, strict=False))
    if sum(group_list) == m:
        return tuple(group_list)
    raise ValueError(
        f"argument 'group_list' must be running totals that end in the {m} rows of x, or counts that add up to them, "
        f"got {_short(group_list)}: the last is {group_list[-1]}, the sum {sum(group_list)}"
    )


def _check_matrices(x: tuple[Shape, ...], weight: tuple[Shape, ...], group_list: Any, split_item: int) -> None:
    """As many matrices as the split item wants, of as many dimensions, that fit each other."""
    one_x, entries = split_item in (1, 3), len(group_list or ())
    for i, shape in enumerate(weight):
        if len(shape) != 2:
            raise ValueError(f"argument 'weight[{i}]' must have 2 dimensions [K, N], got {list(shape)}")
    got = f"  got {len(x)} x tensors, {len(weight)} weight tensors"
    if one_x and (len(x) != 1 or entries != len(weight)):
        raise ValueError(
            f"When split_item = {split_item}, the num of x tensors must equal 1, "
            "and the num of weight tensors is supposed to equal the length of group_list\n"
            f"{got}, {entries} entries in group_list" + _cure(len(x), len(weight), entries)
        )
    if not one_x and (len(x) != len(weight) or entries):
        raise ValueError(
            "When split_item = 0 or 2, the num of x tensors must equal the num of weight tensors, "
            "and there is supposed not to be group_list input\n"
            f"{got}, group_list {group_list and list(group_list)}" + _cure(len(x), len(weight), entries)
        )
    for i, shape in enumerate(x):
        if len(shape) < 2 or (split_item != 0 and len(shape) > 2):
            wanted = "2 dimensions [M, K]" if split_item else "2 or more dimensions, the last of K"
            raise ValueError(f"argument 'x[{i}]' must have {wanted}, got {list(shape)}")
    for i, (k, _) in enumerate(weight):
        which = 0 if one_x else i
        if x[which][-1] != k:
            raise ValueError(
                f"group {i}: the columns of x[{which}] must match the rows of weight[{i}], "
                f"got x {list(x[which])} and weight {list(weight[i])}: {x[which][-1]} against {k}"
            )


def _cure(x: int, weights: int, entries: int) -> str:
    """What the numbers of tensors and of entries in group_list would be right for."""
    if x == weights and not entries:
        return "; pass split_item=0 for a list of results, 2 for one"
    if x == 1 and entries == weights:
        return "; pass split_item=1 for a list of results, 3 for one"
    if x == 1 and not entries:
        return f"; pass group_list, the rows of each of the {weights} groups, and split_item=1 or 3"
    if x == 1:
        return f"; pass as many weights as there are groups, {entries}, or a group_list of {weights} entries"
    if x == weights:
        return "; pass no group_list and split_item=0 or 2, or one x with all rows and split_item=1 or 3"
    return "; pass one x per weight with split_item=0 or 2, or one x, group_list and split_item=1 or 3"


def _split(of: str, shapes: tuple[Shape, ...], splits: Splits, rank: int, size: int) -> tuple[tuple[Shape, ...], Shape]:
    """Rows per rank for every "x" (of which this rank has its own) or "output" (all), checked, and their elements."""
    if splits is not None and len(splits) != len(shapes):
        raise ValueError(
            f"argument 'split_sizes' must have one list per {of}: expected {len(shapes)}, got {len(splits)}"
        )
    checked, counts = [], []
    for i, (here, *row) in enumerate(shapes):
        rows = here if of == "output" else here * size if splits is None else sum(splits[i])
        words = Words(
            uneven=f"{of} {i} has {rows} rows, which do not divide equally between {size} ranks; give 'split_sizes'",
            length=f"argument 'split_sizes' must have one number per rank, for {of} {i}",
            total=f"argument 'split_sizes' must add up to the {rows} rows of {of} {i}",
            negative=f"argument 'split_sizes' must not be negative, for {of} {i}",
            kind=ValueError,
        )
        split = () if splits is None else splits[i]
        if splits is not None and not split:
            raise ValueError(f"{words.length}\n  expected {size} splits, got none")
        check(split, rows, size, words, prod(row))
        split = split or (rows // size,) * size
        if of == "x" and split[rank] != here:
            hint = in_rows(split, prod(row)) if split[rank] == here * prod(row) else ""
            raise ValueError(f"argument 'x[{i}]' must have the {split[rank]} rows of rank {rank}, got {here}{hint}")
        checked.append(split)
        counts += [n * prod(row) for n in split]
    return tuple(checked), tuple(counts)


def _short(numbers: Sequence[int]) -> str:
    return str(list(numbers)) if len(numbers) <= 8 else f"{list(numbers[:8])}… ({len(numbers)})"
