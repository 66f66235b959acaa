"""How a call begins: all ranks compare what they were asked for, and a small call is over with it.

Steps: every rank writes its request, and its data if that is small, into its *slot*, memory that its leader sees. When
all are there (a barrier inside the host) the leader makes one message for each other host, exchanges it with that
host's leader, compares all requests, and writes the outcome into its *reply*, which its host's ranks see after a second
barrier: what a small call gives them, or every rank's request if they differ.

Of two leaders the lower one sends first: when both ends of a connection write at once, gloo's thread may spin on a lock
until its time slice ends. Receives for the next call are always posted, so a message goes out at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from ctypes import c_uint64
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.tensors import empty
from .links import HEADER, Word, read_bytes, signed, write_bytes

if TYPE_CHECKING:
    from .state import HostsGroup

SMALL_BYTES = 64 << 10  # up to here data travels with the requests
_HEAD = struct.Struct(
    "<QQ"
)  # a slot: bytes of the request, bytes of data. A message: its word, and where that stands again
_RECORD_BYTES = 256
_ALIGN = 16  # of data, for views of any dtype


def record_room(size: int) -> int:
    return _RECORD_BYTES + 16 * size


class Shown:
    """What came of one host: the requests of its ranks, and data; of this rank's own host the data by rank."""

    def __init__(self, requests: list[bytes], data: Tensor, parts: Sequence[Tensor] = ()) -> None:
        self.requests = requests
        self.data = data
        self.parts = parts


class Slots:
    """The memory through which the ranks of a host begin calls, and the leaders' headers."""

    def __init__(self, transport: HostsGroup) -> None:
        self.t = transport
        layout, local = transport.layout, transport.comm
        room = record_room(layout.size)
        self.slot = empty(_HEAD.size + room + SMALL_BYTES, dtype=torch.uint8)
        # Data of all other hosts, or requests that differ.
        most = max(SMALL_BYTES * max(1, len(layout.others)), layout.size * (8 + room))
        reply_bytes = 64 + 16 * layout.size + most
        self.reply = empty(reply_bytes if layout.is_leader else 1, dtype=torch.uint8)
        mine = torch.tensor([local.offset_of(self.slot), local.offset_of(self.reply)])
        places = torch.empty(local.size, 2, dtype=torch.int64)
        local.all_gather(places, mine, None, transport.timeout_s, False)
        at = places.tolist()
        self.slots = []  # of this host's ranks, for the leader
        if layout.is_leader:
            self.slots = [
                self.slot if r == layout.local else local.peer_bytes(r, at[r][0], self.slot.numel())
                for r in range(local.size)
            ]
        else:
            self.reply = local.peer_bytes(0, at[0][1], reply_bytes)
        self.headers = [Headers(transport, host) for host in layout.others] if layout.is_leader else []

    def write(self, request: bytes, data: Tensor | None) -> None:
        """Puts what this rank brings into its slot. ``data`` is bytes, or None if it is too much."""
        n = 0 if data is None else data.numel()
        head = _HEAD.pack(len(request), n) + request
        write_bytes(self.slot, 0, head)
        if data is not None and n:
            self.slot[len(head) : len(head) + n] = data

    def read(self, local: int) -> tuple[bytes, Tensor]:
        """What a rank of this host has brought: its request and its data."""
        slot = self.slots[local]
        length, n = _HEAD.unpack(read_bytes(slot, 0, _HEAD.size))
        start = _HEAD.size + length
        return read_bytes(slot, _HEAD.size, start), slot[start : start + n]


