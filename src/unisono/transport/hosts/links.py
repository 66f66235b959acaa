"""The messages of one group between hosts, and how one notices that they have come.

gloo's receive can be waited for but neither asked nor ended. But it fills memory in the order of sending, so every
message ends with a *word* that both ends know, made of the group, the call and the message's place in it. A large
message goes from and to the caller's memory, and its word follows as a message of its own, the *seal*: both travel over
one connection, so when the seal is there, all is there. Waiting is the core's ``await_words``, which also looks at the
group's health.

Who sends from memory that is not its own to keep waits for the receiver's *acknowledgement*, a word too.
Dropping the works of messages that have not come withdraws them: nothing is written into the caller's memory then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from ctypes import memmove, string_at
from typing import Any

import torch
from torch import Tensor

from .engine import Engine

Word = tuple[int, int]  # address, and the value that it will have
Expected = tuple[Word, int]  # and the host that it comes from

_MASK = (1 << 64) - 1
MOST_CONTEXTS = 1 << 12  # groups on one engine
_MOST_VIEWS = 32
HEADER, DATA, SEAL, ACK, CONTROL, LETTER, TRY = range(7)  # kinds of messages


class ConnectionLost(RuntimeError):
    """The connection to ``peer`` is closed: nothing can be posted on it any more."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(f"the connection to rank {peer} is closed: {why}")
        self.peer = peer


class Links:
    """Messages of one group; ``numbers[r]`` is rank r's number in the engine.

    ``context`` tells groups of one engine apart: no two that share two ranks have the same (see joining.py). So
    messages of collectives never meet those of another group, call or piece that are under way at the same time; those
    that get the same tag later arrive in the order of sending.
    """

    def __init__(self, engine: Engine, context: int, id: int, numbers: list[int], rank: int) -> None:
        self.engine = engine
        self.context = context
        self.id = id
        self.numbers = numbers
        self.rank = rank

    def tag(self, kind: int, seq: int = 0, index: int = 0) -> int:
        """The tag of a collective's message: 12 bits of the group, 3 of the kind, 4 of the call, 11 of the piece."""
        return self.context << 18 | kind << 15 | (seq & 0xF) << 11 | index & 0x7FF

    def message_tag(self, kind: int, number: int = 0) -> int:
        """The tag of a user's message, apart from the others; ``number`` tells apart those that are under way."""
        return 1 << 30 | self.context << 18 | kind << 15 | number & 0x7FF

    def word(self, *place: int) -> int:
        """What ends a message; never 0."""
        return (hash((self.id, 7, *place)) * 0x9E37_79B9_7F4A_7C15 + 1) & _MASK | 1

    def give_up(self, peers: Iterable[int]) -> None:
        """Messages with these ranks are dropped half-way.

        gloo's connection stops for good when the other end sends or asks for one that was dropped. Other groups use it
        too, and say so instead of waiting (life.py).
        """
        if not self.engine.tells_ends:  # not gloo
            return
        self.engine.given_up.update((self.numbers[peer], time.monotonic()) for peer in peers)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        try:
            return self.engine.send(tensor, self.numbers[peer], tag)
        except RuntimeError as error:
            raise self._read_error(error, peer) from None

    def recv(self, tensor: Tensor, peer: int, tag: int, after: Any = None) -> Any:
        try:
            return self.engine.recv(tensor, self.numbers[peer], tag, after)
        except RuntimeError as error:
            raise self._read_error(error, peer) from None

    def is_connected(self, peer: int) -> bool:
        """Whether a message can still be posted; True also if the engine would not tell."""
        if not self.engine.tells_ends:
            return True
        try:
            self.recv(torch.empty(1, dtype=torch.uint8), peer, self.message_tag(TRY))  # dropped: nobody sends it
        except ConnectionLost:
            return False
        return True

    def _read_error(self, error: RuntimeError, peer: int) -> RuntimeError:
        """What gloo raises names an address; only here it is known which rank was meant."""
        return ConnectionLost(peer, str(error)) if self.engine.tells_ends else error


def read_bytes(tensor: Tensor, start: int, end: int) -> bytes:
    """Some bytes of a tensor of bytes; operations of torch would cost more than the message."""
    return string_at(tensor.data_ptr() + start, end - start)


