"""Send and recv between hosts: messages, matched by sender and tag.

The n-th send of a tag to a rank meets the n-th receive of that tag from this one. Between two ranks all messages travel
in one stream, in order, and the receiver sorts them by tag. A message says what is sent, and has the data in it if that
is little: then it is answered when it has come. Else the data follows straight from tensor to tensor when a receive
asks for it, is told from that of other messages by a *slot*, and is answered, or refused, then. Answers are a stream
too. A slot is free again when its message is answered; if all are taken, sends wait.

A receive from anyone looks for messages of all ranks on other hosts, and for messages inside this one. Whoever waits
makes all go on; a thread does, while there are asynchronous ones.

A rank that closes the group ends its streams with a *farewell*, and whoever waits tries the connection now and then:
so a message whose other end is gone fails also where no leader is left to tell of it.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.errors import CollectiveTimeoutError, MismatchError, UnisonoError, make_error
from ...base.handle import Handle
from .agreement import SMALL_BYTES
from .control import ABORTED, MISMATCH, PEER_LOST, TIMEOUT, Cause
from .links import ACK, DATA, LETTER, SEAL, Memory, signed
from .message import Lock, Message
from .streams import ANSWER, HEAD, ROOM, Arrived, Incoming

if TYPE_CHECKING:
    from ..protocol import Seconds
    from .calling import HostsGroup

_SLOTS = 2048  # messages to one rank that are not answered yet; as many as tags have room for
_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-5, 1e-3
_CLOSE_S = 0.5
_INSIDE_LONGER_S = 0.25  # the group's own error comes first, and names ranks and hosts
_FAREWELL = _SLOTS  # instead of a slot: the sender has left; the tag is the number of calls it made, the data says why
_WHY_BYTES = 200
_TRY_EVERY_S, _LONGEST_TRY_S = 0.25, 1.0  # gloo keeps a note of every try


class Mailbox:
    """The messages of one group on one rank."""

    def __init__(self, transport: HostsGroup) -> None:
        self.t = transport
        self._lock = Lock()
        self._sent: dict[int, int] = {}  # by rank: how many messages have gone to it
        self._free: dict[int, list[int]] = {}  # by rank: slots that are free
        self._waiting: dict[int, deque[Message]] = {}  # by rank: sends that wait for a slot
        self._sends: dict[tuple[int, int], Message] = {}  # by rank and slot: those that are on their way
        self._receives: list[Message] = []
        self._streams: dict[int, Incoming] = {}  # by rank: messages from it
        self._answers: dict[int, Incoming] = {}  # by rank: answers to messages to it
        self._arrived: dict[tuple[int, int], deque[Arrived]] = {}  # by rank and tag: messages nobody has asked for
        self._answered: dict[int, tuple[int, deque[Any]]] = {}  # by rank: how many answers, and the last ones
        self._thread: threading.Thread | None = None
        self._cut_off: set[int] = set()  # ranks whose connection is closed
        self._next_try, self._try_every_s = 0.0, _TRY_EVERY_S

    # -- calls

    def send(self, tensor: Tensor, dst: int, tag: int, timeout_s: Seconds, async_op: bool) -> Any:
        self.t.check_alive("send", self.t._done)
        message = Message(self, "send", tensor, dst, tag, time.monotonic() + (timeout_s or self.t.timeout_s))
        little = message.tensor.nbytes <= SMALL_BYTES
        with self._lock:
            if dst not in self._answers:
                with self._posting_to(dst):
                    self._answers[dst] = Incoming(self.t.links, ACK, dst, ANSWER.size)
                if dst not in self._answers:
                    raise self._lost("send", dst)
                self._free[dst], self._waiting[dst] = list(range(_SLOTS)), deque()
            if not little:
                self._listen_to(dst)  # it may leave without an answer
            if little:
                if not self._free[dst]:
                    message.tensor = message.tensor.clone()
                message.set_result(None)  # over for the caller; it stays until it has come
            self._waiting[dst].append(message)
            self._begin_sends(dst)
            self._try_soon()
        if little:
            self._start_thread()
        return self._result(message, async_op, tensor)

    def _begin_sends(self, dst: int) -> None:
        links, me, waiting = self.t.links, self.t.rank, self._waiting[dst]
        while waiting and self._free[dst]:
            message = waiting.popleft()
            message.slot = slot = self._free[dst].pop()
            self._sends[dst, slot] = message
            data = message.tensor
            little = data.nbytes <= SMALL_BYTES
            with self._posting_to(dst):
                message.held = self._send_head(dst, message.tag, slot, data, little)
                if not little:
                    seal = torch.tensor([signed(links.word(SEAL, me, dst, self._sent[dst]))])
                    message.held.append(links.send(data, dst, links.message_tag(DATA, slot)))
                    message.held += [seal, links.send(seal, dst, links.message_tag(SEAL, slot))]

    def _send_head(self, dst: int, tag: int, slot: int, data: Tensor, little: bool) -> list[Any]:
        """Sends the next message of the stream to a rank, with the data if that is little."""
        links = self.t.links
        number = self._sent[dst] = self._sent.get(dst, 0) + 1
        word = links.word(LETTER, self.t.rank, dst, number)
        room = HEAD.size + (-(-data.nbytes // 8) * 8 if little else 0) + 8
        head = Memory(torch.empty(room, dtype=torch.uint8))
        head.write(0, HEAD.pack(word, data.nbytes, tag, slot, str(data.dtype)[6:].encode()))
        if little:
            head.put(HEAD.size, data)
        head.write(room - 8, struct.pack("<Q", word))
        return [head, links.send(head.tensor, dst, links.message_tag(LETTER))]

    def say_farewell(self, calls: int, why: str) -> None:
        """Tells every rank on other hosts that this one sends nothing any more; never waits.

        One that has no receive posted yet hears it when it has: until then the message is the engine's to keep.
        """
        layout, engine = self.t.layout, self.t.links.engine
        if not engine.tells_ends:
            return
        said = torch.frombuffer(bytearray(why.encode()[:_WHY_BYTES] or b" "), dtype=torch.uint8)
        with self._lock:
            for r in range(self.t.size):
                if layout.host_of[r] != layout.host and r not in self._cut_off:
                    with self._posting_to(r):
                        engine.farewells.append(self._send_head(r, calls, _FAREWELL, said, True))

    def recv(self, tensor: Tensor, src: int | None, tag: int, timeout_s: Seconds, async_op: bool) -> Any:
        self.t.check_alive("recv", self.t._done)
        message = Message(self, "recv", tensor, src, tag, time.monotonic() + (timeout_s or self.t.timeout_s))
        with self._lock:
            for source in range(self.t.size) if src is None else (src,):
                self._listen_to(source)
            self._receives.append(message)
            self._try_soon()
        return self._result(message, async_op, tensor)

    def withdraw(self, message: Message) -> None:
        """Gives up a receive that has found nothing yet."""
        with self._lock:
            if message not in self._receives or message.word is not None or message.has_ended:
                return
            if message.inside is not None and not self._withdraw_inside(message):
                return  # it has found something after all
            self._receives.remove(message)
            self._lock.end(message, CollectiveTimeoutError("the receive was withdrawn"))

    def _listen_to(self, source: int) -> None:
        layout = self.t.layout
        if source not in self._streams and layout.host_of[source] != layout.host:
            with self._posting_to(source):
                self._streams[source] = Incoming(self.t.links, LETTER, source, ROOM)

    def _result(self, message: Message, async_op: bool, tensor: Tensor) -> Any:
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
        try:
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
        except BaseException as error:  # nobody would make messages go on
            with self._lock:
                self._thread = None
            self.t.fail(Cause(ABORTED, (self.t.rank,), f"{self.t.layout.words(self.t.rank)} failed: {error!r}"))
            raise

    def advance(self) -> None:
        """Looks at all messages once; those that are over are completed when the lock is let go."""
        if self.t.failure is None:
            self.t.links.engine.advance()
        with self._lock:
            if self.t.failure is not None:
                self._leave_messages()
                for message in (*self._all_sends(), *self._receives):
                    self._lock.end(message, self._failure(message))
                for held in (self._sends, self._receives, self._waiting, self._arrived):
                    held.clear()
                self._leave_streams()
            for dst, stream in self._answers.items():
                while stream.has_come():
                    self._lock.end(*self._read_answer(dst, stream))
                    self._begin_sends(dst)
            for source, stream in self._streams.items():
                while not stream.is_over and self._read_head(source, stream):
                    with self._posting_to(source):
                        stream.next()
            waiting = []
            for message in self._receives:
                error = self._step(message)
                if error is _WAITING:
                    waiting.append(message)
                else:
                    self._lock.end(message, error)
            self._receives = [message for message in waiting if not message.has_ended]  # or the group has failed
            self._look_at_sends()
            self._try_connections()
            self._look_at_time()

    def _leave_messages(self) -> None:
        """The group has ended; what is under way would stop a connection of gloo for good if it were dropped.

        Sends are left to the engine. Data that comes must not be written into the caller's memory any more: its
        connection is given up, and other groups that need it are told so.
        """
        links = self.t.links
        if not links.engine.tells_ends:
            return
        coming = [message for message in self._receives if message.word is not None and not message.has_word()]
        left = [*self._sends.values(), *(message for message in coming if message.refusal)]
        links.engine.farewells.extend(message.held.copy() for message in left)
        links.give_up(message.source for message in coming if not message.refusal)

    def _leave_streams(self) -> None:
        """The group has ended; what others send to it may still come.

        gloo stops reading a connection for good when it meets a message whose receive was posted and dropped. So the
        posted receives are left to the engine until something has come.
        """
        engine, streams = self.t.links.engine, [*self._streams.values(), *self._answers.values()]
        self._streams.clear()
        self._answers.clear()
        if engine.tells_ends and streams:
            engine.awaited = [stream for stream in (*engine.awaited, *streams) if not stream.has_come()]

    def _read_answer(self, dst: int, stream: Incoming) -> tuple[Message, Exception | None]:
        slot, refused, wanted, _ = ANSWER.unpack(stream.memory.read(0, ANSWER.size))
        with self._posting_to(dst):
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

    def _read_head(self, source: int, stream: Incoming) -> bool:
        """Sorts the next message of a rank by its tag, if all of it is here."""
        if not stream.has_come():
            return False
        _, n, tag, slot, name = HEAD.unpack(stream.memory.read(0, HEAD.size))
        little = n if n <= SMALL_BYTES else 0
        data = stream.memory.tensor[HEAD.size : HEAD.size + little].clone()
        if slot == _FAREWELL:
            stream.is_over = True
            self.t.has_left({source: tag}, bytes(data.tolist()).decode(errors="replace").strip())
            return False
        arrived = Arrived(stream.number, slot, n, name.rstrip(b"\0").decode(), data)
        self._arrived.setdefault((source, tag), deque()).append(arrived)
        if n <= SMALL_BYTES:
            self._answer(source, slot, 0, 0)
        return True

    def _step(self, message: Message) -> Any:
        """The error of a receive that is over, None if it went well, or _WAITING."""
        if message.word is not None:
            if not message.has_word():
                return self._gone(message)
            wanted, error = message.refusal or (0, None)
            self._answer(message.source, message.slot, int(error is not None), wanted)
            return error
        for source in list(self._streams) if message.peer is None else [message.peer]:
            arrived = self._arrived.get((source, message.tag))
            if arrived:
                if message.inside is not None and not self._withdraw_inside(message):
                    break
                return self._take(message, source, arrived.popleft())
        if message.peer is None:
            return self._step_inside(message)
        return self._gone(message)

    def _step_inside(self, message: Message) -> Any:
        """Looks for a message inside the host. The receive must not wait under the lock: another may have taken the
        message meanwhile, or its sender is slow to send the rest."""
        if message.inside is None and self.t.comm.has_message(message.tag):
            left_s = max(0.0, message.deadline - time.monotonic()) + _INSIDE_LONGER_S
            try:
                handle: Any = self.t.comm.recv(message.tensor, None, message.tag, left_s, True)
            except UnisonoError as error:
                return error if isinstance(error, MismatchError) else self.t.explain("recv", 0, error)
            message.inside = handle._pending
        if message.inside is None or not message.inside.done():
            return self._gone(message)
        failed = message.inside.error()
        if failed is None:
            message.source = self.t.layout.mine[message.inside.source]
        elif isinstance(failed, UnisonoError) and not isinstance(failed, MismatchError):
            return self.t.explain("recv", 0, failed)
        return failed

    def _withdraw_inside(self, message: Message) -> bool:
        """Gives up a receive inside the host; False if it has found a message, which it then takes."""
        message.inside.withdraw()
        if not message.inside.done() or message.inside.error() is None:
            return False
        message.inside = None
        return True

    def _take(self, message: Message, source: int, arrived: Arrived) -> Any:
        data, links = message.tensor, self.t.links
        message.source, message.slot = source, arrived.slot
        error = None
        if arrived.n != data.nbytes or arrived.dtype != str(data.dtype)[6:]:
            mine = f"{data.nbytes} bytes of {str(data.dtype)[6:]}"
            text = f"expected {mine} from rank {source}, which sent {arrived.n} bytes of {arrived.dtype}"
            error = make_error(MISMATCH, "recv", arrived.number, self.t.name, self.t.rank, [source], text, [], False)
        if arrived.n <= SMALL_BYTES:
            if error is None:
                Memory(arrived.data).take(0, data)
            return error
        if source in self.t._left or source in self._cut_off:
            return self._lost("recv", source)
        if error is not None:
            # The data is taken all the same: gloo's connection stops for good at a send that is dropped.
            message.refusal = data.nbytes, error
            try:
                data = torch.empty(arrived.n, dtype=torch.uint8)
            except (RuntimeError, MemoryError):
                self._answer(source, arrived.slot, 1, data.nbytes)
                links.give_up([source])
                return error
        seal = torch.zeros(1, dtype=torch.int64)
        message.held = [seal, data]
        with self._posting_to(source):
            work = links.recv(data, source, links.message_tag(DATA, arrived.slot))
            message.held += [work, links.recv(seal, source, links.message_tag(SEAL, arrived.slot), work)]
        message.word = (seal.data_ptr(), links.word(SEAL, source, self.t.rank, arrived.number))
        return _WAITING

    def _answer(self, source: int, slot: int, refused: int, wanted: int) -> None:
        """Tells a sender what became of its message. No more answers than there are slots can be on their way."""
        links = self.t.links
        count, held = self._answered.get(source, (0, deque(maxlen=_SLOTS)))
        word = links.word(ACK, self.t.rank, source, count + 1)
        answer = torch.tensor([slot, refused, wanted, signed(word)])
        with self._posting_to(source):
            held.append((links.send(answer, source, links.message_tag(ACK)), answer))
        self._answered[source] = (count + 1, held)

    # -- how they fail

    def _failure(self, message: Message) -> Exception:
        assert self.t.failure is not None
        return self.t.failure.error(message.verb, max(1, self.t._done), self.t.name, self.t.rank, False)

    @contextlib.contextmanager
    def _posting_to(self, rank: int) -> Iterator[None]:
        """The engine refuses to post a message when the connection is closed: then its rank is cut off."""
        try:
            yield
        except RuntimeError:
            self._cut_off.add(rank)

    def _lost(self, verb: str, rank: int) -> Exception:
        """A rank that a message needs is gone."""
        left = self.t._left.get(rank)
        what = "left or died: its connection was closed" if left is None else f"left: {left[1]}"
        cause = Cause(PEER_LOST, (rank,), f"{self.t.layout.words(rank)} {what}")
        self.t.fail(cause)
        return (self.t.failure or cause).error(verb, max(1, self.t._done), self.t.name, self.t.rank, False)

    def _gone(self, message: Message) -> Any:
        """A sender that has left sends nothing any more, nor what it has not sent to its end."""
        gone = self.t._left.keys() | self._cut_off
        peer = message.peer if message.word is None else message.source
        if peer in gone if peer is not None else len(gone) == self.t.size - 1:
            return self._lost(message.verb, peer if peer is not None else min(gone))
        return _WAITING

    def _look_at_sends(self) -> None:
        """Whoever has left or is cut off reads nothing any more."""
        for message in self._all_sends():
            if not (message.has_ended or message.done()) and (
                message.peer in self._cut_off or message.peer in self.t._left
            ):
                self._lost(message.verb, message.peer)
                return

    def _all_sends(self) -> list[Message]:
        return [*self._sends.values(), *(message for waiting in self._waiting.values() for message in waiting)]

    def _try_soon(self) -> None:
        self._try_every_s = _TRY_EVERY_S
        self._next_try = min(self._next_try, time.monotonic() + _TRY_EVERY_S)

    def _try_connections(self) -> None:
        """Learns whose connection is closed; what came before that is read once more before a message fails."""
        now, links = time.monotonic(), self.t.links
        if now < self._next_try or not links.engine.tells_ends:
            return
        self._next_try = now + self._try_every_s
        self._try_every_s = min(2 * self._try_every_s, _LONGEST_TRY_S)
        waiting = {m.source if m.word is not None else m.peer for m in self._receives}
        waiting |= {dst for dst, _ in self._sends}
        for rank in self._streams if None in waiting else waiting:
            if rank is not None and rank not in self._cut_off and not links.is_connected(rank):
                self._cut_off.add(rank)

    def _look_at_time(self) -> None:
        now = time.monotonic()
        if self.t.failure is None and self.t.links.engine.given_up and (self._sends or self._receives):
            self.t.look_at_connections()
        for message in (*self._all_sends(), *self._receives):
            if now > message.deadline and not (message.has_ended or message.done()):
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
