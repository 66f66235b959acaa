"""Async calls: many in flight, waits in another order, dropped handles, order, threads, p2p."""

import gc
import random
import threading
import time

import pytest
import torch

import unisono
from tests.calls import LIMIT_S, all_kinds, sampled_calls, splits, start, threshold_counts


def _mixed_calls(size, limit):
    """Async calls of many verbs and sizes, the same list on every rank."""
    kinds = all_kinds(size)
    counts = threshold_counts("float32", size)
    calls = []
    for verb in ("all_reduce", "reduce", "broadcast"):
        calls += sampled_calls(verb, limit, counts=counts, kinds=kinds, root=range(size), async_op=(True,))
    chunked = [split for total in (11, 5000, 90_001) for split in splits(total, size)]
    for verb in ("all_gather", "reduce_scatter", "gather", "scatter"):
        forms = ("plain", "in_place") if verb in ("all_gather", "reduce_scatter") else ("plain", "list")
        axes = {"counts": chunked, "kinds": kinds, "root": range(size), "form": forms}
        calls += sampled_calls(verb, limit, async_op=(True,), **axes)
    random.Random(3).shuffle(calls)
    return calls


def _in_flight(group, calls, batch, seed):
    """Start `batch` calls, wait in an order of this rank's own, compare, again."""
    complaints = []
    chance = random.Random(seed * 100 + group.rank)
    for first in range(0, len(calls), batch):
        started = [start(group, call) for call in calls[first : first + batch]]
        chance.shuffle(started)
        for one in started:
            assert one.handle is not None, f"{one.call} gave no handle"
            found, _ = one.finish()
            complaints += [f"{line} in {one.call}" for line in found]
            assert one.handle.is_completed() and one.handle.exception() is None
    return complaints


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_many_in_flight_waited_for_in_any_order(pool, size):
    results = pool.run(_in_flight, _mixed_calls(size, 24), 28, size)
    lines = [f"rank {rank}: {line}" for rank, found in enumerate(results) for line in found]
    assert not lines, "\n".join(lines[:12])


