"""Small calls: the data goes with the requests, one message per pair of hosts (see agreement.py).

Every verb is one of three kinds: all get what some bring (all_gather, broadcast, barrier), some get what is reduced
over all (all_reduce, reduce, reduce_scatter), each gets something else of each (all_to_all, gather, scatter).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .agreement import SMALL_BYTES, Shown, agree
from .layout import Span, joined
from .links import read_bytes, write_bytes
from .reduction import Reduction
from .requests import HostsRequest, factor_in, table_in

if TYPE_CHECKING:
    from .state import HostsGroup


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat tensor as bytes."""
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def begin(t: HostsGroup, request: HostsRequest) -> None:
    """Compares the requests of a large call."""
    differing, _ = agree(t, request.bytes, None, lambda own, host: [], lambda shown, reply: None)
    t.raise_mismatch(request, differing)


def gather(t: HostsGroup, request: HostsRequest, input: Tensor | None, counts: Sequence[int], item: int) -> Tensor:
    """Every rank's bytes behind one another; ``input`` is None on ranks that bring nothing."""
    sizes = [n * item for n in counts]

    def outcome(shown: list[Shown], reply: Tensor) -> None:
        parts: list[Tensor] = [reply[:0]] * t.size
        for host, ranks in enumerate(t.layout.hosts):
            of_host = shown[host].parts or torch.split(shown[host].data, [sizes[r] for r in ranks])
            for r, part in zip(ranks, of_host, strict=True):
                parts[r] = part
        torch.cat(parts, out=reply[: sum(sizes)])

    data = None if input is None else as_bytes(input)
    differing, reply = agree(t, request.bytes, data, lambda own, host: list(own.parts), outcome)
    t.raise_mismatch(request, differing)
    return reply[: sum(sizes)]


def reduce(
    t: HostsGroup, request: HostsRequest, input: Tensor, reduction: Reduction, needed: Sequence[Sequence[Span]]
) -> Tensor:
    """The reduced elements that this host's ranks need: ``needed[h]`` are host h's spans, put behind one another."""
    runs = [joined(spans) for spans in needed]
    partials: list[Tensor] = []  # this host's, made once

    def partial_of(own: Shown) -> Tensor:
        if not partials:
            factors = [factor_in(r) for r in own.requests]
            partials.append(reduction.combine_inside([p.view(input.dtype) for p in own.parts], factors))
        return partials[0]

    def cut(whole: Tensor, host: int) -> list[Tensor]:
        return [whole[start:end] for start, end in runs[host]]

    def outgoing(own: Shown, host: int) -> list[Tensor]:
        return [as_bytes(part) for part in cut(partial_of(own), host)] if runs[host] else []

    def outcome(shown: list[Shown], reply: Tensor) -> None:
        mine = t.layout.host
        if not runs[mine]:
            return
        by_host = [
            torch.cat(cut(partial_of(of), mine)) if h == mine else of.data.view(reduction.partial_dtype)
            for h, of in enumerate(shown)
        ]
        output = torch.empty(by_host[0].numel(), dtype=input.dtype)
        reduction.combine_hosts(output, by_host)
        reply[: output.nbytes] = as_bytes(output)

    differing, reply = agree(t, request.bytes, as_bytes(input), outgoing, outcome)
    t.raise_mismatch(request, differing)
    count = sum(end - start for start, end in runs[t.layout.host])
    return reply[: count * input.element_size()].view(input.dtype)


def exchange(
    t: HostsGroup, request: HostsRequest, inputs: Sequence[Tensor], outputs: Sequence[Tensor], item: int
) -> set[int]:
    """Exchanges what is small, and says between which hosts nothing has gone: the others' data must go by itself.

    Each rank puts what it sends into its slot, if that is little. A host's data for another goes with the requests if
    all its ranks have done so and it is little. Inside a host nothing is exchanged here. Returns the hosts whose data
    is not here, and as negative numbers minus one those that have not got this one's.
    """
    layout, size = t.layout, t.size
    total = sum(x.numel() for x in inputs) * item
    data = torch.cat([as_bytes(x) for x in inputs]) if 0 < total <= SMALL_BYTES else None
    went: list[int] = [0] * layout.count

    def blocks(own: Shown, host: int) -> list[Tensor] | None:
        found = []
        for part, of in zip(own.parts, own.requests, strict=True):
            sent = [n * item for n in table_in(of, size)[0]]
            if part.numel() != sum(sent):
                return None
            of_rank = torch.split(part, sent)
            found += [of_rank[r] for r in layout.hosts[host]]
        return found if sum(b.numel() for b in found) <= SMALL_BYTES else None

    def outgoing(own: Shown, host: int) -> list[Tensor]:
        found = blocks(own, host)
        went[host] = found is not None
        return found or []

    def outcome(shown: list[Shown], reply: Tensor) -> None:
        came = [0] * layout.count
        parts: dict[tuple[int, int], Tensor] = {}
        for host in layout.others:
            of_host = [table_in(of, size)[0] for of in shown[host].requests]
            sizes = [sent[r] * item for sent in of_host for r in layout.mine]
            if sum(sizes) == shown[host].data.numel():
                came[host] = 1
                pairs = [(i, j) for i in layout.hosts[host] for j in layout.mine]
                parts |= dict(zip(pairs, torch.split(shown[host].data, sizes), strict=True))
        by_rank = [[parts[pair] for pair in sorted(parts) if pair[1] == j] for j in layout.mine]
        ends, flags = [], 2 * layout.count
        at = flags + 8 * len(layout.mine)
        at += -at % 16
        for mine in by_rank:
            ends.append(at)
            for part in mine:
                reply[at : at + part.numel()] = part
                at += part.numel()
        reply[:flags] = torch.tensor([*went, *came], dtype=torch.uint8)
        places = struct.pack(f"<{len(ends)}Q", *ends)
        write_bytes(reply, flags, places)

    differing, reply = agree(t, request.bytes, data, outgoing, outcome)
    t.raise_mismatch(request, differing)
    count = layout.count
    went, came = reply[:count].tolist(), reply[count : 2 * count].tolist()
    places = read_bytes(reply, 2 * count, 2 * count + 8 * len(layout.mine))
    at = struct.unpack(f"<{len(layout.mine)}Q", places)[layout.local]
    for r, output in enumerate(outputs):
        if layout.host_of[r] != layout.host and came[layout.host_of[r]] and output.numel():
            as_bytes(output).copy_(reply[at : at + output.nbytes])
            at += output.nbytes
    return {h for h in layout.others if not came[h]} | {-1 - h for h in layout.others if not went[h]}
