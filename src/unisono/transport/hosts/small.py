"""Small calls: the data goes with the requests, one message per pair of hosts, or two (see agreement.py).

Every verb is one of three kinds: all get what some bring (all_gather, broadcast, barrier), some get what is reduced
over all (all_reduce, reduce, reduce_scatter), each gets something else of each (all_to_all, gather, scatter).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...base import ops
from ..agreement import factor_in, misfits, table_in
from ..spans import Span, joined, spans_of
from .agreement import DATA_AT, RESULT_AT, SMALL_BYTES, Message, Own, agree, most_between, record_room
from .links import Memory
from .reduction import Reduction
from .requests import HostsRequest

if TYPE_CHECKING:
    from .calling import HostsGroup


def begin(t: HostsGroup, request: HostsRequest) -> None:
    """Compares the requests of a large call."""
    t.raise_mismatch(request, agree(t, request.bytes, (), lambda own, host, into: 0, lambda own, came, reply: True))


def gather(t: HostsGroup, request: HostsRequest, input: Tensor | None, counts: Sequence[int], item: int) -> Memory:
    """Every rank's bytes behind one another, from ``RESULT_AT`` on; ``input`` is None on ranks that bring nothing."""
    sizes = [n * item for n in counts]
    layout = t.layout

    def outgoing(own: Own, host: int, into: Memory) -> int:
        at = DATA_AT
        for i, r in enumerate(layout.mine):
            into.move(at, own.slots[i], own.data_at(i), sizes[r])
            at += sizes[r]
        return at - DATA_AT

    def outcome(own: Own, came: dict[int, Message], reply: Memory) -> bool:
        starts = [start for start, _ in spans_of(sizes)]
        for i, r in enumerate(layout.mine):
            reply.move(RESULT_AT + starts[r], own.slots[i], own.data_at(i), sizes[r])
        for host, message in came.items():
            at = DATA_AT
            for r in layout.hosts[host]:
                reply.move(RESULT_AT + starts[r], message.memory, at, sizes[r])
                at += sizes[r]
        return True

    data = () if input is None else (input,)
    t.raise_mismatch(request, agree(t, request.bytes, data, outgoing, outcome))
    return t.slots.reply


def reduce(
    t: HostsGroup, request: HostsRequest, input: Tensor, reduction: Reduction, needed: Sequence[Sequence[Span]]
) -> Tensor:
    """The reduced elements that this host's ranks need: ``needed[h]`` are host h's spans, put behind one another."""
    runs = [joined(spans) for spans in needed]
    mine, slots = t.layout.host, t.slots
    partial_dtype, count, item = reduction.partial_dtype, input.numel(), reduction.partial_dtype.itemsize
    counts = [sum(end - start for start, end in of_host) for of_host in runs]
    as_it_is = t.layout.is_alone and reduction.keeps_one
    made: list[Tensor] = [input] if as_it_is else []

    def partial(own: Own, into: Tensor | None = None) -> Tensor:
        if not made:
            made.append(slots.partial.view(0, count, partial_dtype) if into is None else into)
            parts = [slot.view(own.data_at(i), count, input.dtype) for i, slot in enumerate(own.slots)]
            factors = [1.0] * len(parts)
            if reduction.op == ops.PREMUL_SUM:
                factors = [factor_in(own.request(i)) for i in range(len(parts))]
            reduction.combine_inside(made[0], parts, factors)
        return made[0]

    def outgoing(own: Own, host: int, into: Memory) -> int:
        if not made and runs[host] == [(0, count)]:  # all of it: made where it is sent from
            partial(own, into.view(DATA_AT, count, partial_dtype))
            return count * item
        at = DATA_AT
        for start, end in runs[host]:
            at += into.put(at, partial(own), start * item, (end - start) * item)
        return at - DATA_AT

    def outcome(own: Own, came: dict[int, Message], reply: Memory) -> bool:
        n = counts[mine]
        if not n:
            return True
        by_host = [came[h].memory.view(DATA_AT, n, partial_dtype) if h in came else input for h in range(len(runs))]
        whole = partial(own)
        by_host[mine] = whole[runs[mine][0][0] :][:n] if len(runs[mine]) == 1 else _cut(whole, runs[mine])
        reduction.combine_hosts(reply.view(RESULT_AT, n, input.dtype), by_host)
        return True

    t.raise_mismatch(request, agree(t, request.bytes, () if as_it_is else (input,), outgoing, outcome))
    return slots.reply.view(RESULT_AT, counts[mine], input.dtype)


