"""The cells of the fault matrix: what every rank does in each, and what it must be told. matrix.py has the table.

A cell is a function on a rank. It returns a list of what it was told: ``(kind, text, seconds since the fault)``, or an
empty list where everything is as it should be; wrong numbers raise. With ``inject=False`` the same function runs
without its fault, and nobody may be told anything: no cell passes because nothing could fail.
"""

from __future__ import annotations

import os
import signal
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

    def check_rest(self) -> None:
        """While ranks wait for the last one they leave the processors to others, spinning only for a moment."""
        share = min(self._waiting_share() for _ in range(3))  # noise only adds
        # Seen: 0.004 at rest and 0.1 spinning with 2 ranks, 0.013 (on a slow machine 0.14) and 0.65 with 7.
        assert share < 0.03 + 0.03 * self.size, f"{self.size} ranks that wait take {share} processors"

    def _waiting_share(self) -> float:
        """How many processors all ranks together take while they wait half a second for the last one."""
        self.group.barrier()
        began, used = time.monotonic(), time.process_time()
        if self.rank == self.last:
            time.sleep(0.5)
        self.reduce()
        used, took = time.process_time() - used, time.monotonic() - began
        all_used = torch.zeros(self.size)
        self.group.all_gather(all_used, torch.tensor([used]))
        return float(all_used.sum()) / took

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

    def word(self, name: str) -> None:
        """For `await_word` of other ranks."""
        (self.folder / name).touch()

    def await_word(self, name: str) -> None:
        """Without a call of the group, which would be told of a fault before its time."""
        until = time.monotonic() + 60.0
        while not (self.folder / name).exists() and time.monotonic() < until:
            time.sleep(0.001)

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
        plan = rendezvous.Plan(
            rendezvous.VERSION,
            c.size,
            list(range(c.size)),
            c.rank,
            listener.name,
            "00" * 16,
            rendezvous.place_of(c.rank),
        )
        use = store.add(f"unisono/second/uses/{c.rank}", 1)
        store.set(f"unisono/second/{use}/at/{c.rank}", plan.written())
        c.die()
    while c.inject and not (c.folder / "fault").exists():  # who is connected already hears of it at once
        time.sleep(0.001)
    return c.told(
        lambda: unisono.Group.from_store(store, c.rank, c.size, name="second", timeout_s=1.3 if c.inject else 30.0)
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
    c.call("all_reduce", kept)
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
    pid, (starts, start) = os.getpid(), os.pipe()
    if c.inject and c.rank == c.last and os.fork() == 0:  # before the others wait: on a busy machine it may take long
        os.read(starts, 1)
        time.sleep(0.015)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.2)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    c.group.barrier()
    if c.inject and c.rank == c.last:
        c.mark()
        os.write(start, b".")
        found = c.until_told(lambda: c.call("all_reduce", t, "avg"))
        os.wait()
        os.close(starts)
        os.close(start)
        return found
    found = c.until_told(lambda: c.call("all_reduce", t, "avg", timeout_s=1.5))  # not so short that busy ranks miss it
    if c.inject:
        t.fill_(7.0)
        time.sleep(1.5)
        assert t.min() == t.max() == 7.0, "written to after the error"
    os.close(starts)
    os.close(start)
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
    if c.inject and c.rank == c.last:  # it comes only when rank 0 has been told, so that nothing else ends its wait
        c.await_word("told")
    found = c.told(c.reduce)
    if c.rank == 0:
        c.word("told")
    return found
