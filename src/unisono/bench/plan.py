"""Which rows a run has: sizes, splits and operations from the command line to cases."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .apart.cases import DDP_LAYER, ITEM_BYTES, MATMUL_N, OPS, Case

UNEVEN_SPLITS = ("1:3", "1:15", "0:1", "zipf")
# Names on the command line that stand for an operation at splits of their own.
ALIASES = {"all_gather_uneven": "all_gather", "reduce_scatter_uneven": "reduce_scatter"}
SMALL_WAYS = ("group", "comm_func", "dist", "uneven")
SMALL_UNEVEN = ("all_gather", "reduce_scatter", "all_to_all")
SMALL_SPLIT = "1:3"
DEFAULT_OPS = ("all_reduce", "all_gather", "all_gather_uneven", "reduce_scatter", "reduce_scatter_uneven", "barrier")


@dataclass(frozen=True, order=True)
class Place:
    """What the ranks share the machine with, and how they are bound to it."""

    quota: int = 0  # percent of one CPU for all ranks together; 0: no limit
    pin: bool = False  # each rank on one CPU, round robin
    busy: int = 0  # neighbours on the same CPUs

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Place:
        return cls(**{name: row[name] for name in ("quota", "pin", "busy") if name in row})

    def __str__(self) -> str:
        words = [f"{self.busy} busy neighbours"] if self.busy else []
        words += ["pinned"] if self.pin else []
        words += [f"quota {self.quota} %"] if self.quota else []
        return ", ".join(words)


ALONE = Place()
MATRIX_RANKS = (2, 3, 4, 8)
MATRIX_BYTES = 5 * 4 * DDP_LAYER  # of the gradients
MATRIX_FREE = tuple(Place(busy=busy) for busy in (0, 2, 4))
MATRIX_PINNED = tuple(Place(busy=busy, pin=True) for busy in (0, 2, 4))
MATRIX_QUOTA = (Place(quota=100),)


@dataclass(frozen=True)
class Item:
    """One row to be measured."""

    case: Case
    split: str
    ways: tuple[str, ...] = ("group",)
    place: Place = ALONE

    @property
    def table(self) -> tuple[Place, str, str, int, str]:
        """Rows with the same stand under one head."""
        return self.place, self.case.op, self.split, self.case.ranks, self.case.dtype


def parse_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([kKmMgG]?)(?:i?[bB])?", text)
    if not found or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected bytes such as 8, 64K, 256M, got {text!r}")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2].lower()]


def parse_numbers(least: int, what: str) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        try:
            numbers = [int(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if not numbers or min(numbers) < least:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return numbers

    return parse


parse_ranks = parse_numbers(1, "rank counts such as 2 or 2,4,8")


def parse_splits(text: str) -> list[str]:
    splits = text.split(",")
    for split in splits:
        if split in ("even", "zipf"):
            continue
        if not re.fullmatch(r"\d+(:\d+)*", split):
            raise argparse.ArgumentTypeError(f"expected even, zipf, or weights such as 1:3 or 0:1, got {split!r}")
        if not any(int(part) for part in split.split(":")):
            raise argparse.ArgumentTypeError(f"at least one weight must be above 0, got {split!r}")
    return splits


def split_counts(count: int, split: str, ranks: int) -> tuple[int, ...]:
    """Elements per rank; weights repeat when there are more ranks, zipf gives rank r one part in r + 1.

    >>> split_counts(8, "1:3", 2), split_counts(11, "zipf", 3)
    ((2, 6), (6, 3, 2))
    """
    if split == "zipf":
        weights = [1.0 / (r + 1) for r in range(ranks)]
    else:
        parts = [1.0] if split == "even" else [float(part) for part in split.split(":")]
        weights = [parts[r % len(parts)] for r in range(ranks)]
    if not any(weights):
        weights[-1] = 1.0
    total = sum(weights)
    bounds = [int(count * sum(weights[:r]) / total + 0.5) for r in range(ranks)] + [count]
    return tuple(last - first for first, last in pairwise(bounds))


def sizes_between(least: int, most: int, factor: int) -> list[int]:
    """As nccl-tests: from `least`, times `factor`, up to `most`."""
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes


def op_names() -> list[str]:
    """All names that may stand on the command line."""
    return [*OPS, *ALIASES]


def make_case(op: str, size: int, split: str, ranks: int, dtype: str, redop: str) -> Case:
    """The case nearest to a size: whole elements, equal chunks where the split is even, whole rows of a matmul."""
    count = max(size // ITEM_BYTES[dtype], 1)
    if op == "barrier":
        return Case(op, 0, (0,) * ranks, dtype, redop)
    if op == "matmul_all_reduce":
        count = max(count // MATMUL_N, 1) * MATMUL_N
    elif op == "ddp_step":
        count = max(count // DDP_LAYER, 1) * DDP_LAYER
    elif OPS[op].cut and split == "even":
        count = -(-count // ranks) * ranks
    return Case(op, count, split_counts(count, split if OPS[op].cut else "even", ranks), dtype, redop)


def make_items(
    ops: Sequence[str],
    sizes: Sequence[int],
    splits: Sequence[str] | None,
    ranks: int,
    dtype: str = "float32",
    redop: str = "sum",
    ways: tuple[str, ...] = ("group",),
    place: Place = ALONE,
) -> list[Item]:
    """The rows of a run on `ranks` ranks, each once, table by table."""
    found: dict[Item, None] = {}
    for name in ops:
        op = ALIASES.get(name, name)
        if op.startswith("p2p") and ranks < 2:
            continue
        chosen = splits or (UNEVEN_SPLITS if name in ALIASES else ("even",))
        for split in chosen if OPS[op].cut else ("-",):
            for size in sizes if op != "barrier" else [0]:
                found[Item(make_case(op, size, split, ranks, dtype, redop), split, ways, place)] = None
    return list(found)


def small_items(ranks: int, place: Place = ALONE) -> list[Item]:
    """One row per verb at 8 bytes, and per uneven verb at the smallest size with such chunks."""
    verbs = [op for op in OPS if op not in ("p2p_bandwidth", "matmul_all_reduce", "ddp_step")]
    elements = sum((1, 3)[r % 2] for r in range(ranks))  # one for each weight of SMALL_SPLIT
    return [
        *make_items(verbs, [8], None, ranks, ways=SMALL_WAYS[:-1], place=place),
        *make_items(SMALL_UNEVEN, [4 * elements], [SMALL_SPLIT], ranks, ways=SMALL_WAYS, place=place),
    ]


def readme_items(ranks: int, place: Place = ALONE) -> list[Item]:
    """The rows of the README's table: a small call, and two sizes of the three verbs, uneven where they can be."""
    return [
        *make_items(["all_reduce"], [8, 256 << 10, 16 << 20], None, ranks, place=place),
        *make_items(["all_gather", "reduce_scatter"], [256 << 10, 16 << 20], [SMALL_SPLIT], ranks, place=place),
    ]


def by_ranks(items: Iterable[Item]) -> dict[tuple[int, bool, int], list[Item]]:
    """What is measured on the same ranks: by their number, whether they are pinned, and their quota."""
    found: dict[tuple[int, bool, int], list[Item]] = {}
    for item in items:
        found.setdefault((item.case.ranks, item.place.pin, item.place.quota), []).append(item)
    return found
