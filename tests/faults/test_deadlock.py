"""Cycles of waiting over several groups: proven long before the deadline, on every rank of the cycle, and never when
somebody could still come."""

import random
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

import unisono
from unisono.testing import run_ranks

FAR_S = 60.0  # the deadline of every call here
SOON_S = 15.0  # generous: usually a third of a second
LONG_S = 2.5  # slow ranks sleep longer than a proof takes


def _pairs(group, size):
    """A group for every pair of neighbours in a ring, on the ranks that are in it."""
    made = {}
    for first in range(size if size > 2 else 2):
        pair = (first, (first + 1) % size)
        mine = group.split(list(pair) if group.rank in pair else None, name=f"pair{first}")
        if mine is not None:
            made[first] = mine
    return made


def _outcome(call):
    began = time.monotonic()
    try:
        call()
    except unisono.UnisonoError as error:
        return type(error).__name__, time.monotonic() - began, str(error)
    return "fine", time.monotonic() - began, ""


def _wait(handle):
    handle.wait()


def _ring(group, size, how):
    """Each rank first calls in the group with its right neighbour, which first calls in the next one."""
    groups = _pairs(group, size)
    mine, other = groups[group.rank], groups[(group.rank - 1) % size]
    x = torch.ones(3)
    group.barrier()

    def in_order(first, second):
        for g in (first, second):
            if how == "async":
                _wait(g.all_reduce(x, async_op=True))
            elif how == "large":
                g.all_reduce(torch.ones(1 << 20))
            else:
                g.all_reduce(x)

    said = _outcome(lambda: in_order(mine, other))
    time.sleep(0.5)  # stays in the groups: whoever raises first is not what ends the others' waits
    return said


