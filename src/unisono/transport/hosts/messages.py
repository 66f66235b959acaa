"""Send and recv between hosts: messages, matched by sender and tag.

The n-th send of a tag to a rank meets the n-th receive of that tag from this one. Between two ranks all messages travel
in one stream, in order, and the receiver sorts them by tag. A message says what is sent, and has the data in it if that
is little: then it is answered when it has come. Else the data follows straight from tensor to tensor when a receive
asks for it, is told from that of other messages by a *slot*, and is answered, or refused, then. Answers are a stream
too. A slot is free again when its message is answered; if all are taken, sends wait.

A receive from anyone looks for messages of all ranks on other hosts, and for messages inside this one. Whoever waits
makes all go on; a thread does, while there are asynchronous ones.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from ctypes import c_uint64
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...base.errors import UnisonoError, make_error
from ...base.handle import Handle, Pending
from ..backend import flat
from ..pending import Step, ThreadPending
from .agreement import SMALL_BYTES
from .control import MISMATCH, PEER_LOST, TIMEOUT, Cause
from .links import ACK, DATA, LETTER, SEAL, Links, Memory, Word, signed

if TYPE_CHECKING:
    from ..protocol import Seconds
    from .state import HostsGroup

_HEAD = struct.Struct("<QQqQ32s")  # the word, bytes of data, tag, slot, dtype
_ANSWER = struct.Struct("<QQQQ")  # the word, which slot, whether it was refused, and how many bytes were expected
_ROOM = _HEAD.size + SMALL_BYTES + 8
_SLOTS = 2048  # messages to one rank that are not answered yet; as many as tags have room for
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


class _Message(ThreadPending):
    """One send or receive."""

    def __init__(self, verb: str, tensor: Tensor, peer: int | None, tag: int, deadline: float) -> None:
        super().__init__()
        self.verb, self.tensor, self.peer, self.tag, self.deadline = verb, flat(tensor), peer, tag, deadline
        self.slot = 0
        self.word: Word | None = None  # of a receive: it waits for this, with which its data ends
        self.held: list[Any] = []

    def has_word(self) -> bool:
        return self.word is not None and c_uint64.from_address(self.word[0]).value == self.word[1]


class _Arrived(NamedTuple):
    """The head of a message that has come, with its data if that is little."""

    number: int
    slot: int
    n: int
    dtype: str
    data: Tensor


class _Incoming:
    """A stream of one kind from another rank: one receive is posted for what comes next."""

    def __init__(self, links: Links, kind: int, source: int, room: int) -> None:
        self._links, self._kind, self._source = links, kind, source
        self.memory = Memory(torch.zeros(room, dtype=torch.uint8))
        self.number = 0
        self._work: Any = None
        self.next()

    def next(self) -> None:
        """What has come was read."""
        self.number += 1
        self.word = self._links.word(self._kind, self._source, self._links.rank, self.number)
        self._work = self._links.recv(self.memory.tensor, self._source, self._links.message_tag(self._kind))

    def has_word(self, at: int) -> bool:
        return c_uint64.from_address(self.memory.address + at).value == self.word


class Mailbox:
    """The messages of one group on one rank."""

    def __init__(self, transport: HostsGroup) -> None:
        self.t = transport
        self._lock = threading.RLock()
        self._sent: dict[int, int] = {}  # by rank: how many messages have gone to it
        self._free: dict[int, list[int]] = {}  # by rank: slots that are free
        self._waiting: dict[int, deque[_Message]] = {}  # by rank: sends that wait for a slot
        self._sends: dict[tuple[int, int], _Message] = {}  # by rank and slot: those that are on their way
        self._receives: list[_Message] = []
        self._streams: dict[int, _Incoming] = {}  # by rank: messages from it
        self._answers: dict[int, _Incoming] = {}  # by rank: answers to messages to it
        self._arrived: dict[tuple[int, int], deque[_Arrived]] = {}  # by rank and tag: messages nobody has asked for
        self._answered: dict[int, tuple[int, deque[Any]]] = {}  # by rank: how many answers, and the last ones
        self._thread: threading.Thread | None = None

    # -- calls

    def send(self, tensor: Tensor, dst: int, tag: int, timeout_s: Seconds, async_op: bool) -> Any:
        self.t.check_alive("send", self.t._done)
        message = _Message("send", tensor, dst, tag, time.monotonic() + (timeout_s or self.t.timeout_s))
        with self._lock:
            if dst not in self._answers:
                self._answers[dst] = _Incoming(self.t.links, ACK, dst, _ANSWER.size)
                self._free[dst], self._waiting[dst] = list(range(_SLOTS)), deque()
            little = message.tensor.nbytes <= SMALL_BYTES
            if little and not self._free[dst]:
                message.tensor = message.tensor.clone()
            self._waiting[dst].append(message)
            self._begin_sends(dst)
        if little:  # over for the caller; it stays until it has come
            message.set_result(None)
            self._start_thread()
        return self._result(message, async_op, tensor)

    def _begin_sends(self, dst: int) -> None:
        links, me, waiting = self.t.links, self.t.rank, self._waiting[dst]
        while waiting and self._free[dst]:
            message = waiting.popleft()
            message.slot = slot = self._free[dst].pop()
            number = self._sent[dst] = self._sent.get(dst, 0) + 1
            data = message.tensor
            little = data.nbytes <= SMALL_BYTES
            word = links.word(LETTER, me, dst, number)
            room = _HEAD.size + (-(-data.nbytes // 8) * 8 if little else 0) + 8
            head = Memory(torch.empty(room, dtype=torch.uint8))
            head.write(0, _HEAD.pack(word, data.nbytes, message.tag, slot, str(data.dtype)[6:].encode()))
            if little:
                head.put(_HEAD.size, data)
            head.write(room - 8, struct.pack("<Q", word))
            message.held = [head, links.send(head.tensor, dst, links.message_tag(LETTER))]
            if not little:
                seal = torch.tensor([signed(links.word(SEAL, me, dst, number))])
                message.held.append(links.send(data, dst, links.message_tag(DATA, slot)))
                message.held += [seal, links.send(seal, dst, links.message_tag(SEAL, slot))]
            self._sends[dst, slot] = message

    def recv(self, tensor: Tensor, src: int | None, tag: int, timeout_s: Seconds, async_op: bool) -> Any:
        self.t.check_alive("recv", self.t._done)
        message = _Message("recv", tensor, src, tag, time.monotonic() + (timeout_s or self.t.timeout_s))
        layout = self.t.layout
        with self._lock:
            for source in range(self.t.size) if src is None else (src,):
                if source not in self._streams and layout.host_of[source] != layout.host:
                    self._streams[source] = _Incoming(self.t.links, LETTER, source, _ROOM)
            self._receives.append(message)
        return self._result(message, async_op, tensor)

    def _result(self, message: _Message, async_op: bool, tensor: Tensor) -> Any:
        if async_op:
            self._start_thread()
            return Handle(message, message.verb, tensor)
        nap_s = _SHORTEST_NAP_S
        try:
            while True:
                self.advance()
                if message.done():
                    break
                time.sleep(nap_s)
                nap_s = min(nap_s * 1.2, _LONGEST_NAP_S)
        except KeyboardInterrupt:
            self.t.abort(f"{self.t.layout.words(self.t.rank)} was interrupted")
            raise
        error = message.error()
        if error is not None:
            raise error
        return message.source if message.verb == "recv" else None

    # -- how they go on

    def _under_way(self) -> int:
        return len(self._sends) + len(self._receives) + sum(map(len, self._waiting.values()))

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and self._under_way():
                self._thread = threading.Thread(target=self._run, name="unisono-messages", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        nap_s = _SHORTEST_NAP_S
        while True:
            before = self._under_way()
            self.advance()
            with self._lock:
                left = self._under_way()
                if not left:
                    self._thread = None
                    return
            nap_s = _SHORTEST_NAP_S if left != before else min(nap_s * 1.2, _LONGEST_NAP_S)
            time.sleep(nap_s)

    def advance(self) -> None:
        """Looks at all messages once; completes those that are over with no lock held."""
        over: list[tuple[_Message, Exception | None]] = []
        self.t.links.engine.advance()
        with self._lock:
            if self.t.failure is not None:
                every = [*self._sends.values(), *self._receives, *(m for w in self._waiting.values() for m in w)]
                over = [(message, self._failure(message)) for message in every]
                for held in (self._sends, self._receives, self._waiting, self._streams, self._answers, self._arrived):
                    held.clear()
            for dst, stream in self._answers.items():
                while stream.has_word(0):
                    over.append(self._read_answer(dst, stream))
                    self._begin_sends(dst)
            for source, stream in self._streams.items():
                while self._read_head(source, stream):
                    stream.next()
            waiting = []
            for message in self._receives:
                error = self._step(message)
                if error is _WAITING:
                    waiting.append(message)
                else:
                    over.append((message, error))
            self._receives = waiting
            self._look_at_time()
        for message, error in over:
            message.held.clear()
            if message.done():
                continue
            if error is None:
                message.set_result(None)
            else:
                message.set_exception(error)

    def _read_answer(self, dst: int, stream: _Incoming) -> tuple[_Message, Exception | None]:
        _, slot, refused, wanted = _ANSWER.unpack(stream.memory.read(0, _ANSWER.size))
        stream.next()
        message = self._sends.pop((dst, slot))
        self._free[dst].append(slot)
        if not refused:
            return message, None
        mine = f"{message.tensor.nbytes} bytes of {str(message.tensor.dtype)[6:]}"
        text = f"rank {dst} expected {wanted} bytes, this rank sent {mine}"
        return message, make_error(
            MISMATCH, "send", stream.number - 1, self.t.name, self.t.rank, [dst], text, [], False
        )

    def _read_head(self, source: int, stream: _Incoming) -> bool:
        """Sorts the next message of a rank by its tag, if all of it is here."""
        if not stream.has_word(0):
            return False
        _, n, tag, slot, name = _HEAD.unpack(stream.memory.read(0, _HEAD.size))
        little = n if n <= SMALL_BYTES else 0
        if not stream.has_word(_HEAD.size + -(-little // 8) * 8):
            return False
        data = stream.memory.tensor[_HEAD.size : _HEAD.size + little].clone()
        arrived = _Arrived(stream.number, slot, n, name.rstrip(b"\0").decode(), data)
        self._arrived.setdefault((source, tag), deque()).append(arrived)
        if n <= SMALL_BYTES:
            self._answer(source, slot, 0, 0)
        return True

    def _step(self, message: _Message) -> Any:
        """The error of a receive that is over, None if it went well, or _WAITING."""
        if message.word is not None:
            if not message.has_word():
                return _WAITING
            self._answer(message.source, message.slot, 0, 0)
            return None
        layout = self.t.layout
        for source in list(self._streams) if message.peer is None else [message.peer]:
            arrived = self._arrived.get((source, message.tag))
            if arrived:
                return self._take(message, source, arrived.popleft())
        if message.peer is None and self.t.comm.has_message(message.tag):
            try:
                place = self.t.comm.recv(message.tensor, None, message.tag, self.t.timeout_s, False)
            except UnisonoError as error:
                return error if error.__class__.__name__ == "MismatchError" else self.t.explain("recv", 0, error)
            message.source = layout.mine[int(place)]  # type: ignore[arg-type]
            return None
        return self._gone(message)

    def _take(self, message: _Message, source: int, arrived: _Arrived) -> Any:
        data, links = message.tensor, self.t.links
        message.source, message.slot = source, arrived.slot
        if arrived.n != data.nbytes or arrived.dtype != str(data.dtype)[6:]:
            if arrived.n > SMALL_BYTES:
                self._answer(source, arrived.slot, 1, data.nbytes)
            mine = f"{data.nbytes} bytes of {str(data.dtype)[6:]}"
            text = f"expected {mine} from rank {source}, which sent {arrived.n} bytes of {arrived.dtype}"
            number = arrived.number
            return make_error(MISMATCH, "recv", number, self.t.name, self.t.rank, [source], text, [], False)
        if arrived.n <= SMALL_BYTES:
            Memory(arrived.data).take(0, data)
            return None
        seal = torch.zeros(1, dtype=torch.int64)
        work = links.recv(data, source, links.message_tag(DATA, arrived.slot))
        message.held = [work, seal, links.recv(seal, source, links.message_tag(SEAL, arrived.slot), work)]
        message.word = (seal.data_ptr(), links.word(SEAL, source, self.t.rank, arrived.number))
        return _WAITING

    def _answer(self, source: int, slot: int, refused: int, wanted: int) -> None:
        """Tells a sender what became of its message. No more answers than there are slots can be on their way."""
        links = self.t.links
        count, held = self._answered.get(source, (0, deque(maxlen=_SLOTS)))
        word = links.word(ACK, self.t.rank, source, count + 1)
        answer = torch.tensor([signed(word), slot, refused, wanted])
        held.append((links.send(answer, source, links.message_tag(ACK)), answer))
        self._answered[source] = (count + 1, held)

    # -- how they fail

    def _failure(self, message: _Message) -> Exception:
        assert self.t.failure is not None
        return self.t.failure.error(message.verb, max(1, self.t._done), self.t.name, self.t.rank, False)

    def _gone(self, message: _Message) -> Any:
        """A sender that has left sends nothing any more."""
        left = self.t._left
        if message.peer in left if message.peer is not None else len(left) == self.t.size - 1:
            r = message.peer if message.peer is not None else next(iter(left))
            self.t.fail(Cause(PEER_LOST, (r,), f"{self.t.layout.words(r)} left: {left[r][1]}"))
            return self._failure(message)
        return _WAITING

    def _look_at_time(self) -> None:
        now = time.monotonic()
        for message in (*self._sends.values(), *self._receives):
            if now > message.deadline and not message.done():
                who = "anyone" if message.peer is None else self.t.layout.words(message.peer)
                peers = () if message.peer is None else (message.peer,)
                way = "to" if message.verb == "send" else "from"
                text = f"Timed out waiting: {message.verb} {way} {who}, tag {message.tag}"
                self.t.fail(Cause(TIMEOUT, peers, text))
                return

    def fail(self) -> None:
        """The group has ended: so have all messages."""
        self.advance()

    def wait_for_reading(self) -> None:
        """Before the group is closed: messages that are over for their senders have a moment to be read."""
        end = time.monotonic() + _CLOSE_S
        while any(message.done() for message in list(self._sends.values())) and time.monotonic() < end:
            self.advance()
            time.sleep(_LONGEST_NAP_S)


_WAITING = object()
