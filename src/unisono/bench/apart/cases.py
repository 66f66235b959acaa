"""What a row asks, and its right answer, in plain Python: the same for torch's ranks and for the peers'.

A *case* is one row's question (operation, element counts, dtype, reduce op). Its test values are a short sequence of
small whole numbers, repeated for ever, that differs from rank to rank; sums and products of them are exact in every
dtype, so right means equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

PERIOD = 97  # of the test values: a prime, so that data that lands in the wrong place is noticed
ROOT = 0
STALE = 101  # what outputs hold before the call; odd and large, so that no right result is full of it
WINDOW = 16  # messages in flight in one call of p2p_bandwidth
MATMUL_N = 1024  # columns of the matmul's result
MATMUL_K = 512  # what it sums over
DDP_LAYER = 256 * 256  # elements of a layer's gradient in a training step
PRODUCT_RANKS = 6  # ranks from here on have only ones in a product, so that it stays small

ITEM_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
FLOATS = ("float32", "float64", "float16", "bfloat16")
REDOPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


class Lacking(Exception):
    """This library has no such thing; the text says what."""


def _all_but_one(n: int) -> float:
    return (n - 1) / n


def _one(n: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Op:
    """One operation as nccl-tests sees it: what its columns mean."""

    about: str
    bus: Callable[[int], float]  # bus bandwidth ÷ algorithm bandwidth, by number of ranks
    buffers: Callable[[int], float]  # memory of all ranks together ÷ size column, by number of ranks
    reduces: bool = False
    rooted: bool = False
    cut: bool = False  # chunks per rank, equal or not
    messages: int = 1  # in one call; the time column is per message


OPS: dict[str, Op] = {
    "all_reduce": Op("combine over all ranks, in place", lambda n: 2 * (n - 1) / n, lambda n: n, reduces=True),
    "all_gather": Op("every rank's chunk to all ranks", _all_but_one, lambda n: n + 1, cut=True),
    "reduce_scatter": Op("combine, each rank keeps its chunk", _all_but_one, lambda n: n + 1, reduces=True, cut=True),
    "broadcast": Op("the root's tensor to all ranks", _one, lambda n: n, rooted=True),
    "reduce": Op("combine into the root's tensor", _one, lambda n: n, reduces=True, rooted=True),
    "gather": Op("every rank's chunk to the root", _all_but_one, lambda n: 2, rooted=True, cut=True),
    "scatter": Op("the root's chunks to their ranks", _all_but_one, lambda n: 2, rooted=True, cut=True),
    "all_to_all": Op("a chunk from each rank to each rank", _all_but_one, lambda n: 2 * n, cut=True),
    "barrier": Op("all wait for all", lambda n: 0.0, lambda n: 0),
    "p2p_latency": Op("send there and back between the first and the last rank", _one, lambda n: 4, messages=2),
    "p2p_bandwidth": Op(
        f"{WINDOW} sends in flight from the first to the last rank", _one, lambda n: 4, messages=WINDOW
    ),
    "matmul_all_reduce": Op(
        f"x[m, {MATMUL_K}] @ w[{MATMUL_K}, {MATMUL_N}], summed over the ranks; size is the result's",
        lambda n: 2 * (n - 1) / n,
        lambda n: 4 * n,
        reduces=True,
    ),
    "ddp_step": Op(
        "a training step under DDP; size is that of the gradients, in whole layers of 256 KiB",
        lambda n: 2 * (n - 1) / n,
        lambda n: 6 * n,
        reduces=True,
    ),
}


@dataclass(frozen=True)
class Case:
    """One row's question; `counts` are elements per rank and add up to `count`."""

    op: str
    count: int
    counts: tuple[int, ...]
    dtype: str = "float32"
    redop: str = "sum"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        return cls(**{**data, "counts": tuple(data["counts"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def size_bytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]

    @property
    def even(self) -> bool:
        return len(set(self.counts)) == 1

    def evened(self) -> Case:
        """As many elements in chunks as equal as can be."""
        edges = [self.count * r // self.ranks for r in range(self.ranks + 1)]
        return replace(self, counts=tuple(b - a for a, b in pairwise(edges)))

    def start(self, rank: int) -> int:
        return sum(self.counts[:rank])

    def shapes(self, rank: int) -> tuple[int | None, int | None]:
        """Elements of this rank's input and output; an output of None works in place."""
        mine, root = self.counts[rank], rank == ROOT
        at_end = rank in (0, self.ranks - 1)
        p2p = (self.count, self.count) if at_end else (None, None)
        return {
            "all_reduce": (self.count, None),
            "reduce": (self.count, None),
            "broadcast": (self.count, None),
            "all_gather": (mine, self.count),
            "reduce_scatter": (self.count, mine),
            "gather": (mine, self.count if root else None),
            "scatter": (self.count if root else None, mine),
            "all_to_all": (self.count, self.ranks * mine),
            "barrier": (None, None),
            "p2p_latency": p2p,
            "p2p_bandwidth": p2p,
        }[self.op]

    def input(self, rank: int) -> Piece:
        """What this rank's input is filled with."""
        n = self.shapes(rank)[0] or 0
        return Piece(self.values(rank), self.start(rank) if self.op in ("all_gather", "gather") else 0, n)

    def expected(self, rank: int) -> list[Piece] | None:
        """What this rank's result must hold, piece by piece; None if it has no result."""
        mine, first = self.counts[rank], self.start(rank)
        if self.op == "barrier" or (self.op in ("gather", "reduce") and rank != ROOT):  # gloo spoils them in a reduce
            return None
        if self.op in ("p2p_latency", "p2p_bandwidth"):
            other = {0: self.ranks - 1, self.ranks - 1: 0}.get(rank)
            if other is None or (self.op == "p2p_bandwidth" and rank == 0):  # nothing comes back but a note
                return None
            return [Piece(self.values(other), 0, self.count)]
        if self.op in ("all_reduce", "reduce"):
            return [Piece(self.combined(), 0, self.count)]
        if self.op == "broadcast":
            return [Piece(self.values(ROOT), 0, self.count)]
        if self.op == "reduce_scatter":
            return [Piece(self.combined(), first, mine)]
        if self.op == "scatter":
            return [Piece(self.values(ROOT), first, mine)]
        if self.op == "all_to_all":
            return [Piece(self.values(r), first, mine) for r in range(self.ranks)]
        return [Piece(self.values(r), self.start(r), n) for r, n in enumerate(self.counts)]

    def values(self, rank: int) -> list[int]:
        """This rank's test values for places 0 … PERIOD-1."""
        if self.redop == "product":
            return [i * (rank + 3) % PERIOD % 2 + 1 if rank < PRODUCT_RANKS else 1 for i in range(PERIOD)]
        return [i * (rank + 3) % PERIOD % 4 + 1 for i in range(PERIOD)]

    def combined(self) -> list[float]:
        """The values of all ranks, reduced; whole numbers but for the average of floats."""
        totals: list[float] = []
        for column in zip(*(self.values(r) for r in range(self.ranks)), strict=True):
            total = column[0]
            for value in column[1:]:
                total = _STEPS[self.redop](total, value)
            average = total / self.ranks if self.dtype in FLOATS else total // self.ranks
            totals.append(average if self.redop == "avg" else total)
        return totals


_STEPS: dict[str, Callable[[int, int], int]] = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "min": min,
    "max": max,
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
}


@dataclass(frozen=True)
class Piece:
    """`count` values of a sequence that repeats `table` for ever, from place `start` on."""

    table: list[Any]
    start: int
    count: int

    def turned(self) -> list[Any]:
        """The table from `start` on: repeating this gives the piece."""
        at = self.start % PERIOD
        return self.table[at:] + self.table[:at]
