"""The other cells of the fault matrix: too little of something, odd tensors, threads, hooks, ends, strangers."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

import torch
from torch.distributed import FileStore

import unisono
from tests import leaks
from tests.faults.cells import Cell, Told
from tests.faults.scenarios import CLOSE_S
from unisono.group import rendezvous

# -- memory and files


def too_much_memory(c: Cell) -> Told:
    found = c.told(lambda: unisono.empty(1 << (45 if c.inject else 10), dtype=torch.uint8))
    c.reduce()
    return found


def too_few_files(c: Cell) -> Told:
    c.group.barrier()
    before = leaks.holdings()
    held = len(before.fds) + 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = FileStore(str(c.folder / "store"), c.size)
    if c.inject:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 1, hard))
    found = c.told(lambda: unisono.Group.from_store(store, c.rank, c.size, name="second", timeout_s=10.0).close())
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    c.reduce()
    if left := leaks.settled_growth(before, limit_s=5.0):
        raise AssertionError(f"left behind: {left}")
    return found


# -- fork, ends, threads, callbacks


def fork(c: Cell) -> Told:
    """A child uses the group: a clear error there, and the parent is not disturbed."""
    if not c.inject:
        return c.told(c.reduce)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = c.told(lambda: c.call("all_reduce", torch.ones(3)))
        os.write(write, f"{told[0][0]}\n{told[0][1]}".encode() if told else b"nothing\n")
        os._exit(0)
    c.reduce()
    os.waitpid(pid, 0)
    kind, _, text = os.read(read, 10_000).decode().partition("\n")
    os.close(read), os.close(write)
    return [(kind, text, 0.0)]


def end_with_work_in_flight(c: Cell) -> Told:
    """The group is dropped with calls under way that cannot end; close takes less than two seconds."""
    child = c.group.split(range(c.size))
    handles = []
    if c.inject and c.rank != c.last:
        handles = [child.all_reduce(torch.ones(n), async_op=True) for n in (10, 1_000_000)]
        c.mark()
    c.group.barrier()
    began = time.monotonic()
    child.close()
    assert time.monotonic() - began < CLOSE_S, "close took longer than it may"
    found: Told = []
    for h in handles:
        found += c.told(h.wait)
    del child, handles
    gc.collect()
    c.group.barrier()
    return found


def many_threads(c: Cell) -> Told:
    """Threads on one group and groups on one thread, with the same order of calls on all ranks."""
    groups = [c.group.split(range(c.size)) for _ in range(3)]
    for turn in range(10):
        for g in groups:
            c.reduce(50 * turn + 1, turn % 2 == 0, group=g)
    # On one group, the order of threads differs between ranks: calls that are alike fit whichever comes first.
    failed = []

    def work(count: int) -> None:
        try:
            for _ in range(20):
                c.reduce(count, False)
        except BaseException as error:
            failed.append(error)

    for count in (100, 50_000):
        threads = [threading.Thread(target=work, args=(count,)) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not failed, failed[0]
    for g in groups:
        g.close()
    return []


def callbacks(c: Cell) -> Told:
    """One sleeps, one drops the last references, one raises, of calls that closing has to end: within two seconds."""
    child = c.group.split(range(c.size))
    wake, raised = threading.Event(), []
    hook, sys.unraisablehook = sys.unraisablehook, lambda told: raised.append(told.exc_type)
    # Nobody sends these; and the last rank never makes the call that the others have begun.
    never = [child.recv(torch.empty(4), (c.rank + 1) % c.size, tag=i, async_op=True) for i in range(3)]
    if c.inject and c.rank != c.last:
        never[:0] = [child.all_reduce(torch.ones(100_000), async_op=True)]
        never[0].when_done(lambda: wake.wait(10.0))
    if c.inject:
        never[-3].when_done(lambda: wake.wait(10.0))
        never[-2].when_done(never.clear)
        never[-1].when_done(lambda: 1 / 0)
    c.group.barrier()
    began = time.monotonic()
    child.close()
    took = time.monotonic() - began
    until = time.monotonic() + 5.0
    while c.inject and not (raised and not never) and time.monotonic() < until:
        time.sleep(0.001)
    wake.set()
    c.group.barrier()  # no rank of the child may come late with a second error
    sys.unraisablehook = hook
    assert took < CLOSE_S, f"close took {took} s"
    assert raised == ([ZeroDivisionError] if c.inject else []), raised
    del child
    c.reduce()
    return []


def calls_in_hooks(c: Cell) -> Told:
    """Calls inside of an autograd hook and of a handle's callback: in the group whose call is over, and in another."""
    child = c.group.split(range(c.size))
    weight = torch.ones(3, requires_grad=True)

    def sum_of_ranks(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        c.call("all_reduce", grad)
        return grad

    weight.register_hook(sum_of_ranks)
    (weight * (c.rank + 1)).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [c.size * (c.size + 1) / 2] * 3, weight.grad
    for group in (c.group, child):
        over, failed = threading.Event(), []

        def call(group: Any = group, over: threading.Event = over, failed: list[BaseException] = failed) -> None:
            try:
                c.reduce(1000, group=group, timeout_s=20.0)
            except BaseException as error:
                failed.append(error)
            over.set()

        t = torch.ones(100_000)
        if c.rank == c.last:
            time.sleep(0.05)  # so that elsewhere the callback comes from the thread that ends the call
        handle = c.group.all_reduce(t, async_op=True)
        handle.when_done(call)
        handle.wait()
        assert over.wait(30.0), "a call inside of a callback has not ended"
        assert not failed, failed[0]
        assert t.eq(c.size).all()
    c.reduce()
    child.close()
    return []


# -- sizes and kinds of tensors


def zero_elements(c: Cell) -> Told:
    """On all ranks, where it still waits for everybody, and on all but one."""
    here = c.folder / "here"
    c.group.barrier()
    if c.rank == c.last:
        time.sleep(0.2)
        here.touch()
    c.call("all_reduce", torch.empty(0))
    assert here.exists(), "did not wait for the last rank"
    counts = [0] * c.last + [3]
    out = torch.empty(3)
    c.call("all_gather", out, torch.full((counts[c.rank],), 4.0), counts)
    assert out.tolist() == [4.0] * 3
    return []


def odd_tensors(c: Cell) -> Told:
    """What cannot be taken is refused by name; the rest is right."""
    found: Told = []
    small = torch.tensor([0.5, -2.0, 448.0, 0.0])  # each a number of eight bits
    odd = [
        torch.ones(4, 4).t()[1:],
        torch.ones(3, device="meta"),
        torch.ones(1).expand(5),
        small.to(torch.float8_e4m3fn),
    ]
    for t in odd if c.inject else []:
        found += c.told(lambda t=t: c.call("all_reduce", t))
    assert len(found) == (4 if c.inject else 0), found
    assert not c.inject or "sum is not defined for torch.float8_e4m3fn" in found[-1][1], found

    total = c.size * (c.size + 1) // 2
    for mine, want in (
        (torch.tensor(c.rank + 1.5), torch.tensor(total + c.size * 0.5)),
        (torch.tensor([True, False, c.rank == 0]), torch.tensor([True, False, True])),
        (torch.tensor([1 + 2j * (c.rank + 1), -1j]), torch.tensor([c.size + 2j * total, -1j * c.size])),
        (torch.ones(101, dtype=torch.uint8)[1:5], torch.full((4,), c.size, dtype=torch.uint8)),  # misaligned
    ):
        c.call("all_reduce", mine)
        assert mine.dtype == want.dtype and mine.shape == want.shape and mine.equal(want), (mine, want)

    # Numbers of eight bits have no sum here, but they move, bit by bit.
    eight = [(small * 0.5**r).to(torch.float8_e4m3fn).view(torch.uint8) for r in range(c.size)]
    gathered = torch.empty(4 * c.size, dtype=torch.float8_e4m3fn)
    c.call("all_gather", gathered, eight[c.rank].clone().view(torch.float8_e4m3fn))
    assert gathered.view(torch.uint8).equal(torch.cat(eight)), gathered
    mine = eight[c.rank].clone().view(torch.float8_e4m3fn)
    c.call("broadcast", mine, c.last)
    assert mine.view(torch.uint8).equal(eight[c.last]), mine
    return found


def beyond_32_bits(c: Cell) -> Told:
    t = torch.zeros((1 << 31) + 5, dtype=torch.uint8)
    t[-1] = t[0] = 1
    c.call("all_reduce", t)
    assert t[-1] == t[0] == c.size and int(t.count_nonzero()) == 2
    return []


def many_ranks(c: Cell) -> Told:
    for count in (1, 1000, 100_000):
        c.reduce(count)
    if c.size < 16:  # of many more, looks at their peers alone take much of two processors
        c.check_rest()
    return []


# -- strangers


def another_version(c: Cell) -> Told:
    store = FileStore(str(c.folder / "store"), c.size)
    if c.inject and c.rank == c.last:
        rendezvous.VERSION = "0.0.1, memory layout 0"
    c.group.barrier()
    c.mark()
    try:
        return c.told(lambda: unisono.Group.from_store(store, c.rank, c.size, name="second", timeout_s=20.0).close())
    finally:
        rendezvous.VERSION = f"{unisono.__version__}, memory layout {unisono._core.LAYOUT}"


def garbage_on_the_socket(c: Cell) -> Told:
    """Strangers say all kinds of things at every rank's door, and stay; the group forms all the same."""
    import random
    import socket

    store = FileStore(str(c.folder / "store"), c.size)
    listener = unisono._core.Listener()
    store.set(f"door {c.rank}", listener.name)
    names = [store.get(f"door {r}").decode() for r in range(c.size)]
    dice, strangers = random.Random(c.rank), []
    for name in names if c.inject else []:
        for size in (None, 0, 1, 232, 233, 4096):
            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            s.connect("\0" + name)
            if size is not None:
                s.send(dice.randbytes(size))
            strangers.append(s)
    c.group.barrier()
    made = listener.join(c.rank, c.size, "second", b"n" * 16, 5, 20.0, names)
    made.barrier(20.0, False)
    c.group.barrier()
    made.close("done", 0.0)
    for s in strangers:
        s.close()
    return []


def wait_in_a_circle(c: Cell) -> Told:
    """Rank 0 waits in one group for rank 1, which waits for rank 0 in another."""
    pair = list(range(c.size))
    a, b = c.group.split(pair), c.group.split(pair)
    first, then = (b, a) if c.inject and c.rank == c.last else (a, b)
    c.group.barrier()
    c.mark()
    found = c.told(lambda: c.reduce(group=first, timeout_s=20.0))
    if not c.inject:
        c.reduce(group=then)
    c.group.barrier()  # who has been told leaves only when all have
    a.close(), b.close()
    return found


def lost_and_shrunk(c: Cell) -> Told:
    """The survivors go on, with what the lost rank had kept."""
    if c.rank == c.last:
        kept = unisono.keep("state", unisono.zeros(1000))
        with kept.update(3) as t:
            t += 3
        if c.inject:
            c.group.barrier()
            c.die()
    else:
        c.group.barrier()
        while c.inject:
            try:
                c.reduce()
            except unisono.UnisonoError:
                break
    if not c.inject:
        if c.rank == c.last:
            c.group.barrier()
        return []
    new, lost = c.group.shrink()
    took = c.since()
    state = new.inherit(lost[0])["state"]
    assert lost == [c.last] and state.whole and state.step == 3 and state.tensor.eq(3).all()
    c.reduce(group=new)
    new.close()
    return [("Group.shrink", f"a group of {new.size}, rank {lost[0]} is lost", took)]


def busy_neighbours(c: Cell) -> Told:
    """Two processes compute on the same processors: every call is right, and who waits leaves them to the others."""
    pids = []
    for _ in range(2 if c.inject and c.rank == 0 else 0):
        pid = os.fork()
        if pid == 0:
            until = time.monotonic() + 10
            while time.monotonic() < until:
                pass
            os._exit(0)
        pids.append(pid)
    for turn in range(20):
        c.reduce(1000 * turn + 1, turn % 2 == 0)
    try:
        c.check_rest()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return []
