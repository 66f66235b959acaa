"""What comes from one rank of another host, in order: the heads of its messages, or its answers to ours.

What a head and an answer look like, and how one sees that all of it is here: its word stands at its end.
"""

from __future__ import annotations

import struct
from ctypes import c_uint64
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .agreement import SMALL_BYTES
from .links import LETTER, Links, Memory

HEAD = struct.Struct("<QQqQ32s")  # the word, bytes of data, tag, slot, dtype
ANSWER = struct.Struct("<QQQQ")  # which slot, whether it was refused, how many bytes were expected, and the word
ROOM = HEAD.size + SMALL_BYTES + 8


class Arrived(NamedTuple):
    """The head of a message that has come, with its data if that is little."""

    number: int
    slot: int
    n: int
    dtype: str
    data: Tensor


class Incoming:
    """A stream of one kind from another rank: one receive is posted for what comes next."""

    def __init__(self, links: Links, kind: int, source: int, room: int) -> None:
        self._links, self._kind, self._source = links, kind, source
        self.memory = Memory(torch.zeros(room, dtype=torch.uint8))
        self.number = 0
        self.is_over = False  # the sender has left
        self._work: Any = None
        self.next()

    def next(self) -> None:
        """What has come was read."""
        self.number += 1
        self.word = self._links.word(self._kind, self._source, self._links.rank, self.number)
        self._work = self._links.recv(self.memory.tensor, self._source, self._links.message_tag(self._kind))

    def has_word(self, at: int) -> bool:
        return c_uint64.from_address(self.memory.address + at).value == self.word

    def has_come(self) -> bool:
        """Whether all of what comes next is here."""
        if self._kind != LETTER:
            return self.has_word(self.memory.size - 8)
        if not self.has_word(0):
            return False
        _, n, *_ = HEAD.unpack(self.memory.read(0, HEAD.size))
        return self.has_word(HEAD.size + (-(-n // 8) * 8 if n <= SMALL_BYTES else 0))
