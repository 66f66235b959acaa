"""Handles: waiting, asking, awaiting, dropping, failing; on unisono groups and on other backends alike."""

import asyncio
import gc
import threading
import time
from datetime import timedelta

import pytest
import torch

import unisono
from tests.functional.worlds import world
from unisono import comm_func
from unisono.base.handle import Finished, Handle

KINDS = ["Group", "unisono", "gloo"]


def _facts(group, kind, folder):
    with world(group, kind, folder) as where:
        x = torch.arange(5.0)
        out, handle = comm_func.all_reduce(x, "avg", where, async_op=True)
        assert isinstance(handle, Handle) and "all_reduce" in repr(handle)
        assert handle.wait() is None and handle.wait() is None
        handle.wait(1.0)
        handle.wait(timeout=timedelta(seconds=1))
        assert handle.is_completed() and handle.exception() is None
        assert handle.result() is out and torch.equal(out, x)
        called = []
        handle.when_done(lambda: called.append(1))
        deadline = time.monotonic() + 20
        while not called and time.monotonic() < deadline:
            time.sleep(0.001)
        assert called == [1]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_handle_says(pool, size, kind, tmp_path):
    pool.run(_facts, kind, str(tmp_path))


def _not_yet(group, kind, folder, grad):
    """Nothing is complete before the last rank has come; a wait that ends leaves the call going on."""
    with world(group, kind, folder) as where:
        x = torch.ones(3, requires_grad=grad)
        if group.rank == 0:
            out, handle = comm_func.all_reduce(x, "sum", where, async_op=True)
            assert not handle.is_completed() and handle.exception() is None
            with pytest.raises(unisono.CollectiveTimeoutError, match="the call goes on"):
                handle.wait(0.05)
            assert not handle.is_completed()
            threading.Timer(0.05, group.send, (torch.zeros(1), 1)).start()
            handle.wait(30)
        else:
            group.recv(torch.zeros(1), 0)
            out, handle = comm_func.all_reduce(x, "sum", where, async_op=True)
            handle.wait()
        assert out.tolist() == [2.0] * 3 and out.requires_grad == grad


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [False, True])
def test_not_before_the_last_has_come(pool, size, kind, grad, tmp_path):
    pool.run(_not_yet, kind, str(tmp_path), grad)


def _message_not_yet(group, kind, folder):
    """A wait for a message that ends leaves the message, and the group, as they were."""
    with world(group, kind, folder) as where:
        if group.rank == 0:
            out, handle = comm_func.irecv(torch.zeros(3), 1, where)
            for _ in range(2):
                with pytest.raises(unisono.CollectiveTimeoutError, match="the call goes on"):
                    handle.wait(0.05)
            assert not handle.is_completed()
            group.send(torch.zeros(1), 1)
            handle.wait(30)
            assert out.tolist() == [1.0] * 3
        else:
            group.recv(torch.zeros(1), 0)
            comm_func.isend(torch.ones(3), 0, where).wait(30)
        assert comm_func.all_reduce(torch.ones(2), "sum", where)[0].tolist() == [2.0] * 2


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_goes_on_when_a_wait_for_it_ends(pool, size, kind, tmp_path):
    pool.run(_message_not_yet, kind, str(tmp_path))


def _awaited(group, kind, folder):
    """`await` gives the result, and other tasks run while the call waits for the other rank."""
    with world(group, kind, folder) as where:
        ticks = []

        async def tick():
            while True:
                ticks.append(1)
                await asyncio.sleep(0.001)

        async def main():
            ticking = asyncio.create_task(tick())
            if group.rank == 1:
                await asyncio.sleep(0.1)  # rank 0 waits for this rank, without standing still
            before = len(ticks)
            total, handle = comm_func.all_reduce(torch.ones(3), "sum", where, async_op=True)
            result = await handle
            assert result is total and total.tolist() == [2.0] * 3
            during = len(ticks) - before
            again = await handle
            both = await asyncio.gather(
                _result(comm_func.all_gather_into_tensor(torch.ones(2), where, async_op=True)[1]),
                _result(comm_func.reduce_scatter_tensor(torch.ones(2), "max", where, async_op=True)[1]),
            )
            assert again is total and both[0].tolist() == [1.0] * 4 and both[1].tolist() == [1.0]
            ticking.cancel()
            return during

        return asyncio.run(main())


async def _result(handle):
    return await handle


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", KINDS)
def test_await(pool, size, kind, tmp_path):
    first, _ = pool.run(_awaited, kind, str(tmp_path))
    assert first > 3, "the other task stood still"


