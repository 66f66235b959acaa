"""Turn-taking between the rank that leads a benchmark and all others, which sleep in a socket until it is their turn.

Orders and answers are JSON, one packet each, on Unix sockets in a folder only this user can enter. A *turn* is some
untimed calls, a barrier of the same library, and a batch of timed calls; every rank, of every library, times it by
:func:`timed`, and the leader takes the slowest rank's time.

    leader -> rank   {"prepare": case}    {"run": [warmup, calls]}    {"drop": 1}    end of file: quit
    rank -> leader   {"wrong": 0, "seconds": 1.2e-6}  or {"lacks": "why"}    {"seconds": 1.2e-6}    {"dropped": 1}
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from itertools import repeat
from typing import Any, Protocol

from .cases import Case, Lacking

PACKET_BYTES = 1 << 18
START_S = 60.0  # a rank that has not come by then will not come

Call = Callable[[], object]


def timed(call: Call, calls: int) -> float:
    """Seconds per call."""
    start = time.perf_counter_ns()
    for _ in repeat(None, calls):
        call()
    return (time.perf_counter_ns() - start) * 1e-9 / calls


class Channel:
    """One end of a connection that carries whole JSON values."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    @classmethod
    def connect(cls, path: str, timeout_s: float = START_S) -> Channel:
        """Connects to a listener at `path`, which may not be there yet."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection.connect(path)
                return cls(connection)
            except OSError:
                if time.monotonic() > deadline:
                    connection.close()
                    raise
                time.sleep(0.01)

    def send(self, value: Any) -> None:
        self.connection.send(json.dumps(value).encode())

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next value; raises EOFError when the other side is gone, TimeoutError when it is silent for too long."""
        self.connection.settimeout(timeout_s)
        try:
            data = self.connection.recv(PACKET_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError("the other side of the channel is gone")
        return json.loads(data)

    def close(self) -> None:
        self.connection.close()


def listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(256)
    return listener


def accept(
    listener: socket.socket, count: int, still_coming: Callable[[], bool] = lambda: True, timeout_s: float = START_S
) -> list[tuple[dict[str, Any], Channel]]:
    """`count` connections with what each said first, {"rank": 3, ...}, by rank; TimeoutError when some do not come."""
    deadline = time.monotonic() + timeout_s
    found: dict[int, tuple[dict[str, Any], Channel]] = {}
    try:
        while len(found) < count:
            if time.monotonic() > deadline or not still_coming():
                raise TimeoutError(f"{len(found)} of {count} connections came")
            listener.settimeout(0.1)
            try:
                channel = Channel(listener.accept()[0])
            except TimeoutError:
                continue
            hello = channel.receive(timeout_s)
            found[hello["rank"]] = (hello, channel)
    except BaseException:
        for _, channel in found.values():
            channel.close()
        raise
    return [found[rank] for rank in sorted(found)]


class PeerJob(Protocol):
    """A case made ready on one rank of a peer."""

    def check(self) -> tuple[int, float]:
        """Runs it once on test values: wrong elements, and the call's seconds."""

    def run(self, warmup: int, calls: int) -> float:
        """Seconds per call on this rank, after the warm-up and a barrier."""


def serve_turns(path: str, rank: int, library: str, make: Callable[[Case], PeerJob]) -> None:
    """A peer rank's life: says hello, then obeys until the leader is gone. It burns no time while it waits."""
    channel = Channel.connect(path)
    channel.send({"rank": rank, "pid": os.getpid(), "library": library})
    _end_with_leader(path, rank)
    job: PeerJob | None = None
    while True:
        try:
            order = channel.receive()
        except EOFError:
            return
        if "prepare" in order:
            try:
                job = make(Case.from_json(order["prepare"]))
                wrong, seconds = job.check()
                channel.send({"wrong": wrong, "seconds": seconds})
            except Lacking as lack:
                job = None
                channel.send({"lacks": str(lack)})
        elif "run" in order:
            assert job is not None, "prepare comes before run"
            channel.send({"seconds": job.run(*order["run"])})
        else:
            job = None
            channel.send({"dropped": 1})


def _end_with_leader(path: str, rank: int) -> None:
    """Ends this process when the leader dies, also while it spins in a call that will never end."""
    lifeline = Channel.connect(path)
    lifeline.send({"rank": -1 - rank})

    def watch() -> None:
        try:
            lifeline.receive()
        finally:
            time.sleep(1.0)  # the main thread leaves by itself if it can
            os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
