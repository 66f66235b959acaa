"""The cells of the fault matrix: what every rank does in each, and what it must be told. matrix.py has the table.

A cell is a function on a rank. It returns a list of what it was told: ``(kind, text, seconds since the fault)``, or an
empty list where everything is as it should be; wrong numbers raise. With ``inject=False`` the same function runs
without its fault, and nobody may be told anything: no cell passes because nothing could fail.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

import unisono
from unisono.group import rendezvous

Told = list[tuple[str, str, float]]
LARGE = 8 << 20  # elements: some ten pieces of work, whatever the path


@dataclass
class Cell:
    """One run of a cell on one rank."""

    group: Any
    asynchronous: bool
    inject: bool
    folder: Path

    def __post_init__(self) -> None:
        self.rank, self.size = self.group.rank, self.group.size
        self.last = self.size - 1

    def call(self, verb: str, *args: Any, group: Any = None, **options: Any) -> None:
        """A verb of the group, synchronous or waited for."""
        made = getattr(group or self.group, verb)(*args, async_op=self.asynchronous, **options)
        if self.asynchronous:
            made.wait()

    def reduce(self, count: int = 1000, shared: bool = True, **options: Any) -> None:
        t = (unisono.zeros if shared else torch.zeros)(count)
        t += 1
        self.call("all_reduce", t, **options)
        assert t[0] == t[-1] == (options.get("group") or self.group).size, "wrong numbers"

    def mark(self) -> None:
        """The moment of the fault, for all ranks."""
        mine = self.folder / f"part{self.rank}"
        mine.write_text(repr(time.monotonic()))
        os.rename(mine, self.folder / "fault")

    def since(self) -> float:
        at = self.folder / "fault"
        return time.monotonic() - float(at.read_text()) if at.exists() else 0.0

    def die(self) -> None:
        self.mark()
        os.kill(os.getpid(), signal.SIGKILL)

    def told(self, action: Callable[[], Any]) -> Told:
        """What an action was told."""
        try:
            action()
        except (unisono.UnisonoError, ValueError, TypeError, OSError, KeyboardInterrupt) as error:
            return [(type(error).__name__, str(error), self.since())]
        return []

    def told_for_good(self, action: Callable[[], Any]) -> Told:
        """The same of an action that breaks the group: a later call quotes the cause."""
        if found := self.told(action):
            again = self.told(lambda: self.group.barrier(timeout_s=5.0))
            assert again and again[0][0] == found[0][0], f"first {found}, then {again}"
            assert found[0][1].partition(":")[2].split()[:3] == again[0][1].partition(":")[2].split()[:3], again
        return found

    def until_told(self, action: Callable[[], Any]) -> Told:
        """Calls until one fails; without the fault, a few."""
        for _ in range(10_000 if self.inject else 3):
            if found := self.told_for_good(action):
                return found
        return []


# -- deaths


def kill_before_joining(c: Cell) -> Told:
    if c.inject and c.rank == c.last:
        c.die()
    store = FileStore(str(c.folder / "store"), c.size)
    return c.told(
        lambda: unisono.Group.from_store(store, c.rank, c.size, name="second", timeout_s=1.0 if c.inject else 30.0)
    )


def kill_in_the_handshake(c: Cell) -> Told:
    """Its address is in the store, and nobody answers there."""
    store = FileStore(str(c.folder / "store"), c.size)
    if c.inject and c.rank == c.last:
        listener = unisono._core.Listener()
        plan = rendezvous.Plan(rendezvous.VERSION, c.size, list(range(c.size)), c.rank, listener.name, "00" * 16)
        use = store.add(f"unisono/second/uses/{c.rank}", 1)
        store.set(f"unisono/second/{use}/at/{c.rank}", plan.written())
        time.sleep(0.05)
        c.die()
    return c.told(
        lambda: unisono.Group.from_store(store, c.rank, c.size, name="second", timeout_s=1.5 if c.inject else 30.0)
    )


def kill_idle(c: Cell) -> Told:
    c.group.barrier()
    if c.inject and c.rank == c.last:
        c.die()
    while c.inject and not (c.folder / "fault").exists():
        time.sleep(0.001)
    return c.told_for_good(c.reduce)


def _kill_in(count: int, shared: bool) -> Callable[[Cell], Told]:
    def kill(c: Cell) -> Told:
        c.group.barrier()
        if c.inject and c.rank == c.last:
            delay_s = 0.01 + 0.007 * c.size
            threading.Thread(target=lambda: (time.sleep(delay_s), c.die()), daemon=True).start()
        return c.until_told(lambda: c.reduce(count, shared))

    return kill


kill_in_small_calls = _kill_in(8, False)
kill_in_heap_calls = _kill_in(LARGE, True)
kill_in_staged_calls = _kill_in(LARGE // 4, False)


def kill_in_fused_calls(c: Cell) -> Told:
    x, weight = torch.ones(64, 16), torch.ones(16, 2048)
    c.group.barrier()
    if c.inject and c.rank == c.last:
        threading.Thread(target=lambda: (time.sleep(0.03), c.die()), daemon=True).start()
    return c.until_told(lambda: unisono.matmul_all_reduce(x, weight, c.group, comm_turn=3))


def kill_unawaited(c: Cell) -> Told:
    """Calls that nobody waits for."""
    c.group.barrier()
    if c.inject and c.rank == c.last:
        c.die()
    handles = [c.group.all_reduce(torch.ones(n), async_op=True) for n in (10, 50_000)]

    def poll() -> None:
        while not all(h.is_completed() for h in handles):
            time.sleep(0.0005)
        for h in handles:
            if h.exception() is not None:
                raise h.exception()

    return c.told_for_good(poll)


def _kill_some(who: Callable[[int], list[int]]) -> Callable[[Cell], Told]:
    def kill(c: Cell) -> Told:
        c.group.barrier()
        if c.inject and c.rank in who(c.size):
            c.die()
        return c.until_told(c.reduce)

    return kill


kill_two = _kill_some(lambda size: list(range(max(1, size - 2), size)))
kill_rank_0 = _kill_some(lambda size: [0])
kill_all_but_one = _kill_some(lambda size: list(range(1, size)))


def kill_everybody(c: Cell) -> Told:
    """Leftovers: a run that crashed as a whole, then the next; the test looks for what is left."""
    kept = unisono.zeros(1 << 20)
    c.group.all_reduce(kept)
    if c.inject:
        c.die()
    return []


# -- stopped, slow, gone


def _stop(c: Cell, for_s: float, limit_s: float) -> Told:
    c.group.barrier()
    if c.inject and c.rank == c.last:
        pid = os.getpid()
        if os.fork() == 0:  # it wakes this process
            time.sleep(for_s)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        c.mark()
        os.kill(pid, signal.SIGSTOP)
        os.wait()
        return [] if for_s < limit_s else c.told_for_good(lambda: c.reduce(timeout_s=limit_s))
    while c.inject and not (c.folder / "fault").exists():
        time.sleep(0.001)
    return c.told_for_good(lambda: c.reduce(timeout_s=limit_s))


def stop(c: Cell) -> Told:
    return _stop(c, 1.5, 0.5)


def stop_and_go_on_in_time(c: Cell) -> Told:
    found = _stop(c, 0.2, 20.0)
    if c.inject and c.rank == c.last:
        found = c.told_for_good(lambda: c.reduce(timeout_s=20.0))
    return found


def stopped_rank_wakes_late(c: Cell) -> Told:
    """The others' tensors stay as they are after their error, whatever the stopped rank does then."""
    found: Told = []
    t = unisono.zeros(LARGE)
    t += 1
    c.group.barrier()
    if c.inject and c.rank == c.last:
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(0.015)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2.2)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        c.mark()
        found = c.until_told(lambda: c.call("all_reduce", t, "avg"))
        os.wait()
        return found
    found = c.until_told(lambda: c.call("all_reduce", t, "avg", timeout_s=1.5))  # not so short that busy ranks miss it
    if c.inject:
        t.fill_(7.0)
        time.sleep(1.5)
        assert t.min() == t.max() == 7.0, "written to after the error"
    return found


