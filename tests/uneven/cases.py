"""An uneven call as data, how a rank makes it on one of three kinds of group, and how it checks the result.

Every rank makes all ranks' inputs from the seed and computes alone what it must get (tests/reference.py), by bits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import unisono
from tests import reference
from tests.multihost.pretended import pretending

KINDS = ("unisono", "group", "gloo")  # a process group of ours, a unisono.Group itself, another backend


@dataclass(frozen=True)
class Case:
    verb: str  # all_gather, reduce_scatter, all_to_all
    splits: tuple[Any, ...] | None  # rows per rank, None for equal; for all_to_all the matrix
    rows: int = 0  # of the whole, if splits is None
    row: tuple[int, ...] = ()  # shape of a row
    dtype: str = "float32"
    op: str = "sum"
    heap: bool = False
    in_place: bool = False
    flat_part: bool = False  # the part has another shape
    seed: int = 0


@contextlib.contextmanager
def world(group: Any, kind: str, path: str) -> Iterator[Any]:
    """A group of this kind over the ranks of `group`, and the default process group meanwhile."""
    if kind == "group":
        yield group
        return
    if dist.is_initialized():  # the tests of the torch backend keep one in their ranks
        dist.destroy_process_group()
    store = dist.FileStore(path, group.size)
    # Over hosts: the last rank alone on the second, so that sums have the order of one host.
    hosts, backend = (",".join(["0"] * (group.size - 1) + ["1"]), "unisono") if kind == "hosts" else ("", kind)
    with pretending(hosts):
        limit = timedelta(seconds=60)
        dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=limit)
    try:
        yield dist.group.WORLD
        dist.barrier()  # nobody leaves while others still talk
    finally:
        dist.destroy_process_group()


def premul_sum(factor: float) -> Any:
    return dist._make_nccl_premul_sum(factor)


def factor_of(rank: int) -> float:
    return 0.5 + 0.25 * rank


class Started:
    """A call that has been made; `finish` waits and says what is wrong."""

    def __init__(self, case: Case, group: Any, rank: int, size: int, async_op: bool) -> None:
        self.case = case
        make = unisono.empty if case.heap else torch.empty
        dtype = reference.dtype_of(case.dtype)
        width = math.prod(case.row)
        if case.verb == "all_to_all":
            inputs = [reference.make_input(case.dtype, sum(line), r, case.seed) for r, line in enumerate(case.splits)]
            self.want = reference.expected(rank, "all_to_all", inputs, case.splits)
            self.source = make(inputs[rank].numel(), dtype=dtype)
            self.source.copy_(inputs[rank])
            self.kept = inputs[rank]
            self.output = make(self.want.numel(), dtype=dtype)
            self.work = unisono.all_to_all_vc(self.output, self.source, case.splits, group, async_op)
            return
        splits = case.splits or (case.rows // size,) * size
        counts = [n * width for n in splits]
        whole = make(sum(splits), *case.row, dtype=dtype)
        part_shape = (counts[rank],) if case.flat_part else (splits[rank], *case.row)
        mine = whole[sum(splits[:rank]) : sum(splits[: rank + 1])] if case.in_place else make(*part_shape, dtype=dtype)
        if case.verb == "all_gather":
            inputs = [reference.make_input(case.dtype, n, r, case.seed) for r, n in enumerate(counts)]
            mine.copy_(inputs[rank].view(mine.shape))
            self.want = reference.joined(inputs)
            self.source, self.kept, self.output = mine, inputs[rank], whole
            self.work = unisono.all_gather_into_tensor_uneven(whole, mine, case.splits, group, async_op)
        else:
            inputs = [reference.make_input(case.dtype, sum(counts), r, case.seed) for r in range(size)]
            whole.copy_(inputs[rank].view(whole.shape))
            factors = [factor_of(r) for r in range(size)]
            self.want = reference.expected(rank, "reduce_scatter", inputs, counts, case.op, factors=factors)
            self.source, self.kept, self.output = whole, inputs[rank], mine
            op: Any = getattr(dist.ReduceOp, case.op.upper())
            if case.op == "premul_sum":
                op = premul_sum(factor_of(rank))
            self.work = unisono.reduce_scatter_tensor_uneven(mine, whole, case.splits, op, group, async_op)

    def finish(self) -> list[str]:
        if self.work is not None:
            self.work.wait()
        found = reference.difference(self.output, self.want, signs_of_zero=self.case.op not in ("min", "max"))
        complaints = [f"{self.case}: {found}"] if found else []
        if not self.case.in_place and reference.difference(self.source, self.kept):
            complaints.append(f"{self.case}: the input was changed")
        return complaints


def run(group: Any, kind: str, path: str, cases: list[Case], in_flight: int = 0) -> list[str]:
    """Make the calls, `in_flight` of them at once if that is not 0; returns complaints."""
    complaints: list[str] = []
    with world(group, kind, path) as of:
        if not in_flight:
            for case in cases:
                started = Started(case, of, group.rank, group.size, False)
                if started.work is not None:
                    complaints.append(f"{case}: a synchronous call returned {started.work!r}")
                complaints += started.finish()
            return complaints
        for i in range(0, len(cases), in_flight):
            under_way = [Started(case, of, group.rank, group.size, True) for case in cases[i : i + in_flight]]
            for started in reversed(under_way):  # not in the order in which they were made
                complaints += started.finish()
    return complaints


def check(pool: Any, kind: str, tmp_path: Any, cases: list[Case], in_flight: int = 0) -> None:
    results = pool.run(run, kind, str(tmp_path / "store"), cases, in_flight)
    lines = [f"rank {rank}: {line}" for rank, complaints in enumerate(results) for line in complaints]
    assert not lines, f"{len(lines)} complaints, the first are:\n  " + "\n  ".join(lines[:8])


def splits_for(size: int, unit: int) -> list[tuple[int, ...]]:
    """Equal, 1:3, 1:15, 0:1, one rank has all, none has any, all different."""
    skewed = [unit] * size
    skewed[-1] = 15 * unit
    return [
        (unit,) * size,
        tuple(unit * (1 + 2 * (r % 2)) for r in range(size)),
        tuple(skewed),
        tuple(unit * (r % 2) for r in range(size)),
        (0,) * (size - 1) + (unit * size,),
        (0,) * size,
        tuple(unit * (r + 1) for r in range(size)),
    ]
