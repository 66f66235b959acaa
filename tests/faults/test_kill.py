"""SIGKILL a rank at any moment: every survivor gets PeerLostError with rank and pid, and lives on.

Each case also runs without the kill and must then end without any error, so that no test passes because
nothing could fail.
"""

import os
import re
import signal
import time

import pytest

from tests.faults.fresh import FreshRanks, finish

BOUND_S = 5.0  # of 60, at which the call would end; the promise is 0.1, printed, and `make faults` holds it to that
MOMENTS = {
    "idle": ("idle", {}),
    "waiting small": ("waiting", {"count": 4}),
    "waiting large, heap": ("waiting", {"count": 2_000_000}),
    "waiting large, ordinary": ("waiting", {"count": 2_000_000, "heap": False}),
    "streaming heap": ("streaming", {}),
    "streaming ordinary": ("streaming", {"heap": False}),
    "streaming matmuls": ("multiplying", {}),
    "in flight": ("in_flight", {}),
    "waiting on a handle": ("wait_on_handle", {}),
    "receiving": ("receiving", {}),
}
VICTIMS = [(2, [1]), (2, [0]), (3, [2]), (3, [0]), (4, [3]), (4, [1, 2])]


def _start(size, victims, moment, tmp_path, **more):
    body, options = MOMENTS[moment]
    return FreshRanks(size, tmp_path, body, late=victims, call_again=True, **options, **more)


CASES = [
    pytest.param(moment, size, victims, id=f"{moment}, {size} ranks, kill {'+'.join(map(str, victims))}")
    for moment in MOMENTS
    for size, victims in VICTIMS
    if moment != "receiving" or 0 not in victims  # rank 0 is the receiver
]


@pytest.mark.parametrize(("moment", "size", "victims"), CASES)
def test_killed(moment, size, victims, tmp_path, measured):
    _kill_and_check(size, victims, moment, tmp_path, measured)


@pytest.mark.parametrize("moment", ["waiting small", "streaming heap", "in flight"])
def test_killed_on_one_core(moment, tmp_path, measured):
    _kill_and_check(3, [1], moment, tmp_path, measured, one_core=True)


def _kill_and_check(size, victims, moment, tmp_path, measured, **options):
    survivors = [rank for rank in range(size) if rank not in victims]
    with _start(size, victims, moment, tmp_path, **options) as ranks:
        pids = [ranks.pid(rank) for rank in range(size)]
        ranks.expect_all("inside")
        # Another delay for each case, so that kills fall into all parts of a large call.
        ranks.wait_until_blocked(survivors[0], 0.1 + 0.037 * (size + 3 * victims[0]))
        killed_at = ranks.signal(victims, signal.SIGKILL)
        if moment == "idle":
            assert ranks.join(victims) == [-9] * len(victims)
            ranks.say(survivors)
        for rank in survivors:
            said = ranks.expect(rank, "error", "fine")
            assert said["event"] == "error", f"rank {rank} noticed nothing"
            _check_error(said, rank, victims, pids)
            measured(said["at"] - killed_at)
            assert said["at"] - killed_at < BOUND_S
            again = ranks.expect(rank, "again", "again fine")
            assert again["event"] == "again" and again["kind"] == "PeerLostError", f"the next call: {again}"
        assert ranks.join(victims) == [-9] * len(victims)
        finish(ranks, survivors, live_on=True)


def _check_error(said, rank, victims, pids):
    assert said["kind"] == "PeerLostError", f"rank {rank}: {said['kind']}: {said['text']}"
    assert set(victims) <= set(said["peers"]), f"rank {rank}: peers {said['peers']}, dead are {victims}"
    assert rank not in said["peers"]
    for victim in victims:
        assert re.search(rf"\b{victim}\b", said["text"]), f"no rank {victim} in {said['text']!r}"
        assert str(pids[victim]) in said["text"], f"no pid {pids[victim]} in {said['text']!r}"
        where = rf"rank {victim}   pid {pids[victim]}   died   last call (none|\w+ #\d+ \(\w+\))"
        assert re.search(where, said["text"]), f"not where rank {victim} was in {said['text']!r}"
    assert said["op"], "the error does not say in which op"
    assert said["op"] == "recv" or f"{said['op']} #{said['seq']} in " in said["text"], f"no number in {said['text']!r}"
    assert (said["rank"], said["group"]) == (rank, "world")


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("moment", MOMENTS)
def test_not_killed(moment, size, tmp_path):
    """The control: the same moments, nobody killed, no error."""
    late = [size - 1]
    with _start(size, late, moment, tmp_path, rounds=3) as ranks:
        ranks.expect_all("inside")
        ranks.wait_until_blocked(0)
        ranks.say(range(size) if moment == "idle" else late if "streaming" not in moment else [])
        for rank in range(size):
            said = ranks.expect(rank, "error", "fine")
            assert said["event"] == "fine", f"rank {rank}: {said}"
            ranks.expect(rank, "again fine")
        finish(ranks, list(range(size)))


def test_all_but_one_killed(tmp_path, measured):
    with _start(4, [1, 2, 3], "waiting small", tmp_path) as ranks:
        pids = [ranks.pid(rank) for rank in range(4)]
        ranks.expect_all("inside")
        ranks.wait_until_blocked(0)
        killed_at = ranks.signal([1, 2, 3])
        said = ranks.expect(0, "error", "fine")
        assert said["event"] == "error"
        _check_error(said, 0, [1, 2, 3], pids)
        measured(said["at"] - killed_at)
        assert said["at"] - killed_at < BOUND_S
        finish(ranks, [0], live_on=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("turns", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_all_killed_many_times(turns, tmp_path):
    """Crashed runs leave no process and nothing in /dev/shm, and the next run works."""
    before = sorted(os.listdir("/dev/shm"))
    for turn in range(turns):
        with FreshRanks(2, tmp_path, "streaming", bytes=8 << 20, heap=turn % 2 == 0) as ranks:
            pids = [ranks.pid(rank) for rank in (0, 1)]
            if turn % 4:  # otherwise in the middle of joining
                ranks.expect_all("inside")
            time.sleep(0.003 * (turn % 20))
            ranks.signal([0, 1])
            assert ranks.join([0, 1]) == [-9, -9]
        assert sorted(os.listdir("/dev/shm")) == before, f"after run {turn}"
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")], f"after run {turn}"
    with FreshRanks(2, tmp_path, "streaming", bytes=8 << 20, rounds=3) as ranks:
        ranks.expect_all("fine")
        finish(ranks, [0, 1])


def test_killed_while_joining(tmp_path):
    """A rank that dies before it has joined: the other gives up at its deadline and says who is missing."""
    with FreshRanks(2, tmp_path, "idle", joining_timeout_s=3.0) as ranks:
        ranks.signal([1])
        ranks.join([1])
        # If it died only after joining, the barrier in the body fails instead.
        said = ranks.expect(0, "refused", "error", "inside", limit_s=15.0)
        assert said["event"] in ("refused", "error"), said
        assert re.search(r"\b1\b", said["text"]), said["text"]