def slow(c: Cell) -> Told:
    c.group.barrier()
    if c.inject and c.rank == c.last:
        c.mark()
        time.sleep(1.0)
        c.told(c.reduce)
        return []
    return c.told_for_good(lambda: c.reduce(timeout_s=0.4 if c.inject else None))


def leave_by_close(c: Cell) -> Told:
    c.group.barrier()
    if c.inject and c.rank == c.last:
        c.mark()
        c.group.close()
        return []
    return c.told_for_good(c.reduce)


def leave_by_exit(c: Cell) -> Told:
    c.group.barrier()
    if c.inject and c.rank == c.last:
        c.mark()
        os._exit(3)
    return c.told_for_good(c.reduce)


def ctrl_c(c: Cell) -> Told:
    """Rank 0 is interrupted while it waits for the last rank, and the others are told."""
    c.group.barrier()
    if c.inject and c.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)

        def press() -> None:
            time.sleep(0.1)
            c.mark()
            os.kill(os.getpid(), signal.SIGALRM)

        threading.Thread(target=press, daemon=True).start()
    told = c.folder / "told"
    if c.inject and c.rank == c.last:  # it comes only when rank 0 has been told, so that nothing else ends its wait
        until = time.monotonic() + 60.0
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.001)
    found = c.told(c.reduce)
    if c.rank == 0:
        told.touch()
    return found