def _order(group, count):
    """Async, async, sync on the same tensor: done in the order they were called."""
    t = torch.ones(count)
    first = group.all_reduce(t, async_op=True)
    second = group.all_reduce(t, "max", async_op=True)
    group.all_reduce(t)
    assert first.is_completed() and second.is_completed(), "a sync call comes after what was started before"
    assert t.unique().tolist() == [float(group.size**2)]
    kept = []
    for _ in range(20):
        kept.append(group.all_reduce(t, "avg", async_op=True))
    kept[-1].wait()
    assert all(handle.is_completed() for handle in kept)
    assert t.unique().tolist() == [float(group.size**2)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_calls_keep_their_order(pool, size):
    for count in (1, 2000, 300_000):
        pool.run(_order, count)


def _dropped(group, rounds):
    """Nobody keeps the handles, nor (but for the group) the tensors; later results are right all the same."""
    last = torch.ones(40_000)
    for turn in range(rounds):
        group.all_reduce(torch.full((30_000,), float(turn)), async_op=True)
        heap = unisono.zeros(50_000)
        group.all_reduce(heap, async_op=True)
        group.all_reduce(last, "max", async_op=True)
        del heap
        if turn % 10 == 0:
            gc.collect()
    group.all_reduce(last)
    return last.unique().tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_handles_may_be_dropped(pool, size):
    assert pool.run(_dropped, 40) == [[float(size)]] * size


def _handle_facts(group):
    t = torch.full((7,), 1.0 + group.rank)
    handle = group.all_reduce(t, async_op=True)
    handle.wait()
    handle.wait(1.0)
    assert handle.is_completed() and handle.exception() is None
    result = handle.result()
    found = result[0] if isinstance(result, (list, tuple)) else result
    assert found.data_ptr() == t.data_ptr(), "the result is the output tensor"
    out = torch.empty(3)
    handle = group.all_reduce(torch.ones(3), out=out, async_op=True)
    result = handle.result()  # waits
    found = result[0] if isinstance(result, (list, tuple)) else result
    assert found.data_ptr() == out.data_ptr() and out.tolist() == [float(group.size)] * 3
    handle = group.barrier(async_op=True)
    handle.wait()
    assert handle.exception() is None


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_handle_says(pool, size):
    pool.run(_handle_facts)


def _not_yet(group):
    """A call is not complete before the last rank has come."""
    part = group.split(range(group.size))
    t = torch.ones(5)
    if group.rank == 0:
        handle = part.all_reduce(t, async_op=True)
        assert not handle.is_completed() and handle.exception() is None and t.tolist() == [1.0] * 5
        with pytest.raises(unisono.CollectiveTimeoutError):
            handle.wait(0.05)  # only this wait ends, the call goes on
        assert not handle.is_completed()
    group.barrier()
    if group.rank != 0:
        handle = part.all_reduce(t, async_op=True)
    handle.wait(LIMIT_S)
    assert t.tolist() == [float(group.size)] * 5
    part.close()


@pytest.mark.parametrize("size", [2, 3])
def test_not_complete_before_the_last_has_come(pool, size):
    pool.run(_not_yet)


def _from_threads(group, threads, rounds):
    """Threads of one rank use one group at once: the calls are alike, so any order is the same order."""
    complaints = []

    def work(number):
        for turn in range(rounds):
            t = torch.full((3000,), float(group.rank + 1))
            if (turn + number) % 2:
                group.all_reduce(t, async_op=True).wait(LIMIT_S)
            else:
                group.all_reduce(t, timeout_s=LIMIT_S)
            want = group.size * (group.size + 1) / 2
            if t.unique().tolist() != [want]:
                complaints.append(f"thread {number} turn {turn}: {t.unique().tolist()}, want {want}")

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return complaints


@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_threads_may_call(pool, size):
    assert pool.run(_from_threads, 4, 30) == [[]] * size


def _crossing(group, count, kind):
    """Every rank sends to and receives from every other at once, tags in opposite orders."""
    make = unisono.zeros if kind == "heap" else torch.zeros
    others = [r for r in range(group.size) if r != group.rank]
    tags = (3, 1, 2)
    sent, handles, got = [], [], {}
    for peer in others:
        for tag in tags:
            content = make(count) + 0
            content += 100 * group.rank + 10 * peer + tag
            sent.append(content)
            handles.append(group.send(content, peer, tag=tag, async_op=True))
    for peer in reversed(others):
        for tag in sorted(tags):
            got[peer, tag] = make(count)
            handles.append(group.recv(got[peer, tag], peer, tag=tag, async_op=True))
    random.Random(group.rank).shuffle(handles)
    for handle in handles:
        handle.wait(LIMIT_S)
    complaints = []
    for (peer, tag), t in got.items():
        want = 100.0 * peer + 10 * group.rank + tag
        if count and t.unique().tolist() != [want]:
            complaints.append(f"{kind} {count} from {peer} tag {tag}: {t.unique().tolist()[:5]}, want {want}")
    return complaints


@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_cross_with_tags_out_of_order(pool, size):
    for kind in ("ordinary", "heap"):
        for count in (0, 1, 10, 11, 5000, 70_000, 1_500_000):
            results = pool.run(_crossing, count, kind)
            lines = [f"rank {rank}: {line}" for rank, found in enumerate(results) for line in found]
            assert not lines, "\n".join(lines)


def _any_source_async(group):
    """irecv without a source: the handle tells who it was."""
    if group.rank:
        group.send(torch.full((20,), float(group.rank)), 0, tag=9, timeout_s=LIMIT_S)
        return None
    taken = [torch.zeros(20) for _ in range(group.size - 1)]
    handles = [group.recv(t, tag=9, async_op=True) for t in taken]
    sources = []
    for handle, t in zip(handles, taken, strict=True):
        handle.wait(LIMIT_S)
        assert t.unique().tolist() == [float(handle.source)]
        sources.append(handle.source)
    return sorted(sources)


@pytest.mark.parametrize("size", [2, 4])
def test_any_source_async(pool, size):
    assert pool.run(_any_source_async)[0] == list(range(1, size))


def _beside_large(group):
    """Large collectives in flight, p2p beside them, then a sync call: nothing hangs, all bits right."""
    large = [unisono.zeros(2_000_000) for _ in range(3)]
    for t in large:
        t += 1
    handles = [group.all_reduce(t, async_op=True) for t in large]
    peer = group.rank ^ 1
    if peer < group.size:
        got = torch.zeros(300_000)
        receiving = group.recv(got, peer, async_op=True)
        sending = group.send(torch.full((300_000,), float(group.rank)), peer, async_op=True)
        receiving.wait(LIMIT_S)
        sending.wait(LIMIT_S)
        assert got.unique().tolist() == [float(peer)]
    small = torch.ones(1)
    group.all_reduce(small)
    assert small.item() == group.size
    for handle, t in zip(handles, large, strict=True):
        handle.wait(LIMIT_S)
        assert t.unique().tolist() == [float(group.size)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_large_collectives_and_messages_together(pool, size):
    pool.run(_beside_large)


def _sends_while_calling_back(group, sends):
    """Rank 0's callback waits until rank 1 has what was sent before; nobody else at rank 0 moves the messages."""
    other = group.split(list(range(group.size)))
    word = torch.zeros(4)
    if group.rank == 0:
        arrived, verdict = threading.Event(), []
        for i in range(sends):  # more than a mailbox holds
            group.send(torch.full((4,), float(i)), 1)
        handle = group.all_reduce(torch.ones(4), async_op=True)
        handle.when_done(lambda: verdict.append(arrived.wait(10)))
        while not handle.is_completed():  # so that the progress thread ends it, and calls back
            time.sleep(0.001)
        other.recv(word, 1, timeout_s=LIMIT_S)
        arrived.set()
        while not verdict:
            time.sleep(0.001)
        assert verdict == [True], "the messages waited for the callback"
    else:
        time.sleep(0.1)
        group.all_reduce(torch.ones(4), timeout_s=LIMIT_S)
        time.sleep(0.1)  # rank 0 is in its callback now
        for i in range(sends):
            group.recv(word, 0, timeout_s=LIMIT_S)
            assert word.tolist() == [float(i)] * 4
        other.send(word, 0)
    other.close()


@pytest.mark.parametrize("size", [2])
def test_short_sends_go_on_during_a_callback(pool, size):
    pool.run(_sends_while_calling_back, 40)


def _closed_in_flight(group):
    """close with a call in flight that cannot complete: the handle raises, nothing hangs."""
    part = group.split(range(group.size))
    if group.rank == 0:
        handle = part.all_reduce(torch.ones(1000), async_op=True)
        part.close()
        with pytest.raises(unisono.UnisonoError):
            handle.wait(20.0)
        assert handle.is_completed() and isinstance(handle.exception(), unisono.UnisonoError)
    group.barrier()
    part.close()


@pytest.mark.parametrize("size", [2, 3])
def test_close_with_work_in_flight(pool, size):
    pool.run(_closed_in_flight)
