"""The fault matrix as data: one Row for each kind of fault, its cells, what must be raised and how soon.

``run`` does one cell on fresh ranks and checks what every rank was told. The tests take a diagonal of the product, or
all of it (slow); ``make faults`` runs all of it and writes docs/faults.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unisono
from tests.faults import cells
from unisono.testing import RankFailure, run_ranks

SIZES = (2, 3, 4)
LOST, TIMEOUT, MISMATCH = "PeerLostError", "CollectiveTimeoutError", "MismatchError"
VALUE = "ArgumentValueError"
JOINING = (TIMEOUT, LOST, "AbortedError")  # one may give up first, and tells the others


@dataclass(frozen=True)
class Moment:
    """A cell: `told` are the exceptions of which each rank in `hears` must get one; none: the result is right."""

    name: str
    body: Callable[[cells.Cell], cells.Told]
    told: tuple[str, ...] = ()
    words: str = ""  # in one of the texts that every rank gets
    hears: Callable[[int], list[int]] | None = None  # ranks, given the size; all but the last if None
    dies: Callable[[int], list[int]] = lambda size: []
    bound_s: float | None = None  # the promise, printed beside what was measured
    sizes: tuple[int, ...] = SIZES
    slow: bool = False


@dataclass(frozen=True)
class Row:
    fault: str
    moments: tuple[Moment, ...]
    elsewhere: str = ""  # where it is tested, if ranks of one host cannot


def last(size: int) -> list[int]:
    return [size - 1]


def everyone(size: int) -> list[int]:
    return list(range(size))


def _killed(name: str, body: Callable[[cells.Cell], cells.Told], **options: Any) -> Moment:
    return Moment(name, body, **{"told": (LOST,), "words": "died", "dies": last, "bound_s": 0.1, **options})


def _two(size: int) -> list[int]:
    return list(range(max(1, size - 2), size))


MATRIX = (
    Row(
        "SIGKILL of a rank",
        (
            _killed("before joining", cells.kill_before_joining, told=(TIMEOUT,), words="did not come", bound_s=1.0),
            _killed("in the handshake", cells.kill_in_the_handshake, told=JOINING, words="", bound_s=1.5),
            _killed("idle", cells.kill_idle),
            _killed("in small calls", cells.kill_in_small_calls),
            _killed("in large calls, heap", cells.kill_in_heap_calls),
            _killed("in large calls, staged", cells.kill_in_staged_calls),
            _killed("in fused matmuls", cells.kill_in_fused_calls),
            _killed("in calls nobody waits for", cells.kill_unawaited),
        ),
    ),
    Row(
        "several ranks at once",
        (
            _killed(
                "two", cells.kill_two, dies=_two, hears=lambda s: [r for r in range(s) if r not in _two(s)], bound_s=0.2
            ),
            _killed("rank 0", cells.kill_rank_0, dies=lambda s: [0], hears=lambda s: list(range(1, s)), bound_s=0.2),
            _killed(
                "all but one",
                cells.kill_all_but_one,
                dies=lambda s: list(range(1, s)),
                hears=lambda s: [0],
                bound_s=0.2,
            ),
        ),
    ),
    Row(
        "SIGSTOP of a rank",
        (
            Moment("longer than the deadline", cells.stop, (TIMEOUT,), "stopped", bound_s=0.5),
            Moment("SIGCONT in time", cells.stop_and_go_on_in_time),
        ),
    ),
    Row("a rank that is slow", (Moment("", cells.slow, (TIMEOUT,), "rank", bound_s=0.4),)),
    Row(
        "a rank that leaves",
        (
            Moment("by close", cells.leave_by_close, (LOST,), "left", bound_s=0.1),
            _killed("by exit", cells.leave_by_exit),
        ),
    ),
    Row(
        "ranks that disagree",
        tuple(
            Moment(name, body, (MISMATCH,), "differs", hears=everyone)
            for name, body in (
                ("op", cells.different_op),
                ("shape", cells.different_shape),
                ("dtype", cells.different_dtype),
                ("reduce op", cells.different_reduce_op),
                ("root", cells.different_root),
                ("splits", cells.different_splits),
            )
        ),
    ),
    Row("an extra call on one rank", (Moment("", cells.extra_call, (TIMEOUT,), "last call", hears=last, bound_s=0.4),)),
    Row("wrong splits", (Moment("", cells.wrong_splits, (VALUE,), "counts", hears=everyone),)),
    Row(
        "too little memory or files",
        (
            Moment("memory", cells.too_much_memory, ("HeapMemoryError",), "bytes", hears=everyone),
            Moment("files", cells.too_few_files, ("SystemCallError", "OSError", *JOINING), "", hears=everyone),
        ),
    ),
    Row("leftovers of a crashed run", (Moment("kill -9 of all ranks", cells.kill_everybody, dies=everyone),)),
    Row(
        "fork after init", (Moment("the child uses the group", cells.fork, ("ForkedError",), "parent", hears=everyone),)
    ),
    Row(
        "an end with work in flight",
        (Moment("close", cells.end_with_work_in_flight, ("ClosedError", LOST), "", bound_s=2.0),),
    ),
    Row(
        "Ctrl-C while waiting",
        (Moment("", cells.ctrl_c, ("KeyboardInterrupt",), "", hears=lambda s: [0], bound_s=0.1),),
    ),
    Row("many threads, many groups", (Moment("", cells.many_threads),)),
    Row("more than 2³¹ elements", (Moment("", cells.beyond_32_bits, sizes=(2,), slow=True),)),
    Row("zero elements", (Moment("", cells.zero_elements),)),
    Row(
        "odd tensors",
        (Moment("", cells.odd_tensors, ("ArgumentValueError", "ArgumentTypeError"), "tensor", hears=everyone),),
    ),
    Row(
        "many ranks on few processors",
        (
            Moment("1 and 7 ranks", cells.many_ranks, sizes=(1, 7)),
            Moment("64 ranks", cells.many_ranks, sizes=(64,), slow=True),
        ),
    ),
    Row("another version on one rank", (Moment("", cells.another_version, (MISMATCH,), "version", hears=everyone),)),
    Row("garbage on the socket", (Moment("half-open and foreign connections", cells.garbage_on_the_socket),)),
    Row("garbage in shared memory", (), "tests/core/test_hostile.cc and test_fuzz.cc"),
    Row(
        "a stopped rank goes on after the others' time-out",
        (Moment("", cells.stopped_rank_wakes_late, (TIMEOUT,), "stopped"),),
    ),
    Row(
        "ranks that wait in a circle",
        (Moment("two groups", cells.wait_in_a_circle, ("DeadlockError",), "deadlock", hears=everyone, bound_s=1.0),),
    ),
    Row(
        "a rank is lost and the others go on",
        (_killed("shrink", cells.lost_and_shrunk, told=("Group.shrink",), words="", bound_s=1.0),),
    ),
    Row("callbacks that sleep, drop the last reference or raise", (Moment("close", cells.callbacks),)),
    Row("busy neighbours", (Moment("", cells.busy_neighbours),)),
    Row("another host dies", (), "tests of groups over several hosts"),
)


@dataclass(frozen=True)
class Case:
    row: Row
    moment: Moment
    size: int
    asynchronous: bool
    one_core: bool

    def __str__(self) -> str:
        words = [self.row.fault, self.moment.name, f"{self.size} ranks", "async" if self.asynchronous else "sync"]
        return ", ".join(filter(None, [*words, "one core" if self.one_core else ""]))


def product() -> Iterator[Case]:
    for row in MATRIX:
        for moment in row.moments:
            for size in moment.sizes:
                for asynchronous in (False, True):
                    for one_core in (False, True):
                        yield Case(row, moment, size, asynchronous, one_core)


def diagonal(slow: bool = False) -> Iterator[Case]:
    """Every moment once, with the sizes, both kinds of calls and one core in turns; the slow ones too if asked for."""
    moments = [(row, moment) for row in MATRIX for moment in row.moments if slow or not moment.slow]
    for i, (row, moment) in enumerate(moments):
        yield Case(row, moment, moment.sizes[i % len(moment.sizes)], i // 2 % 2 == 0, i % 4 == 3)


def _on_rank(
    group: Any, body: str, asynchronous: bool, one_core: bool, inject: bool, folder: str, off: str
) -> cells.Told:
    if off:
        assert unisono._core.switch_off(off), off  # type: ignore[attr-defined]
    if one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        group = group.split(range(group.size))  # asks again how many processors there are
    return getattr(cells, body)(cells.Cell(group, asynchronous, inject, Path(folder)))  # type: ignore[no-any-return]


def run(case: Case, inject: bool = True, limit_s: float = 90.0, off: str = "") -> list[tuple[str, str, float]]:
    """Does it once, with the defence ``off`` switched off; what the ranks were told, by rank."""
    moment, size = case.moment, case.size
    before = set(os.listdir("/dev/shm"))
    body = next(name for name in vars(cells) if vars(cells)[name] is moment.body)
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(
            size,
            _on_rank,
            body,
            case.asynchronous,
            case.one_core,
            inject,
            folder,
            off,
            check=False,
            timeout_s=limit_s,
            grace_s=limit_s,
        )
    dead = moment.dies(size) if inject else []
    hears = [] if not inject or not moment.told else moment.hears(size) if moment.hears else list(range(size - 1))
    found = []
    for rank, result in enumerate(results):
        failed = isinstance(result, RankFailure)
        if rank in dead:
            assert failed, f"rank {rank} should be dead, gave {result}"
            continue
        assert not failed, f"rank {rank}: {result.reason}\n{result.traceback}"
        if not inject:
            assert not result, f"rank {rank} was told something without a fault: {result}"
        if rank not in hears:
            continue
        assert result, f"rank {rank} was told nothing"
        for kind, text, _ in result:
            assert kind in moment.told, f"rank {rank} got {kind}: {text}"
            assert moment.words in text, f"rank {rank}: no {moment.words!r} in {text!r}"
        if moment.told == (LOST,):
            missing = [r for r in dead if not any(f"rank {r} " in text for _, text, _ in result)]
            assert not missing, f"rank {rank}: {missing} not named in {result}"
        found.append(max(result, key=lambda told: told[2]))
    assert set(os.listdir("/dev/shm")) <= before, "something is left in /dev/shm"
    return found