# -- calls that do not fit


def _differ(wrong: Callable[[Cell], Any]) -> Callable[[Cell], Told]:
    def cell(c: Cell) -> Told:
        c.group.barrier()
        c.mark()
        found = c.told(lambda: wrong(c) if c.inject and c.rank == c.last else c.reduce(64, False))
        c.reduce()  # the group goes on
        return found

    return cell


different_op = _differ(lambda c: c.call("broadcast", torch.ones(64), 0))
different_shape = _differ(lambda c: c.call("all_reduce", torch.ones(65)))
different_dtype = _differ(lambda c: c.call("all_reduce", torch.ones(64, dtype=torch.float64)))
different_reduce_op = _differ(lambda c: c.call("all_reduce", torch.ones(64), "max"))


def different_root(c: Cell) -> Told:
    c.group.barrier()
    c.mark()
    return c.told(lambda: c.call("broadcast", torch.ones(8), int(c.inject and c.rank == c.last)))


def different_splits(c: Cell) -> Told:
    counts = [2] * c.size
    if c.inject and c.rank == c.last:
        counts[0], counts[1] = 1, 3
    c.group.barrier()
    c.mark()
    out = torch.empty(2 * c.size)
    return c.told(lambda: c.call("all_gather", out, torch.ones(counts[c.rank]), counts))


def extra_call(c: Cell) -> Told:
    """The last rank makes one call too many; at the deadline everybody knows who did not come."""
    c.group.barrier()
    c.mark()
    found = c.told(lambda: c.reduce(timeout_s=20.0))
    if c.inject and c.rank == c.last:
        return found + c.told(lambda: c.reduce(timeout_s=0.4))
    time.sleep(1.0 if c.inject else 0.0)
    return found + (c.told(c.reduce) if c.inject else [])


def wrong_splits(c: Cell) -> Told:
    """Local: nothing is sent, and the group goes on."""
    found: Told = []
    for counts in ([-1, *[1] * c.last], [1] * (c.size + 1), [5] * c.size) if c.inject else ([1] * c.size,):
        found += c.told(lambda counts=counts: c.call("all_gather", torch.empty(c.size), torch.ones(1), counts))
    c.reduce()
    return found


# -- memory and files


def too_much_memory(c: Cell) -> Told:
    found = c.told(lambda: unisono.empty(1 << (45 if c.inject else 10), dtype=torch.uint8))
    c.reduce()
    return found


def too_few_files(c: Cell) -> Told:
    held = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = FileStore(str(c.folder / "store"), c.size)
    if c.inject:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 1, hard))
    found = c.told(lambda: unisono.Group.from_store(store, c.rank, c.size, name="second", timeout_s=10.0).close())
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    c.reduce()
    return found


# -- fork, ends, threads, callbacks


def fork(c: Cell) -> Told:
    """A child uses the group: a clear error there, and the parent is not disturbed."""
    if not c.inject:
        return c.told(c.reduce)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = c.told(lambda: c.group.all_reduce(torch.ones(3)))
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
    assert time.monotonic() - began < 2.0, "close took longer than it may"
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

    def work() -> None:
        try:
            for _ in range(20):
                c.reduce(100, False)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
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
    assert took < 2.0, f"close took {took} s"
    assert raised == ([ZeroDivisionError] if c.inject else []), raised
    del child
    c.reduce()
    return []


# -- sizes and kinds of tensors


def zero_elements(c: Cell) -> Told:
    c.call("all_reduce", torch.empty(0))
    counts = [0] * c.last + [3]
    out = torch.empty(3)
    c.call("all_gather", out, torch.full((counts[c.rank],), 4.0), counts)
    assert out.tolist() == [4.0] * 3
    return []


def odd_tensors(c: Cell) -> Told:
    """What cannot be taken is refused by name; the rest is right."""
    found: Told = []
    for t in [torch.ones(4, 4).t()[1:], torch.ones(3, device="meta"), torch.ones(1).expand(5)] if c.inject else []:
        found += c.told(lambda t=t: c.call("all_reduce", t))
    for t in (torch.tensor(1.0), torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.complex64)):
        c.call("all_reduce", t, "sum")
    misaligned = torch.ones(101, dtype=torch.uint8)[1:5].view(torch.uint8)
    c.call("all_reduce", misaligned)
    assert misaligned.tolist() == [c.size] * 4
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
    """Two processes compute on the same processors, and every call is right."""
    pids = []
    for _ in range(2 if c.inject and c.rank == 0 else 0):
        pid = os.fork()
        if pid == 0:
            until = time.monotonic() + 5
            while time.monotonic() < until:
                pass
            os._exit(0)
        pids.append(pid)
    for turn in range(20):
        c.reduce(1000 * turn + 1, turn % 2 == 0)
    c.group.barrier()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return []
