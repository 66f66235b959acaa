"""Send and recv between hosts: letters, matched by sender and tag.

The n-th send of a tag to a rank meets the n-th receive of that tag from this one. A *letter* says what is sent, and has
the data in it if that is little; else the data follows straight from tensor to tensor. The receiver acknowledges or
refuses it. A receive from anyone looks for letters of all ranks on other hosts, and for messages inside this one.
Whoever waits makes all go on; a thread does, while there are asynchronous ones.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter as Numbers
from ctypes import c_uint64
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.errors import UnisonoError, make_error
from ...base.handle import Handle, Pending
from ..backend import flat
from ..pending import Step, ThreadPending
from .agreement import SMALL_BYTES
from .control import MISMATCH, PEER_LOST, TIMEOUT, Cause
from .links import ACK, DATA, LETTER, SEAL, Word, read_bytes, signed, write_bytes

if TYPE_CHECKING:
    from ..protocol import Seconds
    from .state import HostsGroup

_HEAD = struct.Struct("<QQ32s16x")  # the word, bytes of data, their dtype
_ROOM = _HEAD.size + SMALL_BYTES + 8
_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-5, 1e-3
_CLOSE_S = 0.5


class Inside:
    """A message inside a host, whose ranks have other numbers there."""

    def __init__(self, transport: HostsGroup, verb: str, pending: Pending) -> None:
        self._transport, self._verb, self._pending = transport, verb, pending

    def done(self) -> bool:
        return self._pending.done()

    def wait(self, timeout_s: float) -> bool:
        return self._pending.wait(timeout_s)

    def error(self) -> Exception | None:
        error = self._pending.error()
        if isinstance(error, UnisonoError) and "sent" not in str(error):
            return self._transport.explain(self._verb, 0, error)
        return error

    def on_done(self, callback: Step, /) -> None:
        self._pending.on_done(callback)

    @property
    def source(self) -> int:
        return self._transport.layout.mine[self._pending.source]


class _Letter(ThreadPending):
    """One send or receive."""

    def __init__(self, verb: str, tensor: Tensor, peer: int | None, tag: int, deadline: float) -> None:
        super().__init__()
        self.verb, self.tensor, self.peer, self.tag, self.deadline = verb, flat(tensor), peer, tag, deadline
        self.word: Word | None = None  # what it waits for
        self.held: list[Any] = []
        self.place: tuple[int, ...] = ()

    def has_word(self) -> bool:
        return self.word is not None and c_uint64.from_address(self.word[0]).value == self.word[1]


class Mailbox:
    """The letters of one group on one rank."""

    def __init__(self, transport: HostsGroup) -> None:
        self.t = transport
        self._lock = threading.RLock()
        self._sent: Numbers[tuple[int, int]] = Numbers()
        self._received: Numbers[tuple[int, int]] = Numbers()
        self._sends: list[_Letter] = []
        self._receives: list[_Letter] = []
        self._heads: dict[tuple[int, int], tuple[Tensor, Any]] = {}  # posted for the next letter of a rank and tag
        self._absent: set[tuple[int, int]] = set()  # ranks and tags of which nothing was here in this step
        self._answers: list[Any] = []
        self._thread: threading.Thread | None = None

    # -- calls

    def send(self, tensor: Tensor, dst: int, tag: int, timeout_s: Seconds, async_op: bool) -> Any:
        self.t.check_alive("send", self.t._done)
        letter = _Letter("send", tensor, dst, tag, time.monotonic() + (timeout_s or self.t.timeout_s))
        links, me = self.t.links, self.t.rank
        with self._lock:
            self._sent[dst, tag] += 1
            place = letter.place = (me, dst, tag, self._sent[dst, tag])
            data = letter.tensor
            little = data.nbytes <= SMALL_BYTES
            word = links.word(LETTER, *place)
            buffer = torch.empty(_HEAD.size + (-(-data.nbytes // 8) * 8 if little else 0) + 8, dtype=torch.uint8)
            name = str(data.dtype)[6:].encode()
            write_bytes(buffer, 0, _HEAD.pack(word, data.nbytes, name))
            if little and data.numel():
                buffer[_HEAD.size : _HEAD.size + data.nbytes] = data.view(torch.uint8)
            buffer[-8:] = torch.tensor([signed(word)]).view(torch.uint8)
            answer = torch.zeros(3, dtype=torch.int64)  # refused or not, and what was expected; the word
            letter.held = [answer, links.recv(answer, dst, links.letter_tag(ACK, *place))]
            letter.word = (answer.data_ptr() + 16, links.word(ACK, *place))
            letter.held += [buffer, links.send(buffer, dst, links.letter_tag(LETTER, *place))]
            if not little:
                seal = torch.tensor([signed(links.word(SEAL, *place))])
                letter.held.append(links.send(data, dst, links.letter_tag(DATA, *place, data.nbytes)))
                letter.held += [seal, links.send(seal, dst, links.letter_tag(SEAL, *place))]
            self._sends.append(letter)
        if little:  # over for the caller; the letter stays until it is read
            letter.set_result(None)
            self._start_thread()
        return self._result(letter, async_op, tensor)

    def recv(self, tensor: Tensor, src: int | None, tag: int, timeout_s: Seconds, async_op: bool) -> Any:
        self.t.check_alive("recv", self.t._done)
        letter = _Letter("recv", tensor, src, tag, time.monotonic() + (timeout_s or self.t.timeout_s))
        with self._lock:
            self._receives.append(letter)
        return self._result(letter, async_op, tensor)

    def _result(self, letter: _Letter, async_op: bool, tensor: Tensor) -> Any:
        if async_op:
            self._start_thread()
            return Handle(letter, letter.verb, tensor)
        nap_s = _SHORTEST_NAP_S
        try:
            while True:
                self.advance()
                if letter.done():
                    break
                time.sleep(nap_s)
                nap_s = min(nap_s * 1.2, _LONGEST_NAP_S)
        except KeyboardInterrupt:
            self.t.abort(f"{self.t.layout.words(self.t.rank)} was interrupted")
            raise
        error = letter.error()
        if error is not None:
            raise error
        return letter.source if letter.verb == "recv" else None

    # -- how they go on

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and (self._sends or self._receives):
                self._thread = threading.Thread(target=self._run, name="unisono-letters", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        nap_s = _SHORTEST_NAP_S
        while True:
            before = len(self._sends) + len(self._receives)
            self.advance()
            with self._lock:
                left = len(self._sends) + len(self._receives)
                if not left:
                    self._thread = None
                    return
            nap_s = _SHORTEST_NAP_S if left != before else min(nap_s * 1.2, _LONGEST_NAP_S)
            time.sleep(nap_s)

    def advance(self) -> None:
        """Looks at all letters once; completes those that are over with no lock held."""
        over: list[tuple[_Letter, Exception | None]] = []
        self.t.links.engine.advance()
        with self._lock:
            self._absent.clear()
            if self.t.failure is not None:
                for letter in [*self._sends, *self._receives]:
                    over.append((letter, self._failure(letter)))
                self._sends.clear()
                self._receives.clear()
                self._heads.clear()
            for letter in list(self._sends):
                if letter.has_word():
                    over.append((letter, self._answer(letter)))
                    self._sends.remove(letter)
            for letter in list(self._receives):
                error = self._step(letter)
                if error is not _WAITING:
                    over.append((letter, error))
                    self._receives.remove(letter)
            self._look_at_time()
        for letter, error in over:
            letter.held.clear()
            if letter.done():
                continue
            if error is None:
                letter.set_result(None)
            else:
                letter.set_exception(error)

    def _step(self, letter: _Letter) -> Any:
        """The error of a receive that is over, None if it went well, or _WAITING."""
        if letter.word is not None:
            if not letter.has_word():
                return _WAITING
            self._reply(letter.place, 0, 0)
            return None
        layout = self.t.layout
        far = [r for r in range(self.t.size) if layout.host_of[r] != layout.host]
        for source in far if letter.peer is None else [letter.peer]:
            buffer = self._head(source, letter.tag)
            if buffer is not None:
                return self._take(letter, source, buffer)
        if letter.peer is None and self.t.comm.has_message(letter.tag):
            try:
                place = self.t.comm.recv(letter.tensor, None, letter.tag, self.t.timeout_s, False)
            except UnisonoError as error:
                return error if error.__class__.__name__ == "MismatchError" else self.t.explain("recv", 0, error)
            letter.source = layout.mine[int(place)]  # type: ignore[arg-type]
            return None
        return self._gone(letter)

    def _head(self, source: int, tag: int) -> Tensor | None:
        """The next letter of a rank with this tag, if it is here; else a receive for it is posted."""
        # All receives of a step see the same letters, or one that comes in between would go to the second that waits.
        if (source, tag) in self._absent:
            return None
        links, place = self.t.links, (source, self.t.rank, tag, self._received[source, tag] + 1)
        posted = self._heads.get((source, tag))
        if posted is None:
            buffer = torch.zeros(_ROOM, dtype=torch.uint8)
            self._heads[source, tag] = (buffer, links.recv(buffer, source, links.letter_tag(LETTER, *place)))
            self._absent.add((source, tag))
            return None
        buffer = posted[0]
        word, n, _ = _HEAD.unpack(read_bytes(buffer, 0, _HEAD.size))
        end = _HEAD.size + (-(-n // 8) * 8 if n <= SMALL_BYTES else 0)
        if word != links.word(LETTER, *place) or c_uint64.from_address(buffer.data_ptr() + end).value != word:
            self._absent.add((source, tag))
            return None
        del self._heads[source, tag]
        self._received[source, tag] += 1
        return buffer

    def _take(self, letter: _Letter, source: int, buffer: Tensor) -> Any:
        _, n, name = _HEAD.unpack(read_bytes(buffer, 0, _HEAD.size))
        data, sent = letter.tensor, name.rstrip(b"\0").decode()
        letter.source = source
        links = self.t.links
        place = letter.place = (source, self.t.rank, letter.tag, self._received[source, letter.tag])
        if n != data.nbytes or sent != str(data.dtype)[6:]:
            self._reply(place, 1, data.nbytes)
            mine = f"{data.nbytes} bytes of {str(data.dtype)[6:]}"
            text = f"expected {mine} from rank {source}, which sent {n} bytes of {sent}"
            return make_error(MISMATCH, "recv", place[3], self.t.name, self.t.rank, [source], text, [], False)
        if n <= SMALL_BYTES:
            if n:
                data.view(torch.uint8).copy_(buffer[_HEAD.size : _HEAD.size + n])
            self._reply(place, 0, 0)
            return None
        seal = torch.zeros(1, dtype=torch.int64)
        letter.held = [links.recv(data, source, links.letter_tag(DATA, *place, data.nbytes))]
        letter.held += [seal, links.recv(seal, source, links.letter_tag(SEAL, *place))]
        letter.word = (seal.data_ptr(), links.word(SEAL, *place))
        return _WAITING

    def _reply(self, place: tuple[int, ...], refused: int, wanted: int) -> None:
        links = self.t.links
        answer = torch.tensor([refused, wanted, signed(links.word(ACK, *place))])
        self._answers = [*self._answers[-64:], (links.send(answer, place[0], links.letter_tag(ACK, *place)), answer)]

    def _answer(self, letter: _Letter) -> Exception | None:
        refused, wanted, _ = letter.held[0].tolist()
        if not refused:
            return None
        data = letter.tensor
        mine, peer = f"{data.nbytes} bytes of {str(data.dtype)[6:]}", letter.peer or 0
        text = f"rank {peer} expected {wanted} bytes, this rank sent {mine}"
        return make_error(MISMATCH, "send", letter.place[3], self.t.name, self.t.rank, [peer], text, [], False)

    # -- how they fail

    def _failure(self, letter: _Letter) -> Exception:
        assert self.t.failure is not None
        return self.t.failure.error(letter.verb, max(1, self.t._done), self.t.name, self.t.rank, False)

    def _gone(self, letter: _Letter) -> Any:
        """A sender that has left sends nothing any more."""
        left = self.t._left
        if letter.peer in left if letter.peer is not None else len(left) == self.t.size - 1:
            r = letter.peer if letter.peer is not None else next(iter(left))
            self.t.fail(Cause(PEER_LOST, (r,), f"{self.t.layout.words(r)} left: {left[r][1]}"))
            return self._failure(letter)
        return _WAITING

    def _look_at_time(self) -> None:
        now = time.monotonic()
        for letter in (*self._sends, *self._receives):
            if now > letter.deadline and not letter.done():
                who = "anyone" if letter.peer is None else self.t.layout.words(letter.peer)
                peers = () if letter.peer is None else (letter.peer,)
                way = "to" if letter.verb == "send" else "from"
                text = f"Timed out waiting: {letter.verb} {way} {who}, tag {letter.tag}"
                self.t.fail(Cause(TIMEOUT, peers, text))
                return

    def fail(self) -> None:
        """The group has ended: so have all letters."""
        self.advance()

    def wait_for_reading(self) -> None:
        """Before the group is closed: letters that are over for their senders have a moment to be read."""
        end = time.monotonic() + _CLOSE_S
        while any(letter.done() and not letter.has_word() for letter in self._sends) and time.monotonic() < end:
            time.sleep(_LONGEST_NAP_S)


_WAITING = object()
