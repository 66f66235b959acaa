"""What the benchmark measures: each operation's tensors, its call here and in gloo, and its right result.

A *case* is one row's question (operation, element counts, dtype, reduce op). A *job* is a case made ready on
one rank with one kind of memory: tensors, a call without arguments, and a check of what the call left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from unisono.group import Group

Call = Callable[[], object]

PERIOD = 97  # of the test values: a prime, so that data that lands in the wrong place is noticed
ROOT = 0


@dataclass(frozen=True)
class Op:
    """One operation as nccl-tests sees it: what its columns mean."""

    bus: Callable[[int], float]  # bus bandwidth ÷ algorithm bandwidth, by number of ranks
    buffers: Callable[[int], int]  # memory of all ranks together ÷ size column, by number of ranks
    reduces: bool = False
    rooted: bool = False
    cut: bool = False  # chunks per rank, equal or not


def _all_but_one(n: int) -> float:
    return (n - 1) / n


OPS: dict[str, Op] = {
    "all_reduce": Op(lambda n: 2 * (n - 1) / n, lambda n: n, reduces=True),
    "all_gather": Op(_all_but_one, lambda n: n + 1, cut=True),
    "reduce_scatter": Op(_all_but_one, lambda n: n + 1, reduces=True, cut=True),
    "broadcast": Op(lambda n: 1.0, lambda n: n, rooted=True),
    "reduce": Op(lambda n: 1.0, lambda n: n, reduces=True, rooted=True),
    "gather": Op(_all_but_one, lambda n: 2, rooted=True, cut=True),
    "scatter": Op(_all_but_one, lambda n: 2, rooted=True, cut=True),
    "all_to_all": Op(_all_but_one, lambda n: 2 * n, cut=True),
    "barrier": Op(lambda n: 0.0, lambda n: 0),
}

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
}

REDOPS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


@dataclass(frozen=True)
class Case:
    """One row's question; `counts` are elements per rank and add up to `count`."""

    op: str
    count: int
    counts: tuple[int, ...]
    dtype: str
    redop: str

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def size_bytes(self) -> int:
        return self.count * DTYPES[self.dtype].itemsize

    @property
    def even(self) -> bool:
        return len(set(self.counts)) == 1

    def start(self, rank: int) -> int:
        return sum(self.counts[:rank])

    def shapes(self, rank: int) -> tuple[int | None, int | None]:
        """Elements of this rank's input and output; an output of None works in place."""
        mine, root = self.counts[rank], rank == ROOT
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
        }[self.op]