def write_bytes(tensor: Tensor, start: int, data: bytes) -> None:
    """Puts bytes into a tensor of bytes."""
    if start + len(data) > tensor.numel():
        raise ValueError(f"{len(data)} bytes at {start} do not fit into {tensor.numel()}")
    memmove(tensor.data_ptr() + start, data, len(data))


class Memory:
    """Bytes that stay where they are: read and written by address, as operations of torch cost more than a message."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.address, self.size = tensor.data_ptr(), tensor.numel()
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def _at(self, at: int, n: int) -> int:
        if at + n > self.size:
            raise ValueError(f"{n} bytes at {at} do not fit into {self.size}")
        return self.address + at

    def read(self, start: int, end: int) -> bytes:
        return string_at(self._at(start, end - start), end - start)

    def write(self, at: int, data: bytes) -> None:
        memmove(self._at(at, len(data)), data, len(data))

    def put(self, at: int, tensor: Tensor, start: int = 0, n: int | None = None) -> int:
        """Copies ``n`` bytes of a flat tensor to here, or all; says how many these are."""
        n = tensor.nbytes if n is None else n
        memmove(self._at(at, n), tensor.data_ptr() + start, n)
        return n

    def take(self, at: int, tensor: Tensor) -> None:
        """Copies from here into a flat tensor."""
        memmove(tensor.data_ptr(), self._at(at, tensor.nbytes), tensor.nbytes)

    def move(self, at: int, other: Memory, start: int, n: int) -> None:
        """Copies bytes of another memory to here."""
        memmove(self._at(at, n), other._at(start, n), n)

    def view(self, at: int, count: int, dtype: torch.dtype) -> Tensor:
        """Elements from here on, as a tensor; the same calls come again and again, so views are kept."""
        found = self._views.get((at, count, dtype))
        if found is None:
            self._at(at, count * dtype.itemsize)
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self.tensor[at : at + count * dtype.itemsize].view(dtype)
            self._views[at, count, dtype] = found
        return found


def signed(word: int) -> int:
    """A word as torch's int64 has it."""
    return word - (1 << 64) if word >= 1 << 63 else word


class Bulk:
    """The large messages of one call; ``index`` numbers those between two ranks, the same on both."""

    def __init__(self, links: Links, seq: int) -> None:
        self.links = links
        self.seq = seq
        self._held: list[Any] = []  # works and words, until the call is over
        self._peers: set[int] = set()  # whom they are with
        self.acknowledged: list[Any] = []  # acknowledgements, which may be on their way when it is

    def send(self, tensor: Tensor, peer: int, index: int) -> None:
        links, me = self.links, self.links.rank
        self._peers.add(peer)
        seal = torch.tensor([signed(links.word(self.seq, SEAL, me, peer, index))])
        self._held.append(links.send(tensor, peer, links.tag(DATA, self.seq, index)))
        self._held.append((links.send(seal, peer, links.tag(SEAL, self.seq, index)), seal))

    def recv(self, tensor: Tensor, peer: int, index: int) -> Word:
        """Posts a receive; the word says when it is over."""
        work = self.links.recv(tensor, peer, self.links.tag(DATA, self.seq, index))
        self._peers.add(peer)
        self._held.append(work)
        return self._word(SEAL, peer, index, work)

    def acknowledge(self, peer: int, index: int) -> None:
        """Tells a peer that its message has been read."""
        links, me = self.links, self.links.rank
        word = torch.tensor([signed(links.word(self.seq, ACK, me, peer, index))])
        work = links.send(word, peer, links.tag(ACK, self.seq, index))
        self.acknowledged.append((work, word))

    def acknowledgement(self, peer: int, index: int) -> Word:
        """Posts a receive for a peer's acknowledgement."""
        return self._word(ACK, peer, index)

    def _word(self, kind: int, peer: int, index: int, after: Any = None) -> Word:
        links, me = self.links, self.links.rank
        place = torch.zeros(1, dtype=torch.int64)
        self._held.append((links.recv(place, peer, links.tag(kind, self.seq, index), after), place))
        return place.data_ptr(), links.word(self.seq, kind, peer, me, index)

    def end(self) -> None:
        """Lets go of all messages but acknowledgements; those that have not come never will."""
        self._held.clear()

    def give_up(self) -> None:
        """The call has failed: withdraws all messages."""
        self.links.give_up(self._peers)
        self.end()
