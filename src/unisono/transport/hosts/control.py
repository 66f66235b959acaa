"""Who died, left or gave up: told to every rank of every host.

Inside a host the core tells. Between hosts the leaders tell one another: each has a receive from every other leader
posted all the time, and a thread that waits for it (only such a thread may sit in a wait of gloo: it can be abandoned).
A leader that dies closes its connections, and the others' threads notice; of any other rank its leader notices, by a
look at the core every ``_LOOK_EVERY_S`` (one thread of the process does that for all its groups), and tells.

What a thread has learned it puts into the group's state and changes the *watch* word, which ends waits for messages;
and it gives the communicator inside the host up, which ends waits there.
"""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...base.errors import UnisonoError, make_error
from .links import CONTROL, read_bytes, write_bytes

if TYPE_CHECKING:
    from .state import HostsGroup

_LOOK_EVERY_S = 0.025
_NOTICE_BYTES = 1024
_BYE_S = 1.0  # how long close waits for the other leaders' answers
# Numbers of core/base/status.h.
MISMATCH, PEER_LOST, TIMEOUT, ABORTED, INTERRUPTED, CLOSED, FORKED = 1, 2, 3, 4, 5, 6, 7
_TOLD = re.compile(r"hosts:(\d+):([\d,]*):(.*)", re.DOTALL)


class Cause(NamedTuple):
    """Why a group was given up: a code of the core, the ranks it is about, one fact."""

    code: int
    peers: tuple[int, ...]
    text: str

    def written(self) -> str:
        """For the abort line of the core, which has room for 175 bytes."""
        return f"hosts:{self.code}:{','.join(map(str, self.peers[:8]))}:{self.text}"

    @classmethod
    def read(cls, text: str) -> Cause | None:
        found = _TOLD.search(text)
        if found is None:
            return None
        peers = tuple(int(p) for p in found[2].split(",") if p)
        return cls(int(found[1]), peers, re.sub(r" \(reported by rank \d+\)$", "", found[3]))

    def error(self, op: str, seq: int, group: str, rank: int, first_cause: bool) -> UnisonoError:
        return make_error(self.code, op, seq, group, rank, self.peers, self.text, [], first_cause)


class Control:
    """The leaders' side of one group; other ranks have an empty one."""

    def __init__(self, transport: HostsGroup) -> None:
        self._links, layout = transport.links, transport.layout
        self._tag = self._links.tag(CONTROL)
        self._lock = threading.Lock()
        self._held: list[Any] = []  # what is on its way
        self._readers: dict[int, threading.Thread] = {}
        self._said_bye: set[int] = set()
        self._closing = False
        if not layout.is_leader:
            return
        for host in layout.others:
            leader = layout.leader(host)
            notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8)
            work = self._links.recv(notice, leader, self._tag)
            # The thread must not keep the group: it would never be closed by being dropped.
            self._readers[leader] = threading.Thread(
                target=self._read, args=(weakref.ref(transport), leader, notice, work), daemon=True,
                name=f"unisono-host-{host}",
            )  # fmt: skip
            self._readers[leader].start()

    def tell(self, what: dict[str, Any], only: int | None = None) -> None:
        """Sends a notice to all other leaders, or to one; never waits."""
        text = json.dumps(what).encode()[:_NOTICE_BYTES]
        notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8)
        write_bytes(notice, 0, text)
        with self._lock:
            for leader in self._readers if only is None else (only,):
                if leader in self._said_bye and what["kind"] == "bye":
                    continue
                try:
                    self._held.append((self._links.send(notice, leader, self._tag), notice))
                except Exception:  # the connection is gone: that leader knows, or its end is known
                    continue
                if what["kind"] == "bye":
                    self._said_bye.add(leader)

    def _read(self, group: weakref.ref[HostsGroup], leader: int, notice: torch.Tensor, work: Any) -> None:
        engine = self._links.engine
        while True:
            try:
                engine.wait(work)
            except Exception as error:
                transport = group()
                if transport is not None and not self._closing:
                    transport.lost_leader(leader, str(error))
                return
            del work
            text = read_bytes(notice, 0, _NOTICE_BYTES).rstrip(b"\0")
            what = json.loads(text)
            transport = group()
            if what["kind"] == "bye":
                self.tell({"kind": "bye"}, leader)
                if transport is not None and "calls" in what:
                    transport.has_left({leader: what["calls"]}, what.get("why", ""))
                return
            if transport is not None:
                transport.hear(what)
            del transport
            notice.zero_()
            try:
                work = self._links.recv(notice, leader, self._tag)
            except Exception:
                return

    def leave(self, calls: int, why: str) -> None:
        """Says goodbye and waits a moment for the answers, so that nobody waits in gloo when the process ends."""
        self._closing = True
        self.tell({"kind": "bye", "calls": calls, "why": why})
        end = time.monotonic() + _BYE_S
        me = threading.current_thread()
        for reader in self._readers.values():
            if reader is not me:
                reader.join(max(0.0, end - time.monotonic()))


# -- one thread of the process that looks after the hosts' insides

_watched: weakref.WeakSet[HostsGroup] = weakref.WeakSet()
_watched_lock = threading.Lock()
_watcher: threading.Thread | None = None


def watch(transport: HostsGroup) -> None:
    """Has a group looked at until it is closed."""
    global _watcher
    with _watched_lock:
        _watched.add(transport)
        if _watcher is None or not _watcher.is_alive():
            _watcher = threading.Thread(target=_look, name="unisono-watch", daemon=True)
            _watcher.start()


def unwatch(transport: HostsGroup) -> None:
    with _watched_lock:
        _watched.discard(transport)


def _look() -> None:
    global _watcher
    while True:
        time.sleep(_LOOK_EVERY_S)
        with _watched_lock:
            groups = list(_watched)
            if not groups:
                _watcher = None
                return
        for group in groups:
            group.look()
        del groups
        group = None  # type: ignore[assignment]
