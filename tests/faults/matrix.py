"""The fault matrix as data: one Row for each kind of fault, its cells, what must be raised and how soon.

``run`` does one cell on fresh ranks and checks what every rank was told. The tests take a diagonal of the product, or
all of it (slow); ``make faults`` runs all of it and writes docs/faults.md.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import cells, misfit_cells, more_cells, proofs
from unisono.testing import RankFailure, run_ranks

SIZES = (2, 3, 4)
BOTH, ONE_KIND = (False, True), (False,)  # kinds of calls: synchronous and asynchronous; or it makes no difference
LOST, TIMEOUT, MISMATCH = "PeerLostError", "CollectiveTimeoutError", "MismatchError"
VALUE = "ArgumentValueError"
JOINING = (TIMEOUT, LOST, "AbortedError")  # one may give up first, and tells the others


@dataclass(frozen=True)
class Moment:
    """A cell: `told` are the exceptions of which each rank in `hears` must get one; none: the result is right."""

    name: str
    body: Callable[[cells.Cell], cells.Told]
    told: tuple[str, ...] = ()
    words: str = ""  # in each of the texts that every rank gets
    each: Callable[[int, int], tuple[str, str]] | None = None  # where ranks differ: kind and words, by rank and size
    hears: Callable[[int], list[int]] | None = None  # ranks, given the size; all but the last if None
    dies: Callable[[int], list[int]] = lambda size: []
    bound_s: float | None = None  # the promise, printed beside what was measured
    sizes: tuple[int, ...] = SIZES
    kinds: tuple[bool, ...] = BOTH  # asynchronous or not
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


def _told_of_extra_call(rank: int, size: int) -> tuple[str, str]:
    """Everybody is told that rank 0 did not come; who waited for it also where it is."""
    return TIMEOUT, "last call" if rank == size - 1 else "rank 0 is "


def _told_of_skipped_call(rank: int, size: int) -> tuple[str, str]:
    return TIMEOUT, f"rank {size - 1} is "


def _told_of_ctrl_c(rank: int, size: int) -> tuple[str, str]:
    return ("KeyboardInterrupt", "") if rank == 0 else ("AbortedError", "rank 0 was interrupted")


MATRIX = (
    Row(
        "SIGKILL of a rank",
        (
            _killed(
                "before joining",
                cells.kill_before_joining,
                told=(TIMEOUT,),
                words="did not come",
                bound_s=1.0,
                kinds=ONE_KIND,
            ),
            _killed(
                "in the handshake", cells.kill_in_the_handshake, told=JOINING, words="", bound_s=1.5, kinds=ONE_KIND
            ),
            _killed("idle", cells.kill_idle),
            _killed("in small calls", cells.kill_in_small_calls),
            _killed("in large calls, shared memory", cells.kill_in_heap_calls),
            _killed("in large calls, ordinary tensors", cells.kill_in_staged_calls),
            _killed("in fused matmuls", cells.kill_in_fused_calls, kinds=ONE_KIND),
            _killed("in calls nobody waits for", cells.kill_unawaited, kinds=ONE_KIND),
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
                ("op", misfit_cells.different_op),
                ("shape", misfit_cells.different_shape),
                ("dtype", misfit_cells.different_dtype),
                ("reduce op", misfit_cells.different_reduce_op),
                ("root", misfit_cells.different_root),
                ("splits", misfit_cells.different_splits),
            )
        ),
    ),
    Row(
        "an extra call on one rank",
        (Moment("", misfit_cells.extra_call, (TIMEOUT,), each=_told_of_extra_call, hears=everyone, bound_s=0.4),),
    ),
    Row(
        "a call skipped on one rank",
        (
            Moment(
                "the last call",
                misfit_cells.skipped_last_call,
                (TIMEOUT,),
                each=_told_of_skipped_call,
                hears=everyone,
                bound_s=0.4,
            ),
            Moment(
                "before other calls", misfit_cells.skipped_call_before_others, (MISMATCH,), "differs", hears=everyone
            ),
        ),
    ),
    Row("wrong splits", (Moment("", misfit_cells.wrong_splits, (VALUE,), "counts", hears=everyone),)),
    Row(
        "too little memory or files",
        (
            Moment("memory", more_cells.too_much_memory, ("HeapMemoryError",), "bytes", hears=everyone, kinds=ONE_KIND),
            Moment(
                "files",
                more_cells.too_few_files,
                ("SystemCallError", "OSError", *JOINING),
                "",
                hears=everyone,
                kinds=ONE_KIND,
            ),
        ),
    ),
    Row("leftovers of a crashed run", (Moment("kill -9 of all ranks", cells.kill_everybody, dies=everyone),)),
    Row(
        "fork after init",
        (Moment("the child uses the group", more_cells.fork, ("ForkedError",), "parent", hears=everyone),),
    ),
    Row(
        "an end with work in flight",
        (Moment("close", more_cells.end_with_work_in_flight, ("ClosedError", LOST), "", bound_s=2.0, kinds=ONE_KIND),),
    ),
    Row(
        "Ctrl-C while waiting",
        (
            Moment(
                "",
                cells.ctrl_c,
                ("KeyboardInterrupt", "AbortedError"),
                each=_told_of_ctrl_c,
                hears=everyone,
                bound_s=0.1,
            ),
        ),
    ),
    Row("many threads, many groups", (Moment("", more_cells.many_threads),)),
    Row("a call inside a hook", (Moment("of autograd and of a handle", more_cells.calls_in_hooks),)),
    Row("more than 2³¹ elements", (Moment("", more_cells.beyond_32_bits, sizes=(2,), slow=True),)),
    Row("zero elements", (Moment("", more_cells.zero_elements),)),
    Row(
        "odd tensors",
        (
            Moment(
                "", more_cells.odd_tensors, ("ArgumentValueError", "ArgumentTypeError"), "argument '", hears=everyone
            ),
        ),
    ),
    Row(
        "many ranks on few processors",
        (
            Moment("1 and 7 ranks", more_cells.many_ranks, sizes=(1, 7)),
            Moment("64 ranks", more_cells.many_ranks, sizes=(64,), slow=True),
        ),
    ),
    Row(
        "another version on one rank",
        (Moment("", more_cells.another_version, (MISMATCH,), "version", hears=everyone, kinds=ONE_KIND),),
    ),
    Row(
        "garbage on the socket",
        (Moment("half-open and foreign connections", more_cells.garbage_on_the_socket, kinds=ONE_KIND),),
    ),
    Row("garbage in shared memory", (), "tests/core/test_hostile.cc and test_fuzz.cc"),
    Row(
        "a stopped rank goes on after the others' time-out",
        (Moment("", cells.stopped_rank_wakes_late, (TIMEOUT,), "stopped"),),
    ),
    Row(
        "ranks that wait in a circle",
        (
            Moment(
                "two groups", more_cells.wait_in_a_circle, ("DeadlockError",), "deadlock", hears=everyone, bound_s=1.0
            ),
        ),
    ),
    Row(
        "a rank is lost and the others go on",
        (_killed("shrink", more_cells.lost_and_shrunk, told=("Group.shrink",), words="", bound_s=1.0),),
    ),
    Row(
        "callbacks that sleep, drop the last reference or raise",
        (Moment("close", more_cells.callbacks, kinds=ONE_KIND),),
    ),
    Row("busy neighbours", (Moment("", more_cells.busy_neighbours),)),
    Row("another host dies", (), "tests of groups over several hosts"),
)


@dataclass(frozen=True)
class Case:
    row: Row
    moment: Moment
    size: int
    asynchronous: bool
    one_core: bool

    def lateness_s(self, found: Sequence[tuple[str, str, float]]) -> float:
        """How much later than promised the last rank was told; below 0: in time."""
        if self.moment.bound_s is None:
            return -math.inf
        return max((seconds for _, _, seconds in found), default=-math.inf) - self.moment.bound_s

    def __str__(self) -> str:
        words = [self.row.fault, self.moment.name, f"{self.size} ranks", "async" if self.asynchronous else "sync"]
        return ", ".join(filter(None, [*words, "one core" if self.one_core else ""]))


def product() -> Iterator[Case]:
    for row in MATRIX:
        for moment in row.moments:
            for size in moment.sizes:
                for asynchronous in moment.kinds:
                    for one_core in (False, True):
                        yield Case(row, moment, size, asynchronous, one_core)


def diagonal(slow: bool = False) -> Iterator[Case]:
    """Every moment once, with the sizes, both kinds of calls and one core in turns; the slow ones too if asked for.

    Moments with both kinds of calls have turns of their own, so that each kind meets each size, on one core and on all.
    """
    moments = [(row, moment) for row in MATRIX for moment in row.moments if slow or not moment.slow]
    turns = {kinds: itertools.count() for kinds in (BOTH, ONE_KIND)}
    for row, moment in moments:
        i = next(turns[moment.kinds])
        asynchronous = moment.kinds[i // 2 % 2 % len(moment.kinds)]
        yield Case(row, moment, moment.sizes[i % len(moment.sizes)], asynchronous, i % 4 in (1, 2))


BODIES: dict[str, Any] = {
    **vars(cells),
    **vars(misfit_cells),
    **vars(more_cells),
}  # by name, since a rank gets them by pickle


def _on_rank(
    group: Any, body: str, asynchronous: bool, one_core: bool, inject: bool, folder: str, off: str
) -> cells.Told:
    if off:
        proofs.switch_off(off)
    if one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        group = group.split(range(group.size))  # asks again how many processors there are
    return BODIES[body](cells.Cell(group, asynchronous, inject, Path(folder)))


def run(case: Case, inject: bool = True, limit_s: float = 90.0, off: str = "") -> list[tuple[str, str, float]]:
    """Does it once, with the defence ``off`` switched off; what the ranks were told, by rank."""
    moment, size = case.moment, case.size
    before = set(os.listdir("/dev/shm"))
    body = next(name for name in BODIES if BODIES[name] is moment.body)
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
        if not inject or not moment.told:
            assert not result, f"rank {rank} was told something, and should not be: {result}"
        if rank not in hears:
            continue
        assert result, f"rank {rank} was told nothing"
        kinds, words = moment.told, moment.words
        if moment.each:
            its_kind, words = moment.each(rank, size)
            kinds = (its_kind,)
        for kind, text, _ in result:
            assert kind in kinds, f"rank {rank} got {kind}: {text}"
            assert words in text, f"rank {rank}: no {words!r} in {text!r}"
        if moment.told == (LOST,):
            missing = [r for r in dead if not any(f"rank {r} " in text for _, text, _ in result)]
            assert not missing, f"rank {rank}: {missing} not named in {result}"
        found.append(max(result, key=lambda told: told[2]))
    assert set(os.listdir("/dev/shm")) <= before, "something is left in /dev/shm"
    return found
