"""One row of the benchmark, as its ranks measure it.

Rank 0 leads. In every round each contender has its turn: unisono on heap tensors, unisono on ordinary
tensors, gloo, and the limit (`_core.Yardstick`, plain threads in rank 0's process). The order rotates, so
that whatever one contender leaves behind, and whatever else the machine does, hits all of them alike. Between
turns the other ranks sleep in a socket: nothing spins while the yardstick runs.

A turn is one untimed call that warms the caches, a barrier of the same library, then a batch of timed calls.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import unisono
from unisono.bench_ops import OPS, Call, Case, Job

if TYPE_CHECKING:
    from unisono.group import Group

WARM_BYTES = 64 << 20  # larger buffers leave no cache warm
TURN_S = 1e-3  # calls are repeated up to this length
CROWDED_TURN_S = 10e-3  # the same when ranks share CPUs: more than one time slice of the scheduler
MOST_CALLS = 10_000
MOST_ROUNDS = 200
SILENCE_S = 300.0  # a rank that says nothing for so long is lost


@dataclass(frozen=True)
class Order:
    """How long and against whom a row is measured."""

    kinds: tuple[str, ...] = ("heap", "private")
    gloo: bool = True
    check: bool = True
    rounds: int | None = None  # None: as many as fit into `seconds`, at least 15
    seconds: float = 0.6


@dataclass
class Times:
    """Seconds per call of one contender, one number per round, from the slowest rank."""

    batch: int = 1
    variant: str = ""
    rounds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.rounds)
        return {
            "time_us": statistics.median(ordered) * 1e6,
            "min_us": ordered[0] * 1e6,
            "p95_us": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] * 1e6,
            "rounds": len(ordered),
            "batch": self.batch,
            "variant": self.variant,
        }


class Turns:
    """Sleeping turn-taking: rank 0 gives orders, the others obey and answer with one number."""

    layout = struct.Struct("=iid")  # contender (-1: the row is over), warm-up calls, timed calls

    def __init__(self, folder: str, rank: int, size: int) -> None:
        path = os.path.join(folder, "turns")
        self.peers: list[socket.socket] = []
        if rank == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.settimeout(SILENCE_S)
                listener.bind(path)
                listener.listen(size)
                self.peers = [listener.accept()[0] for _ in range(size - 1)]
        else:
            leader = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            deadline = time.monotonic() + SILENCE_S
            while True:
                try:
                    leader.connect(path)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            self.peers = [leader]
        for peer in self.peers:
            peer.settimeout(SILENCE_S)

    def give(self, contender: int, warmup: int = 0, calls: int = 0) -> None:
        for peer in self.peers:
            peer.send(self.layout.pack(contender, warmup, calls))

    def take(self) -> tuple[int, int, int]:
        contender, warmup, calls = self.layout.unpack(self._receive(self.peers[0]))
        return contender, warmup, int(calls)

    def answer(self, seconds: float) -> None:
        self.peers[0].send(struct.pack("=d", seconds))

    def answers(self) -> list[float]:
        return [struct.unpack("=d", self._receive(peer))[0] for peer in self.peers]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    @staticmethod
    def _receive(peer: socket.socket) -> bytes:
        data = peer.recv(64)
        if not data:
            raise RuntimeError("a rank left in the middle of a benchmark row")
        return data


@dataclass
class Contender:
    call: Call
    align: Call  # a barrier of the same library, so that the ranks start together

    def run(self, warmup: int, calls: int) -> float:
        """Seconds per call on this rank."""
        call = self.call
        for _ in range(warmup):
            call()
        self.align()
        start = time.perf_counter_ns()
        for _ in repeat(None, calls):
            call()
        return (time.perf_counter_ns() - start) * 1e-9 / calls


_turns: Turns | None = None  # of this rank's pool, until leave()


def join(group: Group, folder: str, gloo: bool) -> None:
    """Connect the ranks of a new pool for turn-taking, and in a gloo group."""
    global _turns
    _turns = Turns(folder, group.rank, group.size)
    if gloo:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting = f"file://{os.path.join(folder, 'gloo')}"
        dist.init_process_group("gloo", init_method=meeting, rank=group.rank, world_size=group.size)


def leave(group: Group) -> None:
    """Undo join(). All ranks leave gloo together."""
    global _turns
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if _turns is not None:
        _turns.close()
        _turns = None


def measure(group: Group, case: Case, order: Order) -> dict[str, Any] | None:
    """Measure one row; rank 0 returns it."""
    assert _turns is not None, "join() comes first"
    jobs: dict[str, Job] = {}
    for kind in order.kinds:
        jobs[kind] = Job.make(case, group.rank, unisono.empty if kind == "heap" else torch.empty)
    contenders = {kind: Contender(job.unisono_call(group), group.barrier) for kind, job in jobs.items()}
    wrong = {kind: _check(_turns, group, job) if order.check else None for kind, job in jobs.items()}
    for job in jobs.values():
        job.clear()
    lacking = ""
    if order.gloo:
        ordinary = jobs.get("private") or Job.make(case, group.rank, torch.empty)
        ordinary.clear()
        try:
            calls = ordinary.gloo_calls()
            for call in calls.values():
                call()
        except (RuntimeError, ValueError) as error:  # refused by all ranks alike, before anything was sent
            lacking, calls = str(error).splitlines()[0], {}
        for name, call in calls.items():
            contenders[f"gloo {name}"] = Contender(call, dist.barrier)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        if group.rank != 0:
            _obey(_turns, list(contenders.values()))
            return None
        return {
            "op": case.op,
            "ranks": case.ranks,
            "counts": list(case.counts),
            "size_bytes": case.size_bytes,
            "count": case.count,
            "dtype": case.dtype,
            "redop": case.redop if OPS[case.op].reduces else "none",
            "root": 0 if OPS[case.op].rooted else -1,
            **_lead(_turns, contenders, case, order),
            "wrong": wrong,
            "gloo_lacks": lacking,
        }
    finally:
        if collecting:
            gc.enable()


def _check(turns: Turns, group: Group, job: Job) -> int:
    """Wrong elements on all ranks together (on rank 0)."""
    job.fill()
    group.barrier()
    job.unisono_call(group)()
    wrong = job.count_wrong()
    if group.rank != 0:
        turns.answer(wrong)
        return wrong
    return wrong + int(sum(turns.answers()))


def _obey(turns: Turns, contenders: list[Contender]) -> None:
    while True:
        number, warmup, calls = turns.take()
        if number < 0:
            return
        turns.answer(contenders[number].run(warmup, calls))


def _lead(turns: Turns, contenders: dict[str, Contender], case: Case, order: Order) -> dict[str, Any]:
    crowded = case.ranks > len(os.sched_getaffinity(0))
    warmup = 1 if case.size_bytes <= WARM_BYTES else 0
    numbers = {name: i for i, name in enumerate(contenders)}

    def turn(name: str, calls: int) -> float:
        turns.give(numbers[name], warmup, calls)
        seconds = contenders[name].run(warmup, calls)
        return max([seconds, *turns.answers()])

    runs: dict[str, Callable[[int], float]] = {}
    times: dict[str, Times] = {}
    with contextlib.ExitStack() as ending:
        ending.callback(turns.give, -1)
        names = [name for name in contenders if not name.startswith("gloo ")]
        gloo = [name for name in contenders if name.startswith("gloo ")]
        if gloo:
            trial = 5 if case.size_bytes <= 1 << 20 else 1
            names.append(min(gloo, key=lambda name: min(turn(name, trial) for _ in range(3))))
        for name in names:
            kind, _, variant = name.partition(" ")
            runs[kind] = partial(turn, name)
            times[kind] = Times(variant=variant)
        yardstick = _yardstick(case)
        runs["limit"] = lambda calls: float(yardstick.round(calls, warmup))
        times["limit"] = Times(variant=f"{yardstick.variant}, {yardstick.threads} threads")
        for kind, run in runs.items():
            times[kind].batch = _batch(run, case.size_bytes, CROWDED_TURN_S if crowded else TURN_S)

        start = time.monotonic()
        kinds = list(runs)
        done = 0
        while not _enough(done, time.monotonic() - start, order):
            for kind in kinds[done % len(kinds) :] + kinds[: done % len(kinds)]:
                times[kind].rounds.append(runs[kind](times[kind].batch))
            done += 1
    return {kind: times[kind].summary() for kind in times}


def _batch(run: Callable[[int], float], size_bytes: int, turn_s: float) -> int:
    """How many calls make one turn; several for small messages, since the first after a sleep is slow."""
    fewest = 10 if size_bytes <= 64 << 10 else 3 if size_bytes <= 4 << 20 else 1
    return max(fewest, min(MOST_CALLS, int(turn_s / max(run(fewest), 1e-9))))


def _enough(rounds: int, spent_s: float, order: Order) -> bool:
    if order.rounds is not None:
        return rounds >= order.rounds
    if rounds < 15:  # fewer only where one round takes seconds
        return rounds >= 5 and spent_s > 5 * order.seconds
    return rounds >= MOST_ROUNDS or spent_s > order.seconds


def _yardstick(case: Case) -> Any:
    import unisono._core as core

    size_bytes = case.size_bytes if case.op != "barrier" else 0
    splits = [float(n) for n in case.counts] if case.count else []
    return core.Yardstick(core.VERBS[case.op], size_bytes, splits, case.ranks)
