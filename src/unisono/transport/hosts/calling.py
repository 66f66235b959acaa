"""How a call of a group over several hosts is made, and how it waits for messages.

Calls run one after the other, in the caller's thread or, if asynchronous, in a progress thread. A call has a number,
for users; its steps that all hosts take part in have numbers of their own, for messages.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from ctypes import addressof
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ... import _core
from ...base.counter import Counter
from ...base.errors import MismatchError, UnisonoError
from ...base.handle import Handle
from ...base.tensors import empty
from ..agreement import compare
from ..pending import ProgressThread
from ..protocol import Seconds
from . import bulk
from .agreement import Headers, Slots, most_small, most_whole
from .control import ABORTED, TIMEOUT, Cause
from .engine import Engine
from .layout import Layout
from .life import HostsLife
from .links import Bulk, ConnectionLost, Expected, Word
from .messages import Mailbox
from .presence import Listener
from .requests import HostsRequest
from .survivors import Survival
from .waiting import is_here

_ADVANCE_EVERY_S = 0.0002
_LOOK_EVERY_S = 0.001
_LONG_S = 0.02
_INSIDE_LONGER_S = 0.25
_TRY_EVERY_S, _LONGEST_TRY_S = 0.25, 1.0  # gloo keeps a note of every try


class HostsGroup(HostsLife):
    """A group whose ranks are on several hosts, all but its verbs."""

    cache_bytes = 0

    def __init__(
        self, comm: _core.Communicator, layout: Layout, engine: Engine, context: int, numbers: list[int], name: str,
        id: int, timeout_s: float, wide_sums: bool, survival: Survival | None,
    ) -> None:  # fmt: skip
        super().__init__(comm, layout, engine, context, numbers, name, id, survival)
        self.timeout_s = timeout_s
        self.wide_sums = wide_sums  # UNISONO_HOSTS_FP32, as all ranks had it when they joined
        self.small_bytes = most_small(layout.count, layout.lanes, engine.eager_bytes)
        self._checker = _core.Communicator(layout.rank, layout.size)
        self._calls = Counter()
        self.calls = 0
        self._step = 0
        self._verb, self._seq = "", 0  # the call under way
        self._deadline = 0.0
        self._limit_s = timeout_s
        self._turn = threading.RLock()  # one call at a time
        self._order = threading.Lock()
        self._progress = ProgressThread()
        self._scratch: dict[str, Tensor] = {}
        self._listeners: dict[int, Listener] = {}  # by port: for groups that are being split from this one
        self.slots = Slots(self)
        self.mailbox = Mailbox(self)
        self._open()

    # -- one call after the other

    def _start(
        self, verb: str, run: Callable[[int], None], outputs: Any, made: Any, timeout_s: Seconds, async_op: bool
    ) -> Any:
        """Runs a call now, or has the progress thread do so; one after the other, in the order of calling."""
        limit_s = timeout_s or self.timeout_s
        self.check_alive(verb, self.calls + 1)
        seq, had_turn = 0, self._turn._is_owned()  # type: ignore[attr-defined]
        try:
            with self._order:
                seq = self._next_call()
                now = not async_op and self._progress.is_idle
                if now:
                    self._turn.acquire()
                else:
                    pending = self._progress.carry_out(lambda: self._carry_out(verb, seq, run, limit_s))
            if now:
                self._carry_out(verb, seq, run, limit_s)
                return made
        except KeyboardInterrupt:
            if seq:  # the others make this call, and this rank does not
                self.abort(f"{self.layout.words(self.rank)} was interrupted")
            raise
        finally:
            # Ctrl-C may come at any point of the above: nothing but the lock itself knows whether it was taken.
            if not had_turn and self._turn._is_owned():  # type: ignore[attr-defined]
                self._turn.release()
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
            except ConnectionLost as lost:
                self._await_reason(lost.peer)
                self.check_alive(verb, seq)
                raise AssertionError("a connection was lost, and the group did not fail") from lost
            except BaseException as error:
                what = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {error!r}"
                self.fail(Cause(ABORTED, (self.rank,), f"{self.layout.words(self.rank)} {what}"))
                raise

    @property
    def whole_bytes(self) -> int:
        """Up to how many bytes a call is one message between two hosts if that has all of its data."""
        return most_whole(self.layout.count, self.small_bytes)

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

    def raise_mismatch(self, request: HostsRequest, requests: Sequence[bytes] | None) -> None:
        if requests is None:
            return
        named: Any = SimpleNamespace(group_name=self.name, rank=lambda: self.rank)
        compare(named, request.seq, request, requests)
        raise AssertionError("requests that differ were found equal")

    # -- large calls

    def _bulk(self) -> _Large:
        return _Large(self, Bulk(self.links, self._step))

    def keep(self, large: Bulk) -> None:
        """What a call that is over here has sent last: it may be on its way until all begin the next."""
        large.end()
        self._last = large

    def settle(self, large: Bulk, received: Sequence[int], sent: Sequence[int]) -> None:
        """Ends the messages of a call: tells those of which something was received, and hears it from the others."""
        self.await_reading(list(bulk.settle_words(large, received, sent).items()))

    def scratch(self, name: str, count: int, length: int, dtype: torch.dtype) -> list[Tensor]:
        """``count`` tensors in shared memory, kept for later calls."""
        row = -(-length * dtype.itemsize // 64) * 64
        held = self._scratch.get(name)
        if held is None or held.numel() < count * row:
            held = self._scratch[name] = empty(max(count * row, 1), dtype=torch.uint8)
        return [held[i * row : i * row + length * dtype.itemsize].view(dtype) for i in range(count)]

    # -- waiting for messages

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 1e-3)

    def await_words(self, expected: Sequence[Expected], most_s: float = math.inf) -> bool:
        """Waits for messages; False if they are not here after ``most_s``."""
        words = [word for word, _ in expected]
        advance = self.links.engine.needs_advance
        began = time.monotonic()
        while words:
            seen = self._watch.value
            self.check_alive(self._verb, self._seq)
            left_s = min(self._left_s(), most_s)
            if advance:
                self.links.engine.advance()
                limit_s = min(left_s, _ADVANCE_EVERY_S)
            else:
                is_long = time.monotonic() > began + _LONG_S
                if self._naps.wait(words, min(left_s, _LOOK_EVERY_S), is_long):
                    return True
                # A look at the others, and with time for messages inside the host if it takes long.
                limit_s = _LOOK_EVERY_S if is_long else 0.0
            outcome = self.comm.await_words(words, addressof(self._watch), seen, limit_s)
            if outcome == 0:
                return True
            if outcome == 2:
                self.look()
            elif time.monotonic() >= self._deadline:
                self._time_out({host for word, host in expected if not is_here(word)} or {h for _, h in expected})
            elif time.monotonic() > began + most_s:
                return False
        return True

    def await_headers(self, headers: Sequence[Headers], seq: int) -> None:
        """Waits for the other leaders' headers of a call."""
        for word_of in (Headers.first_word, Headers.last_word):  # where the last stands is said before the first
            expected = [(word_of(header, seq), header.host) for header in headers]
            if not all(is_here(word) for word, _ in expected):
                self.await_words(expected)

    def await_reading(self, words: Sequence[tuple[int, Word]]) -> None:
        """Waits for acknowledgements, each of a rank. One whose connection closes meanwhile has none to give.

        It may have left after this call, which is over for it; if it died, the next call says so.
        """
        waiting = [(rank, word) for rank, word in words if not is_here(word)]
        every_s = _TRY_EVERY_S
        while waiting:
            if self.await_words([(word, self.layout.host_of[rank]) for rank, word in waiting], every_s):
                return
            every_s = min(2 * every_s, _LONGEST_TRY_S)
            waiting = [(rank, word) for rank, word in waiting if not is_here(word) and self.links.is_connected(rank)]

    def _time_out(self, hosts: Collection[int]) -> None:
        peers = tuple(r for h in sorted(hosts) for r in self.layout.hosts[h])
        silent = ", ".join(map(self.layout.host_words, sorted(hosts)))
        text = f"Timed out waiting {self._limit_s:.3g} s: nothing came from {silent}"
        self.fail(Cause(TIMEOUT, peers, text))
        self.check_alive(self._verb, self._seq)


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
            self._large.give_up()