def _cancelled(group):
    """A task that stops waiting does no harm, nor does a loop that is gone when the call ends."""
    part = group.split(range(group.size))
    if group.rank == 0:
        out, handle = comm_func.all_reduce(torch.ones(3), "sum", part, async_op=True)

        async def main():
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_result(handle), 0.05)

        asyncio.run(main())
    group.barrier()
    if group.rank != 0:
        out, handle = comm_func.all_reduce(torch.ones(3), "sum", part, async_op=True)
    handle.wait(30)
    assert out.tolist() == [2.0] * 3
    part.close()


@pytest.mark.parametrize("size", [2])
def test_cancelled(pool, size):
    pool.run(_cancelled)


def _dropped(group, kind, folder):
    """Nobody keeps handles, results or inputs; what comes later is right."""
    with world(group, kind, folder) as where:
        for turn in range(20):
            comm_func.all_reduce(torch.full((3000,), float(turn)), "avg", where, async_op=True)
            comm_func.all_gather_into_tensor(torch.ones(3000), where, async_op=True)
            comm_func.reduce_scatter_tensor(torch.ones(3000).requires_grad_(), "sum", where, async_op=True)
            if turn % 5 == 0:
                gc.collect()
        out, handle = comm_func.all_reduce(torch.ones(4), "sum", where, async_op=True)
        handle.wait()
        return out.tolist()


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", KINDS)
def test_dropping_is_safe(pool, size, kind, tmp_path):
    assert pool.run(_dropped, kind, str(tmp_path)) == [[2.0] * 4] * 2


def _failed(group):
    """The error of the call comes from wait, from result, from await and from exception."""
    part = group.split(range(group.size))
    shape = (3,) if group.rank == 0 else (4,)
    _, handle = comm_func.all_reduce(torch.ones(shape), "sum", part, async_op=True)
    for ask in (handle.wait, handle.result, lambda: asyncio.run(_result(handle)), handle.wait):
        with pytest.raises(unisono.MismatchError):
            ask()
    assert handle.is_completed() and isinstance(handle.exception(), unisono.MismatchError)
    with pytest.raises(unisono.MismatchError):
        comm_func.all_reduce(torch.ones(shape), "sum", part)
    part.close()


@pytest.mark.parametrize("size", [2])
def test_errors(pool, size):
    pool.run(_failed)


def _closed(group):
    """The group goes while a task awaits: the task gets the error."""
    part = group.split(range(group.size))
    if group.rank == 0:
        _, handle = comm_func.all_reduce(torch.ones(3), "sum", part, async_op=True)

        async def main():
            asyncio.get_running_loop().call_later(0.05, part.close)
            with pytest.raises(unisono.UnisonoError):
                await handle

        asyncio.run(main())
    group.barrier()
    part.close()


@pytest.mark.parametrize("size", [2])
def test_group_closed_while_awaited(pool, size):
    pool.run(_closed)


class _Broken:
    """A Work of another backend that fails."""

    def __init__(self):
        self.asked = 0

    def is_completed(self):
        return self.asked > 0

    def wait(self, timeout=None):
        self.asked += 1
        raise RuntimeError("connection reset")


def test_a_work_that_fails():
    from unisono.transport.pending import WorksPending

    finished = []
    handle = Handle(WorksPending([_Broken()], lambda: finished.append(1)), "all_reduce", None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection reset"):
            handle.wait()
    assert handle.is_completed() and "connection reset" in str(handle.exception()) and not finished


class _Receive:
    """A receive of gloo: a second wait would take another message."""

    def __init__(self):
        self.waits = 0
        self.waited_for = threading.Event()
        self.message = threading.Event()

    def is_completed(self):
        return False

    def wait(self, timeout=None):
        self.waits += 1
        self.waited_for.set()
        assert self.message.wait(20)


def test_a_work_is_waited_for_once():
    from unisono.transport.pending import WorksPending

    work, called, finished = _Receive(), threading.Event(), []
    handle = Handle(WorksPending([work], lambda: finished.append(1)), "recv", None)
    handle.when_done(called.set)
    assert work.waited_for.wait(20)
    with pytest.raises(unisono.CollectiveTimeoutError):
        handle.wait(0.01)
    assert work.waits == 1
    waiting = [threading.Thread(target=handle.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    work.message.set()
    handle.wait()
    for thread in waiting:
        thread.join(20)
    assert called.wait(20) and work.waits == 1 and finished == [1] and handle.exception() is None


def test_a_last_step_that_fails():
    from unisono.transport.pending import WorksPending

    def fail():
        raise RuntimeError("no memory")

    work = _Receive()
    work.message.set()
    handle = Handle(WorksPending([work], fail), "all_reduce", None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            handle.wait()
    assert work.waits == 1


def test_finished():
    handle = Handle(Finished(), "all_reduce", 5)
    assert handle.is_completed() and handle.result() == 5 and asyncio.run(_result(handle)) == 5
