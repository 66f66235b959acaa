"""A case's torch tensors on one rank, and the calls a user of unisono would write for it.

There are four ways to call: the Group's method (`group`), torch.distributed on the unisono backend (`dist`), the
functional form (`comm_func`), and the documented names of the uneven three (`uneven`, or `on_gloo` on a gloo group).
Parts of the package that are not there, and operations a way has no name for, raise Lacking.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .apart.cases import ROOT, STALE, WINDOW, Case, Lacking, Piece
from .apart.turns import Call

if TYPE_CHECKING:
    from unisono.group.group import Group

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


def tile(piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    table = torch.tensor(piece.turned(), dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(dtype)
    return table.repeat(piece.count // len(piece.table) + 1)[: piece.count]


@dataclass
class Job:
    """A case on one rank, on memory from `empty` (torch.empty or unisono.empty)."""

    case: Case
    rank: int
    input: torch.Tensor | None
    output: torch.Tensor | None

    @classmethod
    def make(cls, case: Case, rank: int, empty: Callable[..., torch.Tensor], room: Sequence[Case] = ()) -> Job:
        """On fresh memory; cases in `room` may be made :meth:`on_same_memory`."""
        dtype = getattr(torch, case.dtype)
        most = [max([n or 0 for n in sizes]) for sizes in zip(*(c.shapes(rank) for c in (case, *room)), strict=True)]
        return cls(case, rank, *(empty(n, dtype=dtype) for n in most)).on_same_memory(case)

    def on_same_memory(self, case: Case) -> Job:
        """Where pages lie in memory makes more of a difference than most things that are compared."""
        both = zip((self.input, self.output), case.shapes(self.rank), strict=True)
        return Job(case, self.rank, *(None if n is None or t is None else t.as_strided((n,), (1,)) for t, n in both))

    def clear(self) -> None:
        """All zero: a sum repeated in place stays 0 and never meets slow subnormal numbers."""
        for tensor in (self.input, self.output):
            if tensor is not None:
                tensor.zero_()

    def fill(self) -> None:
        """Test values into the input, and into the output what no right result holds."""
        if self.input is not None:
            self.input.copy_(tile(self.case.input(self.rank), self.input.dtype))
        if self.output is not None:
            self.output.fill_(STALE)

    def count_wrong(self, returned: object) -> int:
        """Elements that differ from what the filled inputs must give, in the tensor returned or else in ours."""
        pieces = self.case.expected(self.rank)
        result = self.input if self.output is None else self.output
        if isinstance(returned, tuple) and returned and isinstance(returned[0], torch.Tensor):
            returned = returned[0]
        if isinstance(returned, torch.Tensor):
            result = returned
        if pieces is None or result is None:
            return 0
        expected = torch.cat([tile(piece, result.dtype) for piece in pieces])
        if expected.numel() != result.numel():
            return max(expected.numel(), result.numel())
        return int(torch.ne(result.reshape(-1), expected).sum())

    def call(self, way: str, group: Group, process_group: Any) -> Call:
        """The call with everything bound that a user would write, and nothing else."""
        if way == "group":
            return self._group_call(group)
        if way == "dist":
            return torch_call(self, process_group)
        if way == "comm_func":
            return self._functional_call(process_group or group)
        return self._uneven_call(process_group or group)

    def _group_call(self, group: Group) -> Call:
        case, op = self.case, self.case.op
        counts: dict[str, Any] = {} if case.even else {"counts": list(case.counts)}
        redop: dict[str, Any] = {} if case.redop == "sum" else {"op": case.redop}
        x: Any = self.input
        y: Any = self.output
        if op == "barrier":
            return group.barrier
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
        if op == "p2p_latency":
            return ping(self, group.send, group.recv)
        if op == "p2p_bandwidth":
            start_send, start_recv = partial(group.send, async_op=True), partial(group.recv, async_op=True)
            return stream(self, start_send, start_recv, group.send, group.recv)
        if case.even:
            return partial(group.all_to_all, y, x)
        return partial(group.all_to_all, y, x, *self.received_and_sent())

    def _functional_call(self, group: Any) -> Call:
        functional = _module("comm_func")
        case, op = self.case, self.case.op
        x: Any = self.input
        y: Any = self.output
        redop = "prod" if case.redop == "product" else case.redop
        if op == "barrier":
            return partial(functional.barrier, group=group)
        if op == "all_reduce":
            return partial(functional.all_reduce, x, redop, group)
        if op == "all_gather":
            if case.even:
                return partial(functional.all_gather_into_tensor, x, group)
            return partial(_of(functional, "all_gather_into_tensor_uneven"), x, list(case.counts), group)
        if op == "reduce_scatter":
            if case.even:
                return partial(functional.reduce_scatter_tensor, x, redop, group)
            return partial(_of(functional, "reduce_scatter_tensor_uneven"), x, list(case.counts), redop, group)
        if op == "broadcast":
            return partial(functional.broadcast, x, ROOT, group)
        if op == "reduce":
            return partial(functional.reduce, x, ROOT, redop, group)
        if op == "all_to_all" and case.even:
            return partial(functional.all_to_all_single_with_output_shape, tuple(y.shape), x, group=group)
        if op == "all_to_all":
            return partial(functional.all_to_all_v_c, y, x, list(case.counts) * case.ranks, group)
        if op == "gather" and case.even:
            return partial(functional.gather_into_tensor, x, ROOT, group)
        if op == "scatter" and case.even:
            whole = x if x is not None else torch.empty(case.count, dtype=y.dtype)  # for its shape
            return partial(functional.scatter_tensor, whole, ROOT, group)
        if op == "p2p_latency":
            return ping(self, partial(functional.send, group=group), partial(functional.recv, group=group))
        raise Lacking(f"not measured for {op}" if case.even else f"there is no functional {op} of uneven chunks")

    def _uneven_call(self, group: Any) -> Call:
        unisono = importlib.import_module("unisono")
        case, splits = self.case, list(self.case.counts)
        if case.op == "all_gather":
            name = "all_gather_into_tensor_uneven"
            return partial(_of(unisono, name), self.output, self.input, splits, group=group)
        if case.op == "reduce_scatter":
            name = "reduce_scatter_tensor_uneven"
            redop = REDOPS[case.redop]
            return partial(_of(unisono, name), self.output, self.input, splits, op=redop, group=group)
        if case.op == "all_to_all":
            return partial(_of(unisono, "all_to_all_vc"), self.output, self.input, [splits] * case.ranks, group=group)
        raise Lacking(f"there is no uneven {case.op}")

    def received_and_sent(self) -> tuple[list[int], list[int]]:
        """Elements from each rank and to each rank, of an all_to_all."""
        return [self.case.counts[self.rank]] * self.case.ranks, list(self.case.counts)


def torch_call(job: Job, process_group: Any) -> Call:
    """The same by torch.distributed, where it has one call for it."""
    case, op, redop = job.case, job.case.op, REDOPS[job.case.redop]
    x: Any = job.input
    y: Any = job.output
    group: dict[str, Any] = {"group": process_group}
    counts = list(case.counts)
    if op == "barrier":
        return partial(dist.barrier, **group)
    if op == "all_reduce":
        return partial(dist.all_reduce, x, redop, **group)
    if op == "reduce":
        return partial(dist.reduce, x, ROOT, redop, **group)
    if op == "broadcast":
        return partial(dist.broadcast, x, ROOT, **group)
    if op == "all_gather":
        if case.even:
            into: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since 2.13
            return partial(into, y, x, **group)
        return partial(dist.all_gather, list(y.split(counts)), x, **group)
    if op == "reduce_scatter":
        if case.even:
            from_one: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            return partial(from_one, y, x, redop, **group)
        return partial(dist.reduce_scatter, y, list(x.split(counts)), redop, **group)
    if op == "gather":
        return partial(dist.gather, x, None if y is None else list(y.split(counts)), ROOT, **group)
    if op == "scatter":
        return partial(dist.scatter, y, None if x is None else list(x.split(counts)), ROOT, **group)
    if op == "p2p_latency":
        return ping(job, partial(dist.send, **group), partial(dist.recv, **group))
    if op == "p2p_bandwidth":
        calls = [partial(fn, **group) for fn in (dist.isend, dist.irecv, dist.send, dist.recv)]
        return stream(job, *calls)
    return partial(dist.all_to_all_single, y, x, *job.received_and_sent(), **group)


def ping(job: Job, send: Any, recv: Any) -> Call:
    """There and back between the first and the last rank."""
    x, y, last = job.input, job.output, job.case.ranks - 1

    def first() -> object:
        send(x, last)
        return recv(y, last)

    def answering() -> object:
        received = recv(y, 0)
        send(x, 0)
        return received

    return _at_ends(job, first, answering)


def stream(job: Job, start_send: Any, start_recv: Any, send: Any, recv: Any) -> Call:
    """WINDOW messages in flight from the first rank to the last, then a note back that all have come."""
    last = job.case.ranks - 1
    x, y, note = job.input, job.output, torch.zeros(1, dtype=getattr(torch, job.case.dtype))

    def sending() -> None:
        for work in [start_send(x, last) for _ in range(WINDOW)]:
            work.wait()
        recv(note, last)

    def receiving() -> None:
        for work in [start_recv(y, 0) for _ in range(WINDOW)]:
            work.wait()
        send(note, 0)

    return _at_ends(job, sending, receiving)


def _at_ends(job: Job, first: Call, last: Call) -> Call:
    if job.case.ranks < 2:
        raise Lacking("a message needs two ranks")
    return {0: first, job.case.ranks - 1: last}.get(job.rank, _nothing)


def _nothing() -> None:
    """What the ranks between the two ends of a message do."""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"unisono.{name}")
    except ModuleNotFoundError:
        raise Lacking(f"this unisono has no {name}") from None


def _of(module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        raise Lacking(f"this {module.__name__} has no {name}")
    return found
