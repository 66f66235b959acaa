"""What a rank does in a fault test: join, get into the moment in question, report what happened, leave.

A rank talks to its test over a pipe: `tell` reports an event with its time (time.monotonic is one clock for
all processes), `hear` waits for a word from the test. Every body below runs inside `live`, which reports how
the body ended, how long `close` took, and what the group left behind in this process.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import FileStore, PrefixStore, TCPStore

import unisono
from tests import leaks
from unisono.base import settings

STREAM_BYTES = 256 << 20
LONG_S = 60.0  # for what comes before the moment in question
CLOSE_S = 4.0  # 2 are promised, and a loaded machine may not run a rank for a while; a close that hangs takes longer


class Line:
    """This rank's side of the pipe to its test."""

    def __init__(self, rank: int, size: int, path: str, pipe: Connection, options: dict[str, Any]) -> None:
        self.rank, self.size, self.path, self.options = rank, size, path, options
        self._pipe = pipe

    def tell(self, event: str, **facts: Any) -> None:
        self._pipe.send({"event": event, "at": time.monotonic(), **facts})

    def hear(self) -> Any:
        """The next word; EOFError ends a rank whose test is gone."""
        return self._pipe.recv()


def main(rank: int, size: int, path: str, pipe: Connection, body: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if a shell runs the tests in the background
    if options.get("one_core"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from tests.faults import survival  # it needs this module

    live(Line(rank, size, path, pipe, options), {**BODIES, **survival.BODIES}[body])


def live(line: Line, body: Any) -> None:
    kept = unisono.zeros(1000)  # the heap is there before anything is counted; it stays as long as its tensors
    kept += 5
    store = FileStore(line.path, line.size)
    settings.pretend_hosts = line.options.get("hosts", "")
    if settings.pretend_hosts:
        TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # the first server leaves a pipe to the process
    before = leaks.holdings()
    try:
        timeout_s = line.options.get("joining_timeout_s", LONG_S)
        world = group = unisono.Group.from_store(store, line.rank, line.size, timeout_s=timeout_s)
    except Exception as error:
        line.tell("refused", kind=type(error).__name__, text=str(error))
        return
    if limit_s := line.options.get("group_timeout_s"):  # not of joining: on a busy machine some ranks start late
        group = world.split(range(line.size), name="world", timeout_s=limit_s)
    line.tell("joined")
    try:
        body(line, group)
    except unisono.UnisonoError as error:
        line.tell("error", **described(error))
    except KeyboardInterrupt:
        line.tell("interrupted")
    else:
        line.tell("fine")
    try:
        if line.options.get("call_again"):
            group.barrier(timeout_s=5.0)
            line.tell("again fine")
    except unisono.UnisonoError as error:
        line.tell("again", **described(error))
    began = time.monotonic()
    group.close()
    line.tell("closed", took_s=time.monotonic() - began)
    world.close()
    del group, world
    gc.collect()
    line.tell("left", growth=leaks.settled_growth(before, limit_s=3.0), heap=kept.unique().tolist())
    word = line.hear()
    if word != "end":
        live_on(line, store, word)


def live_on(line: Line, store: FileStore, survivors: list[int]) -> None:
    """The survivors make a new group and use it."""
    number = survivors.index(line.rank)
    group = unisono.Group.from_store(PrefixStore("again", store), number, len(survivors), timeout_s=30.0)
    t = unisono.zeros(100_000)
    t += 1
    group.all_reduce(t)
    line.tell("second group", numbers=t.unique().tolist())
    group.close()


def described(error: unisono.UnisonoError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "peers": list(error.peers or ()),
        "op": error.op,
        "seq": error.seq,
        "group": error.group,
        "rank": error.rank,
    }


def tensor(line: Line, count: int) -> torch.Tensor:
    t = unisono.empty(count) if line.options.get("heap", True) else torch.empty(count)
    return t.fill_(1.0)


# --- bodies: options["late"] are the ranks that keep away until they hear "go" ------------------------------


def idle(line: Line, group: Any) -> None:
    """Nobody calls anything until told; then everybody does."""
    group.barrier()
    line.tell("inside")
    line.hear()
    group.all_reduce(tensor(line, line.options.get("count", 1000)))


def waiting(line: Line, group: Any) -> None:
    """All but the late ranks wait inside an all_reduce."""
    group.barrier(timeout_s=LONG_S)
    t = tensor(line, line.options.get("count", 1000))
    late = line.rank in line.options["late"]
    line.tell("inside")
    if late:
        line.hear()
    group.all_reduce(t, timeout_s=line.options.get("call_timeout_s"))


def streaming(line: Line, group: Any) -> None:
    """Large all_reduces without end, or `rounds` of them."""
    t = tensor(line, line.options.get("bytes", STREAM_BYTES) // 4)
    rounds = line.options.get("rounds")
    done = 0
    while rounds is None or done < rounds:
        group.all_reduce(t, "avg")
        done += 1
        if done == 1:
            line.tell("inside")
    assert t[-1].item() == 1.0


def multiplying(line: Line, group: Any) -> None:
    """Matmuls fused with their all-reduce without end, or `rounds` of them, in several pieces each."""
    x, weight = torch.ones(64, 16), torch.ones(16, 4096)
    rounds = line.options.get("rounds")
    done = 0
    while rounds is None or done < rounds:
        y = unisono.matmul_all_reduce(x, weight, group, comm_turn=3)
        done += 1
        if done == 1:
            line.tell("inside")
    assert y[-1, -1].item() == 16.0 * line.size


def in_flight(line: Line, group: Any) -> None:
    """Async calls that nobody waits for; the late ranks start theirs when told."""
    group.barrier()
    late = line.rank in line.options["late"]
    line.tell("inside")
    if late:
        line.hear()
    kept = [tensor(line, count) for count in (10, 50_000, 3_000_000)]
    handles = [group.all_reduce(t, async_op=True) for t in kept]
    while not all(handle.is_completed() for handle in handles):
        time.sleep(0.001)
    for handle in handles:
        if handle.exception() is not None:
            raise handle.exception()


def wait_on_handle(line: Line, group: Any) -> None:
    """As `waiting`, inside Handle.wait."""
    group.barrier(timeout_s=LONG_S)
    line.tell("inside")
    if line.rank in line.options["late"]:
        line.hear()
    limit_s = line.options.get("call_timeout_s")
    group.all_reduce(tensor(line, 1000), async_op=True, timeout_s=limit_s).wait()


def receiving(line: Line, group: Any) -> None:
    """Rank 0 receives from the late rank, which sends when told; the others wait in a barrier."""
    group.barrier()
    line.tell("inside")
    if line.rank in line.options["late"]:
        line.hear()
        group.send(tensor(line, 1000), 0)
    elif line.rank == 0:
        group.recv(tensor(line, 1000), line.options["late"][0])
    group.barrier()


def leaving(line: Line, group: Any) -> None:
    """The late rank leaves in the way of options["how"], the others wait in an all_reduce."""
    group.barrier()
    line.tell("inside")
    if line.rank in line.options["late"]:
        line.hear()
        line.tell("leaving")
        how = line.options["how"]
        if how == "exception":
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (the traceback is meant and would only disturb)
            raise RuntimeError("a fault in the user's code")
        if how == "sys.exit":
            sys.exit(3)
        if how == "os._exit":
            os._exit(0)
        if how == "close":
            group.close()
            return
    group.all_reduce(tensor(line, 1000))


def splitting(line: Line, group: Any) -> None:
    """Groups are split off, used and dropped without end, or `rounds` times; some are kept."""
    kept = []
    rounds = line.options.get("rounds")
    done = 0
    while rounds is None or done < rounds:
        child = group.split(range(line.size))
        child.all_reduce(tensor(line, 3000))
        kept = [*kept[-3:], child]
        done += 1
        if done == 1:
            line.tell("inside")


def signalled(line: Line, group: Any) -> None:
    """A Python signal handler runs while the rank waits, and the wait goes on."""
    seen = []

    def handler(number: int, frame: Any) -> None:
        seen.append(number)
        line.tell("handler ran")

    signal.signal(signal.SIGUSR1, handler)
    waiting(line, group)
    assert seen or line.rank in line.options["late"]


BODIES = {
    body.__name__: body
    for body in (
        *(idle, waiting, streaming, multiplying, in_flight, wait_on_handle),
        *(receiving, leaving, splitting, signalled),
    )
}
