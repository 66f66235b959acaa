"""How a call begins: all ranks compare what they were asked for, and a small call is over with it.

Steps: every rank writes its request, and its data if that is small, into its *slot*, memory that its leader sees. When
all are there (a barrier inside the host) the leader makes one message for each other host, the digest of the request
and data, exchanges it with that host's leader, compares, and writes the outcome into its *reply*, which its host's
ranks see after a second barrier: what a small call gives them. If requests differ, the leaders exchange all of them in
one more step, and the reply has every rank's. A rank that is alone on its host has no barriers.

Of two leaders the lower one sends first if messages are short: when both ends of a connection write at once, gloo's
thread may spin on a lock until its time slice ends. Longer ones go both ways at once, as the link can. Receives for the
next calls are always posted, so a message goes out at once. Posting one tells the sender's gloo, which costs as much as
a message, so several are posted at a time, and by the two leaders in different calls.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Sequence
from ctypes import c_uint64
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.tensors import empty
from .links import HEADER, Memory, Word

if TYPE_CHECKING:
    from .calling import HostsGroup

SMALL_BYTES = 64 << 10  # up to here data travels with the requests, whatever the layout and the verb
_LEADER_BYTES = 2 << 20  # of all its ranks, or all other hosts: up to here a leader does as well as all lanes
_ONE_BY_ONE_BYTES = 8 << 10
_TURNS = 8  # receives that are posted, in as many buffers
_POSTED_AT_ONCE = 4
_MOST_STEPS = 2  # of one call: for the next there have to be receives
_SLOT = struct.Struct("<QQ")  # bytes of the request, bytes of data; the request and the data follow
_SLOT_HEAD = struct.Struct("<QQ8s")  # and the digest, with which the request begins
_MESSAGE = struct.Struct("<QQQ8s")  # where its word stands again, the word, bytes of data, the digest
_WORD_AT = 8  # behind what is read as soon as the word is there
_LENGTH = struct.Struct("<Q")
_DIFFER = bytes(8)  # instead of a digest: this host's ranks were asked for different things
_RECORD_BYTES = 256
DATA_AT = _MESSAGE.size  # in a message
RESULT_AT = 16  # in the reply, behind whether requests differ


def record_room(size: int) -> int:
    return _RECORD_BYTES + 16 * size


def most_small(hosts: int, lanes: int, eager_bytes: int) -> int:
    """Up to how many bytes the data of a call travels with the requests.

    A large call waits for the requests of the other hosts before it sends anything, and for acknowledgements at its
    end. The same bytes can go with the requests. A leader keeps room for so much of each other host.
    """
    return max(SMALL_BYTES, min(eager_bytes, _LEADER_BYTES // max(lanes, hosts - 1)))


def most_whole(hosts: int, small_bytes: int) -> int:
    """The same where all of a call's data goes to every other host: between more than two it would leave too often."""
    return small_bytes if hosts == 2 else min(small_bytes, SMALL_BYTES)