def reduce_in_parts(t: HostsGroup, request: HostsRequest, input: Tensor, reduction: Reduction) -> Memory:
    """All of what is reduced, from ``RESULT_AT`` on: each host reduces a part, then they exchange the parts."""
    layout, n = t.layout, input.numel()
    edges = [n * h // layout.count for h in range(layout.count + 1)]
    part = reduce(t, request, input, reduction, [[span] for span in pairwise(edges)])
    counts = [0] * t.size
    for host, (start, end) in enumerate(pairwise(edges)):
        counts[layout.leader(host)] = end - start
    return gather(t, request, part if layout.is_leader else None, counts, input.element_size())


def _cut(whole: Tensor, runs: Sequence[Span]) -> Tensor:
    return torch.cat([whole[start:end] for start, end in runs])


def exchange(
    t: HostsGroup, request: HostsRequest, inputs: Sequence[Tensor], outputs: Sequence[Tensor], item: int
) -> set[int]:
    """Exchanges what is small, and says between which hosts nothing has gone: the others' data must go by itself.

    Each rank puts what it sends into its slot, if that is little. A host's data for another goes with the requests if
    all its ranks have done so and it is little, as what comes from there is. Inside a host nothing is exchanged here.
    Returns the hosts whose data is not here, and as negative numbers minus one those that have not got this one's.
    """
    small = _Exchange(t, item)
    data = inputs if sum(x.numel() for x in inputs) * item <= t.small_bytes else ()
    t.raise_mismatch(request, agree(t, request.bytes, data, small.outgoing, small.outcome))
    return small.take(outputs)


class _Exchange:
    """A small exchange.

    A message has the requests of the host's ranks, each of the same length, and maybe the data: by sender, then by
    receiver. The reply has what has gone and come, by host, where each rank's data begins, and the data.
    """

    def __init__(self, t: HostsGroup, item: int) -> None:
        self._layout, self._size, self._item = t.layout, t.size, item
        self._most = most_between(t.small_bytes, t.layout.count)
        self._slots = t.slots
        self._went = [0] * t.layout.count  # by host: whether this one's data has gone to it
        self._room = record_room(t.size)
        self._places_at = RESULT_AT + 2 * t.layout.count

    def outgoing(self, own: Own, host: int, into: Memory) -> int:
        """Writes the message for a host; returns its bytes."""
        at = DATA_AT
        spans: list[list[Span]] = []
        comes = 0
        for i in range(len(own.slots)):
            of = own.request(i)
            into.write(at, of)
            at += self._room
            sends, gets = table_in(of, self._size)
            spans.append(spans_of([n * self._item for n in sends]))
            comes += sum(gets[r] for r in self._layout.hosts[host]) * self._item
        fits = all(own.data_bytes(i) == of_rank[-1][1] for i, of_rank in enumerate(spans))
        blocks = [(i, *of_rank[r]) for i, of_rank in enumerate(spans) for r in self._layout.hosts[host]]
        goes = sum(end - start for _, start, end in blocks)
        # A host whose own data is too much for this waits for the other's requests before any of it goes.
        self._went[host] = int(fits and goes <= (self._most if comes <= self._most else SMALL_BYTES))
        if self._went[host]:
            for i, start, end in blocks:
                into.move(at, own.slots[i], own.data_at(i) + start, end - start)
                at += end - start
        return at - DATA_AT

    def outcome(self, own: Own, came: dict[int, Message], reply: Memory) -> bool:
        """Writes the reply for this host's ranks; False if the ranks' requests do not fit each other."""
        layout = self._layout
        requests = self._requests(own, came)
        if misfits(requests):
            return False
        arrived = [0] * layout.count
        found: dict[tuple[int, int], tuple[Memory, int, int]] = {}  # by receiver and sender: where it is
        for host, message in came.items():
            senders = layout.hosts[host]
            at = DATA_AT + len(senders) * self._room
            data_bytes = message.data_bytes - (at - DATA_AT)
            arrived[host] = int(_block_bytes(requests, senders, layout.mine, self._size, self._item) == data_bytes)
            if arrived[host]:
                for i in senders:
                    sent = table_in(requests[i], self._size)[0]
                    for j in layout.mine:
                        found[j, i] = (message.memory, at, sent[j] * self._item)
                        at += sent[j] * self._item
        places, at = [], self._places_at + 8 * len(layout.mine)
        for j in layout.mine:
            places.append(at)
            for pair in sorted(pair for pair in found if pair[0] == j):
                memory, start, n = found[pair]
                reply.move(at, memory, start, n)
                at += n
        reply.write(RESULT_AT, bytes([*self._went, *arrived]) + struct.pack(f"<{len(places)}Q", *places))
        return True

    def _requests(self, own: Own, came: dict[int, Message]) -> list[bytes]:
        """Every rank's request."""
        requests = [b""] * self._size
        for i, r in enumerate(self._layout.mine):
            requests[r] = own.request(i)
        for host, message in came.items():
            for i, r in enumerate(self._layout.hosts[host]):
                at = DATA_AT + i * self._room
                requests[r] = message.memory.read(at, at + self._room)
        return requests

    def take(self, outputs: Sequence[Tensor]) -> set[int]:
        """Copies this rank's data out of the reply; returns what :func:`exchange` does."""
        layout, reply, count = self._layout, self._slots.reply, self._layout.count
        told = reply.read(RESULT_AT, self._places_at + 8 * len(layout.mine))
        went, arrived = told[:count], told[count : 2 * count]
        at = struct.unpack_from(f"<{len(layout.mine)}Q", told, 2 * count)[layout.local]
        for r, output in enumerate(outputs):
            if layout.host_of[r] != layout.host and arrived[layout.host_of[r]] and output.numel():
                reply.take(at, output)
                at += output.nbytes
        return {h for h in layout.others if not arrived[h]} | {-1 - h for h in layout.others if not went[h]}


def _block_bytes(
    requests: Sequence[bytes], senders: Sequence[int], receivers: Sequence[int], size: int, item: int
) -> int:
    tables = [table_in(requests[i], size)[0] for i in senders]
    return sum(sent[j] for sent in tables for j in receivers) * item
