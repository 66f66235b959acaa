"""Who died, left or gave up: told to every rank of every host.

Inside a host the core tells. Between hosts the leaders tell one another: each has a receive from every other leader
posted all the time, and a thread that waits for it (only such a thread may sit in a wait of gloo: it can be abandoned).
A leader that dies closes its connections, and the others' threads notice; of any other rank its leader notices, by a
look at the core every ``_LOOK_EVERY_S`` (one thread of the process does that for all its groups), and tells.

What a thread has learned it puts into the group's state and changes the *watch* word, which ends waits for messages;
and it gives the communicator inside the host up, which ends waits there.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...base.errors import UnisonoError, make_error
from ...base.fork import fork_lock
from .links import CONTROL, Links, read_bytes, write_bytes

if TYPE_CHECKING:
    from .layout import Layout
    from .life import HostsLife

_LOOK_EVERY_S = 0.025
_NOTICE_BYTES = 1024
BYE_S = 1.0  # how long close waits for the other leaders' answers
# Numbers of core/base/status.h.
MISMATCH, PEER_LOST, TIMEOUT, ABORTED, INTERRUPTED, CLOSED, FORKED = 1, 2, 3, 4, 5, 6, 7
_LINE_BYTES = 175  # of the core's abort line
_MOST_PEERS = 8  # in it


class Cause(NamedTuple):
    """Why a group was given up: a code of the core, the ranks it is about, one fact."""

    code: int
    peers: tuple[int, ...]
    text: str

    def written(self, group: int) -> str:
        """For the abort line of the core: a mark that only this group has, then fields, the last as long as one says.

        Words are cut here, so that all of them fit and the core, which may add some behind them, cuts none.
        """
        head = f"{_mark(group)}{self.code}:{','.join(map(str, self.peers[:_MOST_PEERS]))}:"
        room = _LINE_BYTES - len(head) - len(f"{_LINE_BYTES}:")
        said = self.text.encode(errors="replace")[:room].decode(errors="ignore")
        return f"{head}{len(said)}:{said}"

    @classmethod
    def read(cls, text: str, group: int) -> Cause | None:
        """None if the words are the core's own."""
        mark = _mark(group)
        if not text.startswith(mark):
            return None
        code, peers, length, said = text[len(mark) :].split(":", 3)
        return cls(int(code), tuple(int(p) for p in peers.split(",") if p), said[: int(length)])

    def error(self, op: str, seq: int, group: str, rank: int, first_cause: bool) -> UnisonoError:
        return make_error(self.code, op, seq, group, rank, self.peers, self.text, [], first_cause)


def _mark(group: int) -> str:
    return f"hosts:{group & 0xFFFFFF:06x}:"


def _written(what: dict[str, Any]) -> bytes:
    """A notice as it travels: its words are cut until it fits."""
    while True:
        notice = json.dumps(what, ensure_ascii=False).encode(errors="replace")
        words = {key: value for key, value in what.items() if isinstance(value, str) and key != "kind"}
        if len(notice) <= _NOTICE_BYTES or not any(words.values()):
            return notice
        what = what | {key: value[: len(value) * 3 // 4] for key, value in words.items()}


class Control:
    """The leaders' side of one group; other ranks have an empty one."""

    def __init__(self, transport: HostsLife) -> None:
        self._links, layout = transport.links, transport.layout
        self._tag = self._links.tag(CONTROL)
        self._lock = threading.Lock()
        self._held: list[Any] = []  # what is on its way
        self._readers: dict[int, threading.Thread] = {}
        self._said_bye: set[int] = set()
        self._closing = False
        # By leader. Held here too, since this object lives until all others have said goodbye: see Headers.
        self._headers = {headers.peer: headers for headers in (*transport.slots.lower, *transport.slots.higher)}
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

    def start(self) -> None:
        """What is heard from now on goes to the group, which must be whole."""
        for reader in self._readers.values():
            reader.start()

    def tell(self, what: dict[str, Any], only: int | None = None) -> None:
        """Sends a notice to all other leaders, or to one; never waits."""
        notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8)
        write_bytes(notice, 0, _written(what))
        with self._lock:
            for leader in self._readers if only is None else (only,):
                if leader in self._said_bye and what["kind"] == "bye":
                    continue
                try:
                    sent = (self._links.send(notice, leader, self._tag), notice)
                except Exception:  # the connection is gone: that leader knows, or its end is known
                    continue
                if what["kind"] == "bye":
                    self._said_bye.add(leader)
                    self._links.engine.farewells.append(sent)  # it may go out when the group is no more
                else:
                    self._held.append(sent)

    def _read(self, group: weakref.ref[HostsLife], leader: int, notice: torch.Tensor, work: Any) -> None:
        engine = self._links.engine
        while True:
            try:
                engine.wait(work)
            except Exception:
                transport = group()
                if transport is not None and not self._closing:
                    transport.lost_leader(leader)
                return
            del work
            what = json.loads(read_bytes(notice, 0, _NOTICE_BYTES).rstrip(b"\0"))
            transport = group()
            if what["kind"] == "bye":
                if transport is not None and "calls" in what:
                    transport.has_left({leader: what["calls"]}, what.get("why", ""))
                self._headers[leader].end()
                self.tell({"kind": "bye"}, leader)
                return
            if transport is not None:
                transport.hear(what)
            if what["kind"] == "absent":  # it has no group that would say goodbye
                self._headers[leader].end()
                self._said_bye.add(leader)
                return
            del transport
            notice.zero_()
            try:
                work = self._links.recv(notice, leader, self._tag)
            except Exception:
                return

    def leave(self, calls: int, why: str, wait_s: float) -> None:
        """Says goodbye and waits a moment for the answers, so that nobody waits in gloo when the process ends."""
        self._closing = True
        self.tell({"kind": "bye", "calls": calls, "why": why})
        end = time.monotonic() + wait_s
        me = threading.current_thread()
        for reader in self._readers.values():
            if reader is not me:
                reader.join(max(0.0, end - time.monotonic()))


def tell_absence(links: Links, layout: Layout, why: str) -> None:
    """For a leader that has not come into a new group: the others have, and shall not wait for its first message."""
    notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8)
    write_bytes(notice, 0, _written({"kind": "absent", "rank": layout.rank, "why": why[:400]}))
    for host in layout.others:
        with contextlib.suppress(Exception):  # the connection is gone, as this rank may be soon
            sent = links.send(notice, layout.leader(host), links.tag(CONTROL))
            links.engine.farewells.append((sent, notice))


# -- one thread of the process that looks after the hosts' insides

_watched: weakref.WeakSet[HostsLife] = weakref.WeakSet()
_watched_lock = fork_lock()
os.register_at_fork(after_in_child=_watched.clear)  # they are the parent's
_watcher: threading.Thread | None = None


def watch(transport: HostsLife) -> None:
    """Has a group looked at until it is closed."""
    global _watcher
    with _watched_lock:
        _watched.add(transport)
        if _watcher is None or not _watcher.is_alive():
            _watcher = threading.Thread(target=_look, name="unisono-watch", daemon=True)
            _watcher.start()


def _look() -> None:
    global _watcher
    while True:
        time.sleep(_LOOK_EVERY_S)
        with _watched_lock:
            groups = [group for group in _watched if not group.is_closed]
            if not groups:
                _watcher = None
                return
        for group in groups:
            group.look()
        del groups
        group = None  # type: ignore[assignment]