def most_between(small_bytes: int, hosts: int) -> int:
    """The same of what one host sends another in an exchange, where every host may send so much."""
    return max(SMALL_BYTES, small_bytes // (hosts - 1))


def _most_data(transport: HostsGroup) -> int:
    """Bytes of data in a message: partial sums may be twice as wide as the data."""
    return 2 * transport.small_bytes if transport.wide_sums else transport.small_bytes


class Own:
    """What the ranks of this host have brought, as their leader sees it."""

    def __init__(self, slots: Sequence[Memory]) -> None:
        self.slots = slots
        self._heads = [_SLOT_HEAD.unpack(slot.read(0, _SLOT_HEAD.size)) for slot in slots]
        first = self._heads[0][2]
        self.digest = first if all(head[2] == first for head in self._heads) else _DIFFER

    def data_at(self, local: int) -> int:
        """Where a rank's data begins in its slot."""
        return _SLOT.size + int(self._heads[local][0])

    def data_bytes(self, local: int) -> int:
        return int(self._heads[local][1])

    def request(self, local: int) -> bytes:
        return self.slots[local].read(_SLOT.size, self.data_at(local))


class Message:
    """What came of one host: its data is in ``memory`` from ``DATA_AT`` on."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        _, _, self.data_bytes, self.digest = _MESSAGE.unpack(memory.read(0, _MESSAGE.size))


# By host: writes into a message what it sends it of its ranks' data, and says how many bytes. Then, with the messages
# of the other hosts: writes into the reply what this host's ranks get, and says whether what was asked for fits.
Outgoing = Callable[[Own, int, Memory], int]
Outcome = Callable[[Own, dict[int, Message], Memory], bool]


class Slots:
    """The memory through which the ranks of a host begin calls, and the leaders' messages."""

    def __init__(self, transport: HostsGroup) -> None:
        layout, local = transport.layout, transport.comm
        self._await, self._hosts = transport.await_headers, layout.hosts
        room = record_room(layout.size)
        slot = empty(_SLOT.size + room + transport.small_bytes, dtype=torch.uint8)
        # A call's data, what all other hosts send this one in an exchange, or requests that differ.
        most = max(
            transport.small_bytes,
            len(layout.others) * most_between(transport.small_bytes, layout.count),
            layout.size * (_LENGTH.size + room),
        )
        reply_bytes = 64 + 16 * layout.size + most
        reply = empty(reply_bytes if layout.is_leader else 1, dtype=torch.uint8)
        mine = torch.tensor([local.offset_of(slot), local.offset_of(reply)])
        places = torch.empty(local.size, 2, dtype=torch.int64)
        local.all_gather(places, mine, None, transport.timeout_s, False)
        at = places.tolist()
        self.slot = Memory(slot)
        self.slots: list[Memory] = []  # of this host's ranks, for the leader
        self.lower: list[Headers] = []
        self.higher: list[Headers] = []
        if not layout.is_leader:
            self.reply = Memory(local.peer_bytes(0, at[0][1], reply_bytes))
            return
        self.reply = Memory(reply)
        most = _most_data(transport)
        self.partial = Memory(torch.empty(most, dtype=torch.uint8))  # what this host's ranks have reduced
        for r in range(local.size):
            here = r == layout.local
            self.slots.append(self.slot if here else Memory(local.peer_bytes(r, at[r][0], slot.numel())))
        for host in layout.others:
            (self.lower if host < layout.host else self.higher).append(Headers(transport, host))

    def write(self, request: bytes, data: Sequence[Tensor]) -> None:
        """Puts what this rank brings into its slot; ``data`` are flat tensors, none if they are too much."""
        at = start = _SLOT.size + len(request)
        for part in data:
            at += self.slot.put(at, part)
        self.slot.write(0, _SLOT.pack(len(request), at - start) + request)

    def lead(self, seq: int, outgoing: Outgoing, outcome: Outcome) -> int:
        """The leader's part, between the two barriers; returns the number of the last step that was taken."""
        own = Own(self.slots)
        if own.digest == _DIFFER:
            came = self._exchange(seq, own.digest, lambda host, into: 0)
        else:
            came = self._exchange(seq, own.digest, lambda host, into: outgoing(own, host, into))
            if all(message.digest == own.digest for message in came.values()) and outcome(own, came, self.reply):
                self.reply.write(0, b"\0")
                return seq
        self._show_requests(seq + 1, own)
        self.reply.write(0, b"\1")
        return seq + 1

    def _exchange(self, seq: int, digest: bytes, fill: Callable[[int, Memory], int]) -> dict[int, Message]:
        for headers in self.higher:
            headers.send(seq, digest, fill(headers.host, headers.outgoing[seq % 2]))
        later = []
        for headers in self.lower:
            n = fill(headers.host, headers.outgoing[seq % 2])
            if n > _ONE_BY_ONE_BYTES:
                headers.send(seq, digest, n)
            else:
                later.append((headers, n))
        if self.lower:
            self._await(self.lower, seq)
            for headers, n in later:
                headers.send(seq, digest, n)
        if self.higher:
            self._await(self.higher, seq)
        return {headers.host: headers.read(seq) for headers in (*self.lower, *self.higher)}

    def _show_requests(self, seq: int, own: Own) -> None:
        """Ranks were asked for different things: puts every rank's request into the reply, by rank."""
        requests = [own.request(i) for i in range(len(self.slots))]
        listed = b"".join(_LENGTH.pack(len(r)) + r for r in requests)

        def fill(host: int, into: Memory) -> int:
            into.write(DATA_AT, listed)
            return len(listed)

        came = self._exchange(seq, _DIFFER, fill)
        by_rank: dict[int, bytes] = {}
        for host, ranks in enumerate(self._hosts):
            found = requests if host not in came else _listed(came[host].memory, DATA_AT, len(ranks))
            by_rank |= dict(zip(ranks, found, strict=True))
        self.reply.write(RESULT_AT, b"".join(_LENGTH.pack(len(by_rank[r])) + by_rank[r] for r in sorted(by_rank)))

    def end(self) -> None:
        """This rank leaves the group: it sends no headers any more, whatever its other threads do."""
        for headers in (*self.lower, *self.higher):
            headers.end()

    def post(self, seq: int) -> None:
        """What has come up to a step has been read: has its buffers wait for later ones."""
        for headers in (*self.lower, *self.higher):
            headers.post_after(seq)


def _listed(memory: Memory, at: int, count: int) -> list[bytes]:
    requests = []
    for _ in range(count):
        (length,) = _LENGTH.unpack(memory.read(at, at + _LENGTH.size))
        at += _LENGTH.size
        requests.append(memory.read(at, at + length))
        at += length
    return requests


class Headers:
    """Messages between this leader and another: one per step in each direction.

    What was sent has gone when the answer of the next step is here: there are two buffers, used by turns.

    gloo's connection, which other groups use too, stops for good when a message comes whose receive was posted and
    dropped. So when one leader closes the group, the other *ends* its headers before it answers, and the receives are
    kept until this answer is here (control.py): it is behind all headers on the same connection.
    """

    def __init__(self, transport: HostsGroup, host: int) -> None:
        self._links = transport.links
        self.host = host
        self.peer = transport.layout.leader(host)
        ranks = max(len(transport.layout.mine), len(transport.layout.hosts[host]))
        most = _most_data(transport)
        room = DATA_AT + ranks * (_LENGTH.size + record_room(transport.layout.size)) + most + 16
        # Most groups never fill them, so most of this memory is never touched: zeros would.
        self._incoming = [Memory(torch.empty(room, dtype=torch.uint8)) for _ in range(_TURNS)]
        self.outgoing = [Memory(torch.empty(room, dtype=torch.uint8)) for _ in range(2)]
        for memory in self._incoming:
            memory.write(0, bytes(DATA_AT))
        self._receiving: list[Any] = [None] * _TURNS
        self._sending: list[Any] = [None, None]
        self._lock = threading.Lock()
        self._is_over = False  # one of the two has left
        self._posted = 0  # the last step that a receive is posted for
        self._when = int(host < transport.layout.host)  # the leaders post in different steps
        self._post(_TURNS)

    def _post(self, last: int) -> None:
        links = self._links
        for seq in range(self._posted + 1, last + 1):
            memory = self._incoming[seq % _TURNS]
            self._receiving[seq % _TURNS] = links.recv(memory.tensor, self.peer, links.tag(HEADER, seq))
            self._posted = seq

    def end(self) -> None:
        """Nothing is sent any more once this returns."""
        with self._lock:
            self._is_over = True

    def post_after(self, seq: int) -> None:
        """Posts receives into the buffers of steps up to this one, if it is time."""
        left = self._posted - seq
        is_turn = (seq + self._when) % 2 == 0
        if left <= _MOST_STEPS or (left <= _TURNS - _POSTED_AT_ONCE and is_turn):
            # The other may have left after this call, its last: no error here, and the next call says so.
            with contextlib.suppress(RuntimeError):
                self._post(seq + _TURNS)

    def send(self, seq: int, digest: bytes, data_bytes: int) -> None:
        """Sends what has been put into the message's memory."""
        links, turn = self._links, seq % 2
        buffer = self.outgoing[turn]
        word = links.word(HEADER, links.rank, self.peer, seq)
        end = (DATA_AT + data_bytes + 7) & -8  # the word stands where it can be read in one piece
        buffer.write(0, _MESSAGE.pack(end, word, data_bytes, digest))
        buffer.write(end, _LENGTH.pack(word))
        message = buffer.view(0, end + 8, torch.uint8)
        with self._lock:
            if not self._is_over:  # else whoever waits for the answer learns who has left
                self._sending[turn] = links.send(message, self.peer, links.tag(HEADER, seq))

    def first_word(self, seq: int) -> Word:
        address = self._incoming[seq % _TURNS].address + _WORD_AT
        return address, self._links.word(HEADER, self.peer, self._links.rank, seq)

    def last_word(self, seq: int) -> Word:
        """Of a message whose first word is here: where it stands again is said before that."""
        first, word = self.first_word(seq)
        address = first - _WORD_AT
        return address + c_uint64.from_address(address).value, word

    def read(self, seq: int) -> Message:
        """What has come; the memory is used again in the next step but one."""
        return Message(self._incoming[seq % _TURNS])


def agree(
    transport: HostsGroup, request: bytes, data: Sequence[Tensor], outgoing: Outgoing, outcome: Outcome
) -> list[bytes] | None:
    """Compares the requests of all ranks. Returns the requests of all if they differ, else None: then what the call
    gives is in the reply.

    ``outgoing`` and ``outcome`` are called on leaders: what goes to a host, and what to write into the reply.
    """
    slots, seq, layout = transport.slots, transport.next_step(), transport.layout
    slots.write(request, data)
    if not layout.is_alone:
        transport.inside("barrier")
    transport.has_begun()
    if not layout.is_leader:
        transport.inside("barrier")
    else:
        last = slots.lead(seq, outgoing, outcome)
        if not layout.is_alone:
            transport.inside("barrier")
        slots.post(last)  # only now: the other ranks need not wait for it
    if slots.reply.read(0, 1) == b"\0":
        return None
    transport.next_step()
    return _listed(slots.reply, RESULT_AT, transport.size)