@pytest.mark.parametrize("how", ["sync", "async", "large"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_cycle_is_proven_on_all_its_ranks(size, how):
    told = run_ranks(size, _ring, size, how, timeout_s=FAR_S)
    for rank, (kind, took_s, text) in enumerate(told):
        assert kind == "DeadlockError", (rank, kind, text)
        assert took_s < SOON_S, took_s
        assert text.count("test_deadlock.py:") == size, text  # a source line for each
        assert all(f'group "pair{i}"' in text for i in range(size)), text


def _in_order(group):
    groups = _pairs(group, 2)
    for g in (groups[0], groups[1]):
        g.all_reduce(torch.ones(3))
    return "fine"


def test_the_same_in_the_same_order_is_none():
    assert run_ranks(2, _in_order, timeout_s=FAR_S) == ["fine", "fine"]


def _slow(group, how):
    """Both wait for each other for a while, and somebody who could still come does."""
    groups = _pairs(group, 2)
    a, b = groups[0], groups[1]
    x = torch.ones(3)
    group.barrier()
    if group.rank == 0:
        a.all_reduce(x)
        b.all_reduce(x)
        return "fine"
    if how == "thread":

        def late():
            time.sleep(LONG_S)
            a.all_reduce(torch.ones(3))

        thread = threading.Thread(target=late)
        thread.start()
        b.all_reduce(x)
        thread.join()
    elif how == "sleeps":
        time.sleep(LONG_S)
        a.all_reduce(x)
        b.all_reduce(x)
    elif how == "limited wait":  # a wait with a limit of its own ends, and then the call comes
        handle = b.all_reduce(x, async_op=True)
        with pytest.raises(unisono.CollectiveTimeoutError):
            handle.wait(LONG_S)
        a.all_reduce(torch.ones(3))
        handle.wait()
    elif how == "callback":
        done = b.all_reduce(x, async_op=True)
        time.sleep(LONG_S)
        a.all_reduce(torch.ones(3))
        done.wait()
    return "fine"


def _busy_threads(group):
    """The ranks' main threads wait in a circle. Their second threads make calls in a third group all the while, so that
    each rank is nearly always waiting with both, and in the end one of them makes the missing call."""
    groups = _pairs(group, 2)
    other = group.split([0, 1], name="other")
    first, second = (groups[0], groups[1]) if group.rank == 0 else (groups[1], groups[0])
    group.barrier()

    def work():
        until, over = time.monotonic() + LONG_S, torch.zeros(1)
        while not over:  # rank 0 says when
            over.fill_(time.monotonic() > until)
            other.broadcast(over, 0)
        if group.rank == 1:
            second.all_reduce(torch.ones(3))

    thread = threading.Thread(target=work)
    thread.start()
    first.all_reduce(torch.ones(3))
    thread.join()
    if group.rank == 0:
        second.all_reduce(torch.ones(3))
    return other.calls


def test_a_thread_at_work_in_another_group_is_no_deadlock():
    for calls in run_ranks(2, _busy_threads, timeout_s=FAR_S):
        assert calls > 10, "the second threads were hardly at work"


def _all_threads_stuck(group):
    """Two threads on each rank, and every one waits for a call that only the others could make."""
    made = [group.split([0, 1], name=f"pair{i}") for i in range(4)]
    told = [None, None]
    group.barrier()

    def call(i):
        told[i] = _outcome(made[2 * group.rank + i].barrier)[0]
        made[2 * group.rank + 1 - i].abort("this rank knows")  # its other thread may not: now somebody could call

    thread = threading.Thread(target=call, args=(0,))
    thread.start()
    call(1)
    thread.join()
    time.sleep(0.5)  # as in _ring
    return told


def test_threads_that_are_all_stuck_are_a_deadlock():
    """Every rank is told, by one of its threads at least."""
    for told in run_ranks(2, _all_threads_stuck, timeout_s=FAR_S):
        assert "DeadlockError" in told and set(told) <= {"DeadlockError", "AbortedError"}, told


def _with_servants(group, cycle):
    """A progress bar's monitor and a data loader's threads run beside; with ``cycle`` nobody else does."""
    stop, shown = threading.Event(), {"__name__": "tqdm._monitor"}
    exec("def run(stop):\n    while not stop.wait(0.05): pass", shown)  # tqdm itself may not be there
    threading.Thread(target=shown["run"], args=(stop,), daemon=True).start()
    loader = iter(DataLoader(range(8), num_workers=1))
    next(loader)
    names = {t.name for t in threading.enumerate()}
    said = _ring(group, 2, "sync") if cycle else _slow(group, "thread")
    stop.set()
    del loader
    return said, "QueueFeederThread" in names


def test_threads_that_never_call_are_no_hindrance():
    for (kind, took_s, text), has_feeder in run_ranks(2, _with_servants, True, timeout_s=FAR_S):
        assert has_feeder and kind == "DeadlockError" and took_s < SOON_S, (kind, text)


def test_a_thread_beside_them_that_will_call_is_one():
    assert [said for said, _ in run_ranks(2, _with_servants, False, timeout_s=FAR_S)] == ["fine", "fine"]


@pytest.mark.parametrize("how", ["thread", "sleeps", "limited wait", "callback"])
def test_slow_ranks_are_no_deadlock(how):
    assert run_ranks(2, _slow, how, timeout_s=FAR_S) == ["fine", "fine"]


def _queued(group):
    """Rank 1 has its call in `a` under way when it waits in `b`: both orders at once, and no deadlock."""
    groups = _pairs(group, 2)
    a, b = groups[0], groups[1]
    group.barrier()
    first, second = (a, b) if group.rank == 0 else (b, a)
    ahead = second.all_reduce(torch.ones(3), async_op=True)
    if group.rank == 1:
        time.sleep(LONG_S)
    first.all_reduce(torch.ones(3))
    ahead.wait()
    return "fine"


def test_calls_under_way_are_no_deadlock():
    assert run_ranks(2, _queued, timeout_s=FAR_S) == ["fine", "fine"]


def _messages(group, how):
    x = torch.ones(1 << 20)
    group.barrier()
    other = 1 - group.rank
    if how == "receives":
        return _outcome(lambda: group.recv(x, other))
    if how == "awaited receives":
        return _outcome(lambda: group.recv(x, other, async_op=True).wait())
    if how == "sends":  # too long to be set aside
        return _outcome(lambda: (group.send(x, other), group.recv(x, other)))
    if how == "mixed":  # one in a collective, the other in a receive
        return _outcome(lambda: group.all_reduce(x) if group.rank else group.recv(x, other))
    received = group.recv(torch.empty(1 << 20), other, async_op=True)
    return _outcome(lambda: (group.send(x, other), received.wait()))


@pytest.mark.parametrize("how", ["receives", "awaited receives", "sends", "mixed"])
def test_messages_that_wait_for_each_other(how):
    for kind, took_s, text in run_ranks(2, _messages, how, timeout_s=FAR_S):
        assert kind == "DeadlockError" and took_s < SOON_S, (kind, text)


def test_messages_that_meet_are_none():
    assert [said[0] for said in run_ranks(2, _messages, "meet", timeout_s=FAR_S)] == ["fine", "fine"]


def _waits_for_the_cycle(group):
    """Rank 2 waits for two ranks that are in a cycle: it can never end either."""
    pairs = [group.split([0, 1] if group.rank < 2 else None, name=name) for name in ("a", "b")]
    group.barrier()
    if group.rank == 2:
        return _outcome(group.barrier)
    first, second = pairs if group.rank == 0 else pairs[::-1]
    said = _outcome(lambda: (first.barrier(), second.barrier(), group.barrier()))
    time.sleep(1.0)
    return said


def test_a_rank_that_waits_for_a_cycle_learns_it():
    told = run_ranks(3, _waits_for_the_cycle, timeout_s=FAR_S)
    assert [kind for kind, _, _ in told[:2]] == ["DeadlockError"] * 2, told
    assert told[2][0] in ("DeadlockError", "PeerLostError"), told  # the cycle does not wait for its proof


def _random_program(group, seed, steps):
    """The same calls over many groups on all ranks, with threads, handles and long pauses of each rank's own."""
    pairs = [(a, b) for a in range(group.size) for b in range(a)]
    groups = [group, *(group.split(list(p) if group.rank in p else None) for p in pairs)]
    program, own = random.Random(seed), random.Random(seed + 1 + group.rank)
    ahead = []
    for _ in range(steps):
        g, how = program.choice(groups), program.choice(["sync", "sync", "async", "message", "thread"])
        if g is None:
            continue
        time.sleep(own.choice([0, 0, 0.02, 0.3, 0.7]))
        if how == "async":
            ahead.append(g.all_reduce(torch.ones(3), async_op=True))
        elif how == "message" and g.size == 2:
            (g.send if g.rank else g.recv)(torch.ones(1 << 18), 1 - g.rank)
        elif how == "thread":
            thread = threading.Thread(target=g.barrier)
            thread.start()
            thread.join()
        else:
            g.all_reduce(torch.ones(3))
    for handle in ahead:
        handle.wait()
    group.barrier()
    return "fine"


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_programs_with_slow_ranks_raise_no_alarm(seed):
    assert run_ranks(3, _random_program, seed, 25, timeout_s=120) == ["fine"] * 3
