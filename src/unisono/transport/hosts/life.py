"""A group over several hosts: who is in it, what has happened to them, and how it ends.

A group is over with the first thing that ends it for one of its ranks. Each rank hears of it from its own host (the
core) or from the leaders of the others (``control``), and its calls, which ask ``check_alive``, raise that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Sequence
from ctypes import c_int64
from typing import TYPE_CHECKING, Any

from ... import _core
from ...base.errors import AbortedError, ClosedError, SystemCallError, UnisonoError
from ...base.processes import process_state
from . import control
from .control import ABORTED, BYE_S, CLOSED, FORKED, INTERRUPTED, PEER_LOST, TIMEOUT, Cause, Control
from .engine import Engine
from .layout import Layout
from .links import Bulk, Links
from .survivors import SHRUNK, Survival
from .waiting import Naps

if TYPE_CHECKING:
    from .agreement import Slots
    from .messages import Mailbox

_LOOK_EVERY_S = 0.001
_DEATHS_TOLD_S = 0.5  # by then every rank has heard of a death
_TOLD_AT_ONCE = 64  # ranks in one notice
_LOST = {True: "left", False: "died"}
_LEFT_OUT_S = 1.0
_SHRINKS = "shrinks the group"  # as the core says it


class HostsLife:
    """The life of a group whose ranks are on several hosts. ``comm`` is the core's communicator of this host's ranks.

    Whoever inherits it makes the calls, and with them ``slots`` and ``mailbox``; then it says ``_open``.
    """

    slots: Slots
    mailbox: Mailbox
    _control: Control
    _is_made = False  # a group whose making has failed is not closed: most of it is not there

    def __init__(
        self, comm: _core.Communicator, layout: Layout, engine: Engine, context: int, numbers: list[int], name: str,
        id: int, survival: Survival | None,
    ) -> None:  # fmt: skip
        self.comm = comm
        self.survival = survival  # how this group shrinks; None: it cannot
        self.layout = layout
        self.rank, self.size = layout.rank, layout.size
        self.name, self.id = name, id
        self.links = Links(engine, context, id, numbers, layout.rank)
        self._watch = c_int64()  # counts what was heard
        self._pid = os.getpid()
        self._done = 0  # the last call that is over
        self._begun = 0  # the last call that all ranks of this host have begun
        self._lock = threading.Lock()  # guards what follows
        self.failure: Cause | None = None
        self._failed_in = 0
        self._left: dict[int, tuple[int, str]] = {}  # rank -> calls it has made, and why it left
        self._shrinking: dict[int, int] = {}  # rank -> calls it has made; it makes no more in this group
        self._is_closed = False
        self._last: Bulk | None = None  # its last messages may still be on their way
        self._naps = Naps()

    def _open(self) -> None:
        """The group is whole: from now on it hears of the others."""
        self._control = Control(self)
        self._control.start()
        control.watch(self)
        self._is_made = True

    def __del__(self) -> None:
        if self._is_made and not self._is_closed:
            self.close("the group was dropped", 0.0)

    # -- what a group is asked about itself

    def rename(self, name: str) -> None:
        self.name = name

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def staged_bytes(self) -> int:
        return self.comm.staged_bytes

    @property
    def host_ranks(self) -> list[int]:
        """The ranks of this rank's host."""
        return self.layout.mine

    @property
    def pids(self) -> list[int]:
        """By rank, the processes of this host; 0 for those of others."""
        by_rank = dict(zip(self.layout.mine, self.comm.pids, strict=True))
        return [by_rank.get(r, 0) for r in range(self.size)]

    @property
    def by_tree(self) -> bool:
        """Whether the hosts are subtrees: equal, contiguous, and of a power of two ranks."""
        ranks = {len(host) for host in self.layout.hosts}
        return len(ranks) == 1 and self.layout.is_contiguous and max(ranks).bit_count() == 1

    # -- what has happened

    def check_alive(self, verb: str, seq: int) -> None:
        """Raises what has ended the group, if anything has."""
        if os.getpid() != self._pid:
            text = "the group belongs to the parent of this process; make a new one after fork"
            raise Cause(FORKED, (), text).error(verb, seq, self.name, self.rank, False)
        if self.failure is None and self.links.engine.given_up:
            self.look_at_connections()
        if self.failure is None:
            for r, (calls, why) in list(self._left.items()):
                if calls < seq:
                    words = f"{self.layout.words(r)} left" + (f": {why}" if why else "")
                    self.fail(Cause(PEER_LOST, (r,), words))
                    break
            for r, calls in list(self._shrinking.items()):
                if calls < seq:
                    self.fail(Cause(ABORTED, (r,), f"{self.layout.words(r)} {_SHRINKS}"))
                    break
        cause = self.failure
        if cause is not None:
            first = not self._failed_in
            self._failed_in = self._failed_in or seq
            raise cause.error(verb, seq, self.name, self.rank, not first and self._failed_in != seq)

    def look_at_connections(self) -> None:
        """Another group gave a connection up that this one uses too: says so, unless a death is about to be told."""
        numbers, given_up = self.links.numbers, self.links.engine.given_up
        before = time.monotonic() - _DEATHS_TOLD_S
        peers = tuple(r for r in range(self.size) if given_up.get(numbers[r], before) < before)
        if peers:
            who = ", ".join(self.layout.words(r) for r in peers)
            text = f"the connection to {who} was given up: a call of another group failed in the middle of its data"
            self.fail(Cause(ABORTED, peers, text))

    def _await_reason(self, peer: int) -> None:
        """The connection to a rank is closed. It may be dead, or have ended because another is.

        Whoever shares a host with the dead one knows better and tells: this rank's own guess must not come first.
        """
        end = time.monotonic() + _DEATHS_TOLD_S
        while self.failure is None and peer not in self._left and time.monotonic() < end:
            self.look()
            time.sleep(_LOOK_EVERY_S)
        what = "left" if peer in self._left else "died: its connection was closed"
        self.fail(Cause(PEER_LOST, (peer,), f"{self.layout.words(peer)} {what}"))

    def explain(self, verb: str, seq: int, error: UnisonoError) -> UnisonoError:
        """An error inside the host, in the words of the whole group."""
        if self.failure is None:
            self.look()
        if self.failure is None:
            if not isinstance(error, ClosedError):  # too little memory, say: the others cannot go on without this rank
                self.fail(Cause(ABORTED, (self.rank,), f"{self.layout.words(self.rank)} failed: {error}"))
            return error
        try:
            self.check_alive(verb, seq)
        except UnisonoError as told:
            return told
        return error

    def look(self) -> None:
        """Looks at this host's ranks, and learns what has happened to them."""
        if self._is_closed or self.failure is not None or os.getpid() != self._pid:
            return
        found = self.comm.trouble()
        if found is None:
            return
        code, places, text = found
        ranks = tuple(self.layout.mine[p] for p in places)
        if code == CLOSED:
            if ranks and not set(ranks) <= set(self._left):
                self.has_left(dict.fromkeys(ranks, self._begun), text)
                for some in range(0, len(ranks) if self.layout.is_leader else 0, _TOLD_AT_ONCE):
                    told = ranks[some : some + _TOLD_AT_ONCE]
                    self._control.tell({"kind": "left", "ranks": told, "calls": self._begun, "why": text[:200]})
            return
        if code == ABORTED and _SHRINKS in text and Cause.read(text, self.id) is None:
            if not set(ranks) <= set(self._shrinking):
                self._hear_shrinking(ranks, self._begun, tell=self.layout.is_leader)
            return
        self.fail(Cause.read(text, self.id) or self._cause_inside(code, places, text))

    def _cause_inside(self, code: int, places: Sequence[int], text: str) -> Cause:
        """What the core says of ranks of this host, by their numbers and with the host.

        Its text has other numbers, so the words are made anew of what happened and to whom, where that is known.
        """
        pids, mine = self.comm.pids, self.layout.mine
        ranks = tuple(mine[p] for p in places)
        who = ", ".join(map(self.layout.words, ranks))
        if code == PEER_LOST:
            # The core does not tell these two apart but by its words.
            left = {p for p in places if f"rank {p} left (pid {pids[p]}" in text}
            text = ", ".join(f"{self.layout.words(mine[p])} {_LOST[p in left]} (pid {pids[p]})" for p in places)
        elif code == TIMEOUT:
            late = ", ".join(f"{self.layout.words(mine[p])} is {_state_of(pids[p])}" for p in places)
            text = f"Timed out waiting inside the host: {late}"
        elif code == INTERRUPTED:
            code, text = ABORTED, f"{who} was interrupted"
        else:
            text = f"{who}: {text} (ranks are numbered as inside host {self.layout.host})"
        return Cause(code, ranks, text)

    def hear(self, what: dict[str, Any]) -> None:
        """A notice of another leader."""
        if what["kind"] == "failed":
            self.fail(Cause(what["code"], tuple(what["peers"]), what["text"]), tell=False)
        elif what["kind"] == "left":
            self.has_left(dict.fromkeys(what["ranks"], what["calls"]), what["why"])
        elif what["kind"] == "absent":
            r = what["rank"]
            self.fail(Cause(ABORTED, (r,), f"{self.layout.words(r)} {what['why']}"))
        elif what["kind"] == "shrinks":
            self._hear_shrinking(what["ranks"], what["calls"], tell=False)

    def lost_leader(self, leader: int) -> None:
        """The connection to another leader has closed, so it is dead."""
        if leader not in self._left and not self._is_closed:
            self.fail(Cause(PEER_LOST, (leader,), f"{self.layout.words(leader)} died: its connection was closed"))

    def has_left(self, calls: dict[int, int], why: str) -> None:
        with self._lock:
            for r, n in calls.items():
                self._left.setdefault(r, (n, why))
        self._watch.value += 1

    def _hear_shrinking(self, ranks: Sequence[int], calls: int, tell: bool) -> None:
        """Ranks shrink the group: calls that they have made end well for the others, later ones fail."""
        with self._lock:
            for r in ranks:
                self._shrinking.setdefault(r, calls)
        if tell:
            self._control.tell({"kind": "shrinks", "ranks": list(ranks[:_TOLD_AT_ONCE]), "calls": calls})
        self._watch.value += 1

    # -- ends

    def stop_for_shrinking(self) -> None:
        """This rank makes no call in the group any more, and the others learn it."""
        with self._lock:
            if self.failure is not None or self._is_closed:
                return
            if self.layout.is_leader:
                self._control.tell({"kind": "shrinks", "ranks": [self.rank], "calls": self._done})
            with contextlib.suppress(UnisonoError):
                self.comm.agree([], 0.001)  # tells it inside the host; what is agreed on there does not matter
            self.failure = Cause(ABORTED, (self.rank,), f"{self.layout.words(self.rank)} {_SHRINKS}")
        self._watch.value += 1
        self.mailbox.fail()

    def was_shrunk(self) -> bool:
        """Whether others have left for a smaller group without this rank."""
        try:
            self.comm.agree([], 0.001)
        except (AbortedError, SystemCallError):  # an offer, or a verdict, without this rank: see leave_out
            return True
        except UnisonoError:
            pass
        return any(why == SHRUNK for _, why in self._left.values())

    def leave_out(self, ranks: Collection[int]) -> None:
        """The smaller group is one without these ranks, which may live: those of this host find it in its memory."""
        places = [place for place, r in enumerate(self.layout.mine) if r in ranks]
        if places:
            with contextlib.suppress(UnisonoError):
                self.comm.agree(places, _LEFT_OUT_S)

    def fail(self, cause: Cause, tell: bool = True) -> None:
        """Gives the group up on all ranks; the first cause counts."""
        with self._lock:
            if self.failure is not None or self._is_closed or os.getpid() != self._pid:
                return
            if tell and self.layout.is_leader:
                # Before anybody here knows: whoever does may close the group, and the others would hear only that.
                peers = cause.peers[:_TOLD_AT_ONCE]
                self._control.tell({"kind": "failed", "code": cause.code, "peers": peers, "text": cause.text[:400]})
            self.comm.abort(cause.written(self.id))  # for the same reason inside the host
            self.failure = cause
        self._watch.value += 1
        self.mailbox.fail()

    def abort(self, reason: str) -> None:
        self.fail(Cause(ABORTED, (self.rank,), reason))

    def close(self, reason: str, linger_s: float) -> None:
        if os.getpid() != self._pid:
            return  # the parent's threads and locks are not here
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self.failure is None:
            with contextlib.suppress(UnisonoError):
                self.mailbox.wait_for_reading()
        with self._lock:
            if self.failure is None:
                self.failure = Cause(CLOSED, (), "the group was closed on this rank")
        self._watch.value += 1
        if self._last is not None:  # others may not have asked for their acknowledgements yet
            self.links.engine.farewells.extend(self._last.acknowledged)
        self.slots.end()
        self.mailbox.say_farewell(self._done, reason)
        self.mailbox.fail()
        self.comm.close(reason, linger_s)
        # Survivors of a death need not wait: their processes go on, and the dead say no goodbye.
        self._control.leave(self._done, reason, 0.0 if reason == SHRUNK else BYE_S)
        if self.survival is not None:
            self.survival.close()


def _state_of(pid: int) -> str:
    """Why a process may be late: "stopped", "gone" or "slow"."""
    state = process_state(pid)
    return state if state in ("stopped", "gone") else "slow"
