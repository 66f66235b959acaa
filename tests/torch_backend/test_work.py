"""Work handles: waiting, states, errors, futures with callbacks, results; and what the profiler sees of a call."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import unisono
from tests.torch_backend import world

LATE_S = 0.3


def _last():
    return dist.get_rank() == dist.get_world_size() - 1


# Every function that gives a handle -> (call, the tensors it writes on this rank, as the future should hold them)
def _all_reduce():
    t = torch.ones(5)
    return dist.all_reduce(t, async_op=True), [t]


def _reduce():
    t = torch.ones(5)
    return dist.reduce(t, 0, async_op=True), [t]


def _broadcast():
    t = torch.full((5,), float(dist.get_rank()))
    return dist.broadcast(t, 0, async_op=True), [t]


def _all_gather():
    outputs = [torch.zeros(5) for _ in range(dist.get_world_size())]
    return dist.all_gather(outputs, torch.ones(5), async_op=True), outputs


def _all_gather_single():
    t = torch.zeros(5 * dist.get_world_size())
    return dist.all_gather_single(t, torch.ones(5), async_op=True), [t]


def _reduce_scatter():
    t = torch.zeros(5)
    return dist.reduce_scatter(t, [torch.ones(5) for _ in range(dist.get_world_size())], async_op=True), [t]


def _reduce_scatter_single():
    t = torch.zeros(5)
    return dist.reduce_scatter_single(t, torch.ones(5 * dist.get_world_size()), async_op=True), [t]


def _gather():
    outputs = [torch.zeros(5) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    return dist.gather(torch.ones(5), outputs, dst=0, async_op=True), outputs or []


def _scatter():
    t = torch.zeros(5)
    inputs = [torch.ones(5) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    return dist.scatter(t, inputs, src=0, async_op=True), [t]


def _all_to_all():
    outputs = [torch.zeros(5) for _ in range(dist.get_world_size())]
    return dist.all_to_all(outputs, [torch.ones(5) for _ in outputs], async_op=True), outputs


def _all_to_all_single():
    t = torch.zeros(5 * dist.get_world_size())
    return dist.all_to_all_single(t, torch.ones_like(t), async_op=True), [t]


def _barrier():
    return dist.barrier(async_op=True), []


FUNCTIONS = [
    _all_reduce, _reduce, _broadcast, _all_gather, _all_gather_single, _reduce_scatter, _reduce_scatter_single,
    _gather, _scatter, _all_to_all, _all_to_all_single, _barrier,
]  # fmt: skip


def _flat(value):
    return [value] if isinstance(value, torch.Tensor) else [t for part in value for t in _flat(part)]


def _states(which):
    """Before the last rank comes nothing is over; afterwards everything is, by every way of asking."""
    name = FUNCTIONS[which].__name__
    dist.barrier()
    if _last():
        time.sleep(LATE_S)
    work, outputs = FUNCTIONS[which]()
    waits_for_last = not _last() and name not in ("_broadcast", "_scatter", "_gather", "_reduce")
    complaints = []
    if waits_for_last:
        if work.is_completed() or work.is_success() or work.exception() is not None:
            complaints.append(f"{name} is over before the last rank came")
        try:
            work.wait(timedelta(milliseconds=20))
            complaints.append(f"{name}: wait of 20 ms returned")
        except dist.DistBackendError as error:
            if not isinstance(error, TimeoutError):
                complaints.append(f"{name}: {error!r} is no TimeoutError")
    if work.wait(timedelta(seconds=20)) is not True or work.wait() is not True:
        complaints.append(f"{name}: wait did not return True")
    if not work.is_completed() or not work.is_success() or work.exception() is not None:
        complaints.append(f"{name} is not over after wait: {work.exception()}")
    for what, found in (("result", work.result()), ("future", _flat(work.get_future().wait()))):
        if len(found) != len(outputs) or any(a.data_ptr() != b.data_ptr() for a, b in zip(found, outputs, strict=True)):
            complaints.append(f"{name}: its {what} is {found}, not the outputs {outputs}")
    return complaints


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("which", range(len(FUNCTIONS)), ids=[f.__name__ for f in FUNCTIONS])
def test_states(ranks, size, which):
    ranks.check(_states, which)


def _future():
    """Callbacks run when the call is over, in order, from another thread or at once; their values travel on."""
    size = dist.get_world_size()
    for late in (True, False):
        dist.barrier()
        t = torch.ones(4)
        if _last() and late:
            time.sleep(LATE_S)
        work = dist.all_reduce(t, async_op=True)
        if not late:
            work.wait()
        calls = []
        future = work.get_future()
        first = future.then(
            lambda f, calls=calls: calls.append(("first", threading.get_ident())) or f.value()[0] / size
        )
        second = first.then(lambda f, calls=calls: calls.append(("second", 0)) or f.value() + 1)
        future.add_done_callback(lambda f, calls=calls: calls.append(("third", 0)))
        assert torch.equal(second.wait(), torch.full((4,), 2.0))
        assert torch.equal(future.wait()[0], torch.full((4,), float(size))) and future.done()
        deadline = time.monotonic() + 10
        while len(calls) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [name for name, _ in calls] == ["first", "second", "third"], calls
        if late and not _last():
            assert calls[0][1] != threading.get_ident(), "the callback of a pending call ran in the caller's thread"
    both = torch.futures.collect_all([dist.all_reduce(torch.ones(1), async_op=True).get_future() for _ in range(3)])
    assert [f.value()[0].item() for f in both.wait()] == [size] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_future(ranks, size):
    ranks.run(_future)


def _errors():
    """A call that failed says so by all ways of asking, and only that one."""
    before, bad, after = torch.ones(3), torch.ones(20 + _last()), torch.ones(3)
    works = [dist.all_reduce(t, async_op=True) for t in (before, bad, after)]
    with pytest.raises(unisono.MismatchError, match="ranks disagree"):
        works[1].wait()
    assert works[1].is_completed() and not works[1].is_success()
    assert isinstance(works[1].exception(), unisono.MismatchError)
    with pytest.raises(unisono.MismatchError):
        works[1].result()
    future = works[1].get_future()
    with pytest.raises(RuntimeError, match="ranks disagree"):
        future.wait()
    seen = []
    chained = future.then(lambda f: seen.append("called") or f.value())
    with pytest.raises(RuntimeError, match="ranks disagree"):
        chained.wait()
    assert seen == ["called"]
    for work, t in ((works[0], before), (works[2], after)):
        work.wait()
        assert work.is_success() and t.tolist() == [float(dist.get_world_size())] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_errors(ranks, size):
    ranks.run(_errors)


def _errors_in_futures():
    """The future of a call that is going to fail: its callbacks get the error when it comes."""
    dist.barrier()
    if _last():
        time.sleep(LATE_S)
    future = dist.all_reduce(torch.ones(20 + _last()), async_op=True).get_future()
    words = future.then(lambda f: _words_of(f))
    assert "ranks disagree" in words.wait()
    coalesced = dist._coalescing_manager(async_ops=True)
    with coalesced as manager:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(20 + _last()))
        dist.all_reduce(torch.ones(4))
    with pytest.raises(unisono.MismatchError):
        manager.wait()


def _words_of(future):
    try:
        future.value()
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("size", [2])
def test_errors_in_futures(ranks, size):
    ranks.run(_errors_in_futures)


def _dropped():
    """Handles that nobody keeps: their calls run to the end all the same, and in order."""
    tensors = [torch.full((n,), 1.0) for n in (1, 100, 50_000) * 20]
    for t in tensors:
        dist.all_reduce(t, async_op=True)
    for t in tensors[::2]:
        dist.all_reduce(t, async_op=True).get_future().then(lambda f: f.value()[0].mul_(10))
    dist.barrier()
    size = float(dist.get_world_size())
    # A barrier is behind all of them in the group's order; callbacks may still be running.
    deadline = time.monotonic() + 20
    want = [size * size * 10 if i % 2 == 0 else size for i in range(len(tensors))]
    while [t[-1].item() for t in tensors] != want and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [t[0].item() for t in tensors] == want and [t[-1].item() for t in tensors] == want


@pytest.mark.parametrize("size", [2, 3])
def test_dropped_handles(ranks, size):
    ranks.run(_dropped)


def _threads():
    """Handles may be waited for in other threads, several in one thread, one in several."""
    tensors = [torch.ones(10) for _ in range(8)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    threads = [threading.Thread(target=work.wait) for work in works * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(t.tolist() == [float(dist.get_world_size())] * 10 for t in tensors)


@pytest.mark.parametrize("size", [2])
def test_waiting_in_threads(ranks, size):
    ranks.run(_threads)


def _profiled():
    """Ranges named unisono:<function>, with the shapes of the tensors, as torch's own groups have gloo:<function>."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(3, 5))
        dist.all_reduce(torch.ones(7), async_op=True).wait()
        dist.reduce(torch.ones(3), 0)
        dist.broadcast(torch.ones(2, 2), 0)
        dist.all_gather([torch.ones(4) for _ in range(size)], torch.ones(4))
        dist.all_gather_single(torch.ones(4 * size), torch.ones(4))
        dist.reduce_scatter(torch.ones(4), [torch.ones(4) for _ in range(size)])
        dist.reduce_scatter_single(torch.ones(4), torch.ones(4 * size))
        dist.gather(torch.ones(4), [torch.ones(4) for _ in range(size)] if rank == 0 else None, dst=0)
        dist.scatter(torch.ones(4), [torch.ones(4) for _ in range(size)] if rank == 0 else None, src=0)
        dist.all_to_all_single(torch.ones(4 * size), torch.ones(4 * size))
        works = [dist.isend(torch.ones(9), (rank + 1) % size), dist.irecv(torch.ones(9), (rank - 1) % size)]
        for work in works:
            work.wait()
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(6))
            dist.all_reduce(torch.ones(8))
        dist.barrier()
    shapes = {}
    for event in profiler.events():
        if event.name.startswith("unisono:"):
            shapes.setdefault(event.name.removeprefix("unisono:"), []).append(event.input_shapes)
    want = {
        "all_reduce": [[3, 5]], "reduce": [[3]], "broadcast": [[2, 2]], "all_gather": [[4], [4]],
        "_all_gather_base": [[4 * size], [4]], "reduce_scatter": [[4], [4]],
        "_reduce_scatter_base": [[4], [4 * size]], "scatter": [[4], [4]] if rank == 0 else [[4]],
        "gather": [[4], [4]] if rank == 0 else [[4]], "all_to_all": [[4 * size], [4 * size]],
        "send": [[9]], "recv": [[9]], "all_reduce_coalesced": [[6], [8]], "barrier": [],
    }  # fmt: skip
    assert {name: found[0] for name, found in shapes.items()} == want, shapes
    assert len(shapes["all_reduce"]) == 2 and shapes["all_reduce"][1] == [[7]], shapes


def _in_world(group, fn):
    world.enter(group)
    fn()


def test_profiler():
    world.run_fresh(2, _in_world, _profiled)  # since the profiler's thread stays


def _time_limits():
    """wait's limit ends the waiting, not the call."""
    dist.barrier()
    t = torch.ones(3)
    if _last():
        time.sleep(LATE_S)
    began = time.monotonic()
    work = dist.all_reduce(t, group=world.groups["world"].group, async_op=True)
    if not _last():
        with pytest.raises(TimeoutError):
            work.wait(timedelta(milliseconds=30))
        assert not work.is_completed() and time.monotonic() - began < 20
    work.wait()
    assert t.tolist() == [float(dist.get_world_size())] * 3


@pytest.mark.parametrize("size", [2])
def test_a_wait_that_timed_out_can_be_repeated(ranks, size):
    ranks.run(_time_limits)