@dataclass
class Job:
    """A case on one rank, on memory from `empty` (torch.empty or unisono.empty)."""

    case: Case
    rank: int
    input: torch.Tensor | None
    output: torch.Tensor | None

    @classmethod
    def make(cls, case: Case, rank: int, empty: Callable[..., torch.Tensor]) -> Job:
        shapes = case.shapes(rank)
        tensors = [None if n is None else empty(n, dtype=DTYPES[case.dtype]) for n in shapes]
        return cls(case, rank, *tensors)

    def clear(self) -> None:
        """All zero: a sum repeated in place stays 0 and never meets slow subnormal numbers."""
        for tensor in (self.input, self.output):
            if tensor is not None:
                tensor.zero_()

    def fill(self) -> None:
        """Small whole numbers that depend on rank and place, exact in every dtype."""
        if self.input is not None:
            gathers = self.case.op in ("all_gather", "gather")
            start = self.case.start(self.rank) if gathers else 0
            self.input.copy_(_tile(_values(self.case, self.rank), start, self.input.numel()))
        if self.output is not None:
            self.output.zero_()

    def count_wrong(self) -> int:
        """Elements of the result that differ from what the filled inputs must give."""
        expected = self._expected()
        result = self.input if self.output is None else self.output
        if expected is None or result is None:
            return 0
        return int(torch.ne(result, expected).sum())

    def _expected(self) -> torch.Tensor | None:
        case, rank = self.case, self.rank
        mine, first = case.counts[rank], case.start(rank)

        def pieces(parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
            return torch.cat([_tile(_values(case, owner), start, n) for owner, start, n in parts])

        if case.op == "all_reduce" or (case.op == "reduce" and rank == ROOT):
            return _tile(_reduced(case), 0, case.count)
        if case.op == "reduce":  # the others' tensors are untouched
            return pieces([(rank, 0, case.count)])
        if case.op == "broadcast":
            return pieces([(ROOT, 0, case.count)])
        if case.op == "reduce_scatter":
            return _tile(_reduced(case), first, mine)
        if case.op == "scatter":
            return pieces([(ROOT, first, mine)])
        if case.op == "all_to_all":
            return pieces([(r, first, mine) for r in range(case.ranks)])
        if self.output is None:  # a barrier, or a gather away from its root
            return None
        return pieces([(r, case.start(r), n) for r, n in enumerate(case.counts)])

    def unisono_call(self, group: Group) -> Call:
        """The Group method with everything bound that a user would write, and nothing else."""
        case, op = self.case, self.case.op
        counts: dict[str, Any] = {} if case.even else {"counts": list(case.counts)}
        redop: dict[str, Any] = {} if case.redop == "sum" else {"op": case.redop}
        x: Any = self.input
        y: Any = self.output
        if op == "barrier":
            return partial(group.barrier)
        if op == "all_reduce":
            return partial(group.all_reduce, x, **redop)
        if op == "reduce":
            return partial(group.reduce, x, ROOT, **redop)
        if op == "broadcast":
            return partial(group.broadcast, x, ROOT)
        if op == "all_gather":
            return partial(group.all_gather, y, x, **counts)
        if op == "reduce_scatter":
            return partial(group.reduce_scatter, y, x, **counts, **redop)
        if op == "gather":
            return partial(group.gather, y, x, ROOT, **counts)
        if op == "scatter":
            return partial(group.scatter, y, x, ROOT, **counts)
        if case.even:
            return partial(group.all_to_all, y, x)
        received = [case.counts[self.rank]] * case.ranks
        return partial(group.all_to_all, y, x, received, list(case.counts))

    def gloo_calls(self) -> dict[str, Call]:
        """What a user of gloo could write instead, by name; the fastest of these is the one compared with."""
        case, op, redop = self.case, self.case.op, REDOPS[self.case.redop]
        x: Any = self.input
        y: Any = self.output
        if op == "barrier":
            return {"barrier": dist.barrier}
        if op == "all_reduce":
            return {"all_reduce": partial(dist.all_reduce, x, redop)}
        if op == "reduce":
            return {"reduce": partial(dist.reduce, x, ROOT, redop)}
        if op == "broadcast":
            return {"broadcast": partial(dist.broadcast, x, ROOT)}
        if op == "all_gather":
            if case.even:
                into: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since 2.13
                return {"all_gather": partial(into, y, x)}
            slots = list(y.split(list(case.counts)))
            return {
                "broadcasts": partial(_gather_by_broadcasts, slots, x, self.rank),
                "send and recv": partial(_gather_by_p2p, slots, x, self.rank),
            }
        if op == "reduce_scatter":
            slices = list(x.split(list(case.counts)))
            whole: Any = torch.empty_like(x)
            mine = whole.split(list(case.counts))[self.rank]
            return {
                "reduce_scatter": partial(dist.reduce_scatter, y, slices, redop),
                "all_reduce of a copy": partial(_scatter_by_all_reduce, y, x, whole, mine, redop),
            }
        if op == "gather":
            gathered = None if y is None else list(y.split(list(case.counts)))
            if case.even:
                return {"gather": partial(dist.gather, x, gathered, ROOT)}
            return {"send and recv": partial(_root_gather_by_p2p, gathered, x, self.rank)}
        if op == "scatter":
            slices = [] if x is None else list(x.split(list(case.counts)))
            if case.even:
                return {"scatter": partial(dist.scatter, y, slices or None, ROOT)}
            return {"send and recv": partial(_root_scatter_by_p2p, y, slices, self.rank)}
        received = [case.counts[self.rank]] * case.ranks
        return {"all_to_all_single": partial(dist.all_to_all_single, y, x, received, list(case.counts))}


def _gather_by_broadcasts(slots: list[torch.Tensor], x: torch.Tensor, rank: int) -> None:
    slots[rank].copy_(x)
    works = [dist.broadcast(slot, r, async_op=True) for r, slot in enumerate(slots) if slot.numel()]
    for work in works:
        work.wait()


def _gather_by_p2p(slots: list[torch.Tensor], x: torch.Tensor, rank: int) -> None:
    others = [r for r in range(len(slots)) if r != rank]
    works = [dist.irecv(slots[r], r) for r in others if slots[r].numel()]
    if x.numel():
        works += [dist.isend(x, r) for r in others]
    slots[rank].copy_(x)
    for work in works:
        if work is not None:
            work.wait()


def _scatter_by_all_reduce(
    y: torch.Tensor,
    x: torch.Tensor,
    whole: torch.Tensor,
    mine: torch.Tensor,
    redop: dist.ReduceOp.RedOpType,
) -> None:
    whole.copy_(x)
    dist.all_reduce(whole, redop)
    y.copy_(mine)


def _root_gather_by_p2p(slots: list[torch.Tensor] | None, x: torch.Tensor, rank: int) -> None:
    if slots is None:
        if x.numel():
            dist.send(x, ROOT)
        return
    works = [dist.irecv(slot, r) for r, slot in enumerate(slots) if r != rank and slot.numel()]
    slots[rank].copy_(x)
    for work in works:
        if work is not None:
            work.wait()


def _root_scatter_by_p2p(y: torch.Tensor, slices: list[torch.Tensor], rank: int) -> None:
    if rank != ROOT:
        if y.numel():
            dist.recv(y, ROOT)
        return
    works = [dist.isend(part, r) for r, part in enumerate(slices) if r != rank and part.numel()]
    y.copy_(slices[rank])
    for work in works:
        if work is not None:
            work.wait()


def _values(case: Case, rank: int) -> torch.Tensor:
    """This rank's test values for places 0 .. PERIOD-1; small enough that a product of many stays exact."""
    spread = 2 if case.redop == "product" else 4
    table = torch.arange(PERIOD) * (rank + 3) % PERIOD % spread + 1
    return table.to(DTYPES[case.dtype])


def _reduced(case: Case) -> torch.Tensor:
    dtype = DTYPES[case.dtype]
    wide = torch.int64 if not dtype.is_floating_point else torch.promote_types(dtype, torch.float32)
    rows = torch.stack([_values(case, r).to(wide) for r in range(case.ranks)])
    total = rows[0]
    for row in rows[1:]:
        if case.redop in ("sum", "avg"):
            total = total + row
        elif case.redop == "product":
            total = total * row
        elif case.redop in ("min", "max"):
            total = torch.minimum(total, row) if case.redop == "min" else torch.maximum(total, row)
        else:
            total = {"band": total & row, "bor": total | row, "bxor": total ^ row}[case.redop]
    if case.redop == "avg":
        trunc = None if dtype.is_floating_point else "trunc"
        total = torch.div(total, case.ranks, rounding_mode=trunc)
    return total.to(dtype)


def _tile(table: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`count` values of a sequence that repeats `table` for ever, from place `start` on."""
    offset = start % PERIOD
    return table.repeat((offset + count) // PERIOD + 1)[offset : offset + count]
