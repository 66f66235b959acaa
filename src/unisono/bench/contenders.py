"""Who takes part in a row inside unisono's own ranks: unisono by each way of calling and kind of memory, and gloo.

Every rank makes the same list in the same order. What is refused, by all ranks alike, is lacking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import unisono

from .apart.cases import Case, Lacking
from .apart.turns import Call, timed
from .ddp_jobs import DdpJob
from .gloo_calls import gloo_calls
from .jobs import Job
from .link import Link
from .matmul_jobs import MatmulJob

if TYPE_CHECKING:
    from unisono.group.group import Group

KINDS = ("heap", "ordinary")
EVEN = "even"  # the Group's methods on as many bytes in equal chunks, to see what skew costs
ON_GLOO = "on_gloo"  # the uneven names on a gloo group: no kind of memory makes a difference there
WAYS = ("group", "dist", "comm_func", "uneven", EVEN, ON_GLOO)
OURS = (*KINDS, "fused", ON_GLOO)  # names in the table that are no rivals
LIMIT = "limit"


@dataclass(frozen=True)
class Order:
    """How long and against whom a row is measured."""

    kinds: tuple[str, ...] = KINDS
    ways: tuple[str, ...] = ("group",)
    gloo: bool = True
    check: bool = True
    rounds: int | None = None  # None: as many as fit into `seconds`, at least 15
    seconds: float = 0.6


@dataclass
class Contender:
    """One way to do the case on this rank."""

    name: str  # as in the table: "heap", "dist ordinary", "gloo"
    variant: str
    call: Call
    align: Call  # a barrier of the same library, so that the ranks start together
    count_wrong: Callable[[object], int]
    fill: Call
    ours: bool = False  # the Group's own methods: what they refuse is a fault, not a lack

    def check(self) -> int:
        self.fill()
        self.align()
        return self.count_wrong(self.call())

    def run(self, warmup: int, calls: int) -> float:
        """Seconds per call on this rank."""
        for _ in range(warmup):
            self.call()
        self.align()
        return timed(self.call, calls)


@dataclass
class Groups:
    """The groups that this rank is in."""

    direct: Group
    gloo: Any = None
    backend: Any = None  # a ProcessGroup of the unisono backend
    backend_lacks: str = ""
    link: Link | None = None  # to other hosts, if there are several


def contenders_of(groups: Groups, case: Case, order: Order) -> tuple[list[Contender], dict[str, str], list[Job]]:
    """The list, what is lacking by name, and the jobs whose tensors are to be cleared before timing."""
    if case.op == "matmul_all_reduce":
        found, lacks = _matmul_contenders(groups, case, order)
        return found, lacks, []
    if case.op == "ddp_step":
        found, lacks = _ddp_contenders(groups, case, order)
        return found, lacks, []
    found, lacks = [], {}
    room = (case.evened(),) if EVEN in order.ways else ()
    jobs = {kind: Job.make(case, groups.direct.rank, _memory(kind), room) for kind in order.kinds}
    for way in order.ways:
        if way == ON_GLOO:
            continue
        if way == EVEN and case.even:
            lacks[EVEN] = "the chunks are equal already"
            continue
        for kind in order.kinds:
            name, job = kind if way == "group" else f"{way} {kind}", jobs[kind]
            if way == EVEN:
                job = jobs[name] = job.on_same_memory(case.evened())
            try:
                call = _call(job, way, groups)
            except Lacking as why:
                lacks[name] = str(why)
                continue
            found.append(_contender(name, "", call, groups.direct.barrier, job, way == "group"))
    if order.gloo or ON_GLOO in order.ways:
        job = jobs.get("ordinary") or Job.make(case, groups.direct.rank, torch.empty)
        jobs.setdefault("ordinary", job)
        choices: dict[str, Callable[[], dict[str, Call]]] = {}
        if ON_GLOO in order.ways:
            choices[ON_GLOO] = lambda: {"": job.call("uneven", groups.direct, groups.gloo)}
        if order.gloo:
            choices["gloo"] = lambda: gloo_calls(job, groups.gloo)
        for name, calls in choices.items():
            try:
                for variant, call in calls().items():
                    found.append(_contender(name, variant, call, _gloo_barrier(groups), job))
            except Lacking as why:
                lacks[name] = str(why)
    if groups.link is not None and (move := groups.link.call(case)) is not None:
        found.append(Contender(LIMIT, "plain sockets", move, groups.direct.barrier, lambda returned: 0, lambda: None))
    return found, lacks, list(jobs.values())


def _call(job: Job, way: str, groups: Groups) -> Call:
    if way == "dist" and groups.backend is None:
        raise Lacking(groups.backend_lacks or "no process group on the unisono backend")
    return job.call("group" if way == EVEN else way, groups.direct, groups.backend)


def _memory(kind: str) -> Callable[..., torch.Tensor]:
    return unisono.empty if kind == "heap" else torch.empty


def _contender(name: str, variant: str, call: Call, align: Call, job: Job, ours: bool = False) -> Contender:
    return Contender(name, variant, call, align, job.count_wrong, job.fill, ours)


def _gloo_barrier(groups: Groups) -> Call:
    return lambda: dist.barrier(group=groups.gloo)


def _ddp_contenders(groups: Groups, case: Case, order: Order) -> tuple[list[Contender], dict[str, str]]:
    """DDP's buckets are ordinary tensors, whatever the parameters are."""
    try:
        job = DdpJob(case, groups.direct.rank)
        if groups.backend is None:
            raise Lacking(groups.backend_lacks or "no process group on the unisono backend")
    except Lacking as why:
        return [], {"ordinary": str(why)}
    barrier = groups.direct.barrier
    steps: list[tuple[str, str, Any, Call]]
    steps = [("ordinary", "DDP", groups.backend, barrier), (LIMIT, "the step alone", None, barrier)]
    if order.gloo:
        steps.append(("gloo", "DDP", groups.gloo, _gloo_barrier(groups)))
    found = []
    for name, variant, process_group, align in steps:
        check = (lambda _: 0) if name == LIMIT else job.count_wrong
        found.append(Contender(name, variant, job.step(process_group), align, check, lambda: None))
    return found, {}


def _matmul_contenders(groups: Groups, case: Case, order: Order) -> tuple[list[Contender], dict[str, str]]:
    lacks: dict[str, str] = {}
    found: list[Contender] = []
    try:
        job = MatmulJob(case, groups.direct.rank)
    except Lacking as why:
        return [], dict.fromkeys(order.kinds, str(why))

    def add(name: str, variant: str, call: Call, align: Call) -> None:
        check = (lambda _: 0) if name == LIMIT else job.count_wrong
        found.append(Contender(name, variant, call, align, check, lambda: None))

    barrier = groups.direct.barrier
    try:
        add("fused", "", job.fused(groups.direct), barrier)
    except Lacking as why:
        lacks["fused"] = str(why)
    for kind in order.kinds:
        add(kind, "mm, then all_reduce", job.in_two_steps(getattr(job, kind), groups.direct), barrier)
    if order.gloo:
        add("gloo", "mm, then all_reduce", job.on_gloo(groups.gloo), _gloo_barrier(groups))
    add(LIMIT, "the matmul alone", job.alone(), barrier)
    return found, lacks