class Headers:
    """Messages between this leader and another: one per call in each direction, in two buffers by turns.

    A buffer is free again in the next call but one: the other leader has sent the header of the next call, so it has
    read that of the last one.
    """

    def __init__(self, transport: HostsGroup, host: int) -> None:
        self.t = transport
        self.host = host
        self.peer = transport.layout.leader(host)
        ranks = max(len(transport.layout.mine), len(transport.layout.hosts[host]))
        room = 64 + _ALIGN + ranks * (16 + record_room(transport.layout.size)) + SMALL_BYTES
        self.incoming = [torch.zeros(room, dtype=torch.uint8) for _ in range(2)]
        self.outgoing = [torch.zeros(room, dtype=torch.uint8) for _ in range(2)]
        self.receiving: list[Any] = [None, None]
        self.sending: list[Any] = [None, None]
        for seq in (1, 2):
            self._post(seq)

    def _post(self, seq: int) -> None:
        links = self.t.links
        tag = links.tag(HEADER, seq)
        self.receiving[seq % 2] = links.recv(self.incoming[seq % 2], self.peer, tag)

    def send(self, seq: int, requests: list[bytes], data: list[Tensor]) -> None:
        links, buffer = self.t.links, self.outgoing[seq % 2]
        word = struct.pack("<q", signed(links.word(HEADER, links.rank, self.peer, seq)))
        listed = b"".join(struct.pack("<Q", len(r)) + r for r in requests)
        listed += bytes(-(24 + len(listed)) % _ALIGN)
        n = sum(d.numel() for d in data)
        end = 24 + len(listed) + n
        end += -end % 8  # the word stands where it can be read in one piece
        head = word + struct.pack("<QQ", end, n) + listed
        write_bytes(buffer, 0, head)
        at = len(head)
        for part in data:
            buffer[at : at + part.numel()] = part
            at += part.numel()
        write_bytes(buffer, end, word)
        tag = links.tag(HEADER, seq)
        self.sending[seq % 2] = links.send(buffer[: end + 8], self.peer, tag)

    def first_word(self, seq: int) -> Word:
        links = self.t.links
        return self.incoming[seq % 2].data_ptr(), links.word(HEADER, self.peer, links.rank, seq)

    def has_come(self, seq: int) -> bool:
        """Whether the first word is there."""
        address, value = self.first_word(seq)
        return c_uint64.from_address(address).value == value

    def last_word(self, seq: int) -> Word:
        buffer = self.incoming[seq % 2]
        (end,) = struct.unpack("<Q", read_bytes(buffer, 8, 16))
        return buffer.data_ptr() + end, self.first_word(seq)[1]

    def read(self, seq: int) -> Shown:
        """What has come; the memory is used again in the next call but one."""
        buffer = self.incoming[seq % 2]
        (n,) = struct.unpack("<Q", read_bytes(buffer, 16, 24))
        requests, at = [], 24
        for _ in self.t.layout.hosts[self.host]:
            (length,) = struct.unpack("<Q", read_bytes(buffer, at, at + 8))
            requests.append(read_bytes(buffer, at + 8, at + 8 + length))
            at += 8 + length
        at += -at % _ALIGN
        return Shown(requests, buffer[at : at + n])

    def done(self, seq: int) -> None:
        """What has come has been read; the buffer waits for the next call but one."""
        self._post(seq + 2)


# By host: what this one sends it of its ranks' data, then what this host's ranks get of all that has come.
Outgoing = Callable[[Shown, int], list[Tensor]]
Outcome = Callable[[list[Shown], Tensor], None]


def agree(
    transport: HostsGroup, request: bytes, data: Tensor | None, outgoing: Outgoing, outcome: Outcome
) -> tuple[list[bytes] | None, Tensor]:
    """Compares the requests of all ranks. Returns the requests of all if they differ, else None; and the reply's data.

    ``outgoing`` and ``outcome`` are called on leaders: what goes to a host, and what to write into the reply.
    """
    slots, layout, seq = transport.slots, transport.layout, transport.next_step()
    slots.write(request, data)
    transport.inside("barrier")
    transport.has_begun()
    reply = slots.reply
    if layout.is_leader:
        mine = [slots.read(r) for r in range(len(layout.mine))]
        parts = [d for _, d in mine]
        own = Shown([r for r, _ in mine], parts[0][:0], parts)
        agreed = transport.fits(own.requests)

        def send(headers: Headers) -> None:
            sent = outgoing(own, headers.host) if agreed else []
            headers.send(seq, own.requests, sent)

        for headers in slots.headers:
            if headers.host > layout.host:
                send(headers)
        lower = [h for h in slots.headers if h.host < layout.host]
        higher = [h for h in slots.headers if h.host > layout.host]
        for side in (lower, higher):
            transport.await_headers(side, seq)
            if side is lower:
                for headers in lower:
                    send(headers)
        shown = [own] * layout.count
        for headers in slots.headers:
            shown[headers.host] = headers.read(seq)
        by_rank = [b""] * layout.size
        for host, ranks in enumerate(layout.hosts):
            for i, rank in enumerate(ranks):
                by_rank[rank] = shown[host].requests[i]
        differ = not transport.fits(by_rank)
        reply[0] = int(differ)
        if differ:
            at = _ALIGN
            for of_rank in by_rank:
                head = struct.pack("<Q", len(of_rank)) + of_rank
                write_bytes(reply, at, head)
                at += len(head)
        else:
            outcome(shown, reply[_ALIGN:])
        for headers in slots.headers:
            headers.done(seq)
    transport.inside("barrier")
    if not int(reply[0]):
        return None, reply[_ALIGN:]
    requests, at = [], _ALIGN
    for _ in range(layout.size):
        (length,) = struct.unpack("<Q", read_bytes(reply, at, at + 8))
        requests.append(read_bytes(reply, at + 8, at + 8 + length))
        at += 8 + length
    return requests, reply[_ALIGN:]
