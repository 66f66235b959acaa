"""A group over several hosts, all but its verbs: how a call is made and waited for, and how the group ends.

Calls run one after the other, in the caller's thread or, if asynchronous, in a progress thread. A call has a number,
for users; its steps that all hosts take part in have numbers of their own, for messages.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import addressof, c_int64
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ... import _core
from ...base.counter import Counter
from ...base.errors import ClosedError, MismatchError, UnisonoError
from ...base.handle import Handle
from ...base.tensors import empty
from ..agreement import compare
from ..pending import ProgressThread
from ..protocol import Seconds
from . import bulk, control
from .agreement import Headers, Slots
from .control import ABORTED, CLOSED, FORKED, INTERRUPTED, PEER_LOST, TIMEOUT, Cause, Control
from .engine import Engine
from .layout import Layout
from .links import Bulk, Links, Word
from .messages import Mailbox
from .requests import HostsRequest
from .waiting import Arrivals, are_here

_ADVANCE_EVERY_S = 0.0002
_LOOK_EVERY_S = 0.001
_LONG_S = 0.02
_INSIDE_LONGER_S = 0.25


class HostsGroup:
    """A group whose ranks are on several hosts. ``comm`` is the core's communicator of this host's ranks."""

    cache_bytes = 0

    def __init__(
        self, comm: _core.Communicator, layout: Layout, engine: Engine, context: int, numbers: list[int], name: str,
        id: int, timeout_s: float,
    ) -> None:  # fmt: skip
        self.comm = comm
        self.layout = layout
        self.rank, self.size = layout.rank, layout.size
        self.name, self.id, self.timeout_s = name, id, timeout_s
        self.links = Links(engine, context, id, numbers, layout.rank)
        self._checker = _core.Communicator(layout.rank, layout.size)
        self._watch = c_int64()  # counts what was heard
        self._pid = os.getpid()
        self._calls = Counter()
        self.calls = 0
        self._step = 0
        self._done = 0  # the last call that is over
        self._verb, self._seq = "", 0  # the call under way
        self._begun = 0  # the last call that all ranks of this host have begun
        self._deadline = 0.0
        self._limit_s = timeout_s
        self._lock = threading.Lock()  # guards what follows
        self.failure: Cause | None = None
        self._failed_in = 0
        self._left: dict[int, tuple[int, str]] = {}  # rank -> calls it has made, and why it left
        self._is_closed = False
        self._turn = threading.RLock()  # one call at a time
        self._order = threading.Lock()
        self._progress = ProgressThread()
        self._scratch: dict[str, Tensor] = {}
        self._last: Bulk | None = None  # its last messages may still be on their way
        self._arrivals = Arrivals(engine)
        self.slots = Slots(self)
        self.mailbox = Mailbox(self)
        self._control = Control(self)
        control.watch(self)

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self.close("the group was dropped", 0.0)

    # -- what a group is asked about itself

    def rename(self, name: str) -> None:
        self.name = name

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

    # -- how a call is made

    def _start(
        self, verb: str, run: Callable[[int], None], outputs: Any, made: Any, timeout_s: Seconds, async_op: bool
    ) -> Any:
        """Runs a call now, or has the progress thread do so; one after the other, in the order of calling."""
        limit_s = timeout_s or self.timeout_s
        self.check_alive(verb, self.calls + 1)
        with self._order:
            seq = self._next_call()
            now = not async_op and self._progress.is_idle
            if now:
                self._turn.acquire()
            else:
                pending = self._progress.carry_out(lambda: self._carry_out(verb, seq, run, limit_s))
        if now:
            try:
                self._carry_out(verb, seq, run, limit_s)
            finally:
                self._turn.release()
            return made
        if async_op:
            return Handle(pending, verb, outputs)
        Handle(pending, verb, outputs).wait()
        return made

    def _next_call(self) -> int:
        self.calls = self._calls.next()
        return self.calls

    def _carry_out(self, verb: str, seq: int, run: Callable[[int], None], limit_s: float) -> None:
        with self._turn:
            self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s
            self._verb, self._seq = verb, seq
            try:
                self.check_alive(verb, seq)
                run(seq)
                self._done = seq
            except MismatchError:
                self._done = seq
                raise
            except UnisonoError as error:
                raise self.explain(verb, seq, error) from None
            except BaseException as error:
                what = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {error!r}"
                self.fail(Cause(ABORTED, (self.rank,), f"{self.layout.words(self.rank)} {what}"))
                raise

    def _bulk(self) -> _Large:
        return _Large(self, Bulk(self.links, self._step))

    def keep(self, large: Bulk) -> None:
        """What a call that is over here has sent last: it may be on its way until all begin the next."""
        large.end()
        self._last = large

    def next_step(self) -> int:
        """The number of a comparison of all ranks; a call has one, or several."""
        self._step += 1
        return self._step

    def has_begun(self) -> None:
        """All ranks of this host are in the call."""
        self._begun = self._seq

    def inside(self, verb: str, *arguments: Any) -> None:
        """A step of a call among this host's ranks.

        A rank that waits for another host may be all they wait for: it times out first, and says who was silent.
        """
        getattr(self.comm, verb)(*arguments, self._left_s() + _INSIDE_LONGER_S, False)

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 1e-3)

    def await_words(self, words: list[Word], hosts: Sequence[int]) -> None:
        """Waits for messages from hosts."""
        advance = self.links.engine.needs_advance
        began = time.monotonic()
        while words:
            seen = self._watch.value
            self.check_alive(self._verb, self._seq)
            left_s = self._left_s()
            limit_s = min(left_s, _ADVANCE_EVERY_S) if advance else left_s
            if self._arrivals.can_wait:
                if self._arrivals.wait(words, min(left_s, _LOOK_EVERY_S)):
                    return
                # A look at the others, and with time for messages inside the host if it takes long.
                limit_s = 0.0 if time.monotonic() < began + _LONG_S else _LOOK_EVERY_S
            elif advance:
                self.links.engine.advance()
            outcome = self.comm.await_words(words, addressof(self._watch), seen, limit_s)
            if outcome == 0:
                return
            if outcome == 2:
                self.look()
            elif time.monotonic() >= self._deadline:
                self._time_out(hosts)

    def await_headers(self, headers: Sequence[Headers], seq: int) -> None:
        """Waits for the other leaders' headers of a call."""
        hosts = [h.host for h in headers]
        for i, header in enumerate(headers):  # one by one, so that a time-out names who was silent
            for word in (header.first_word, header.last_word):
                address, value = word(seq)
                if not are_here([(address, value)]):
                    silent = [h.host for h in headers[i:] if not h.has_come(seq)]
                    self.await_words([(address, value)], silent or hosts[i : i + 1])

    def settle(self, large: Bulk, received: Sequence[int], sent: Sequence[int]) -> None:
        """Ends the messages of a call: tells those of which something was received, and hears it from the others."""
        words = bulk.settle_words(large, received, sent)
        self.await_words(words, sorted({self.layout.host_of[r] for r in sent}))

    def scratch(self, name: str, count: int, length: int, dtype: torch.dtype) -> list[Tensor]:
        """``count`` tensors in shared memory, kept for later calls."""
        row = -(-length * dtype.itemsize // 64) * 64
        held = self._scratch.get(name)
        if held is None or held.numel() < count * row:
            held = self._scratch[name] = empty(max(count * row, 1), dtype=torch.uint8)
        return [held[i * row : i * row + length * dtype.itemsize].view(dtype) for i in range(count)]

    # -- ranks that disagree

    def raise_mismatch(self, request: HostsRequest, requests: Sequence[bytes] | None) -> None:
        if requests is None:
            return
        named: Any = SimpleNamespace(group_name=self.name, rank=lambda: self.rank)
        compare(named, request.seq, request, requests)
        raise AssertionError("requests that differ were found equal")

    # -- ends

    def _time_out(self, hosts: Sequence[int]) -> None:
        peers = tuple(r for h in hosts for r in self.layout.hosts[h])
        silent = ", ".join(self.layout.host_words(h) for h in hosts)
        text = f"Timed out waiting {self._limit_s:.3g} s: nothing came from {silent}"
        self.fail(Cause(TIMEOUT, peers, text))
        self.check_alive(self._verb, self._seq)

    def check_alive(self, verb: str, seq: int) -> None:
        """Raises what has ended the group, if anything has."""
        if os.getpid() != self._pid:
            text = "the group belongs to the parent of this process; make a new one after fork"
            raise Cause(FORKED, (), text).error(verb, seq, self.name, self.rank, False)
        if self.failure is None:
            for r, (calls, why) in list(self._left.items()):
                if calls < seq:
                    words = f"{self.layout.words(r)} left" + (f": {why}" if why else "")
                    self.fail(Cause(PEER_LOST, (r,), words))
                    break
        cause = self.failure
        if cause is not None:
            first = not self._failed_in
            self._failed_in = self._failed_in or seq
            raise cause.error(verb, seq, self.name, self.rank, not first and self._failed_in != seq)

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
                if self.layout.is_leader:
                    self._control.tell({"kind": "left", "ranks": ranks, "calls": self._begun, "why": text[:200]})
            return
        cause = Cause.read(text)
        if cause is None:
            if code == PEER_LOST:
                pids = self.comm.pids
                text = ", ".join(
                    f"{self.layout.words(r)} {'left' if f'rank {p} left' in text else 'died'} (pid {pids[p]})"
                    for r, p in zip(ranks, places, strict=True)
                )
            else:
                mine = self.layout.mine
                text = re.sub(r"\brank (\d+)", lambda m: f"rank {mine[int(m[1]) % len(mine)]}", text)
            cause = Cause(ABORTED if code == INTERRUPTED else code, ranks, text)
        self.fail(cause)

    def hear(self, what: dict[str, Any]) -> None:
        """A notice of another leader."""
        if what["kind"] == "failed":
            self.fail(Cause(what["code"], tuple(what["peers"]), what["text"]), tell=False)
        elif what["kind"] == "left":
            self.has_left(dict.fromkeys(what["ranks"], what["calls"]), what["why"])

    def lost_leader(self, leader: int, why: str) -> None:
        """The connection to another leader has closed, so it is dead."""
        if leader not in self._left and not self._is_closed:
            self.fail(Cause(PEER_LOST, (leader,), f"{self.layout.words(leader)} died: its connection was closed"))

    def has_left(self, calls: dict[int, int], why: str) -> None:
        with self._lock:
            for r, n in calls.items():
                self._left.setdefault(r, (n, why))
        self._watch.value += 1

    def fail(self, cause: Cause, tell: bool = True) -> None:
        """Gives the group up on all ranks; the first cause counts."""
        with self._lock:
            if self.failure is not None or self._is_closed or os.getpid() != self._pid:
                return
            if tell and self.layout.is_leader:
                # Before anybody here knows: whoever does may close the group, and the others would hear only that.
                what = {"kind": "failed", "code": cause.code, "peers": cause.peers[:64], "text": cause.text[:400]}
                self._control.tell(what)
            self.comm.abort(cause.written())  # for the same reason inside the host
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
            self.mailbox.wait_for_reading()
        with self._lock:
            if self.failure is None:
                self.failure = Cause(CLOSED, (), "the group was closed on this rank")
        self._watch.value += 1
        control.unwatch(self)
        self.mailbox.fail()
        self.comm.close(reason, linger_s)
        self._control.leave(self._done, reason)
        self._arrivals.close()


class _Large:
    """The messages of a large call: withdrawn if it fails, so that nothing is written into the caller's tensors."""

    def __init__(self, transport: HostsGroup, large: Bulk) -> None:
        self._transport, self._large = transport, large

    def __enter__(self) -> Bulk:
        return self._large

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self._transport.keep(self._large)
        else:
            self._large.end()
