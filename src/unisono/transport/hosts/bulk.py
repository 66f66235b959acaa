"""Large calls: steps inside the hosts by the core, bytes between them in lanes, piece by piece so that both overlap.

Words: a *round* is what all lanes handle at once, one piece each; ``mine`` is this lane's piece after the step inside.
Pieces that are reduced go from and to scratch memory of the heap, which is used in turns; pieces that are only moved go
from and to the caller's tensors. No rank ends a call before what it has sent has arrived.

Bytes that leave a host: all_reduce 2(H-1)/H of the whole, reduce-scatter what the other hosts get, all-gather what the
host has, to each other host; a broadcast goes from host to host, so none sends it twice. Nothing is padded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .layout import Span, lane_pieces, overlap, spans_of
from .links import Bulk, Word
from .reduction import Reduction

if TYPE_CHECKING:
    from .state import HostsGroup

PIECE_BYTES = 1 << 20  # of one lane
_END = 1 << 30  # the index of the last acknowledgement
_TURNS = 5  # pieces of scratch memory
_BEHIND = 3  # how many rounds later a piece is waited for


class Rounds:
    """The pieces of all lanes over some spans, round by round."""

    def __init__(self, t: HostsGroup, spans: Sequence[Span], item: int) -> None:
        self._layout = t.layout
        self.lanes = lane_pieces(spans, t.layout.lanes, max(1, PIECE_BYTES // item))
        self.count = max(map(len, self.lanes))

    def spans(self, k: int) -> list[Span]:
        """The pieces of round k, by local rank; empty ones for ranks without a lane."""
        ranks = len(self._layout.mine)
        pieces = [lane[k] if k < len(lane) else (0, 0) for lane in self.lanes]
        return pieces + [(0, 0)] * (ranks - len(pieces))

    def mine(self, k: int) -> Span:
        return self.spans(k)[self._layout.local]

    def pieces(self) -> list[Span]:
        """All pieces of this rank's lane."""
        return self.lanes[self._layout.local] if self._layout.has_lane else []


def _views(tensor: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    return [tensor[start:end] for start, end in spans]


def all_reduce(t: HostsGroup, bulk: Bulk, source: Tensor, target: Tensor, reduction: Reduction) -> None:
    """Two hosts send each other their partial sums whole, which is as many bytes as halves there and back; of more,
    each reduces one part of every piece and sends it to the others."""
    layout = t.layout
    rounds = Rounds(t, [(0, source.numel())], reduction.partial_dtype.itemsize)
    in_parts = layout.count > 2
    length = max((end - start for start, end in rounds.pieces()), default=0)
    partials = t.scratch("partials", _TURNS, length, reduction.partial_dtype)
    inbox = t.scratch("inbox", _TURNS * len(layout.others), length, reduction.partial_dtype)
    results = t.scratch("results", _TURNS, length, reduction.dtype)
    first: dict[int, list[Word]] = {}
    second: dict[int, list[Word]] = {}

    def parts(n: int) -> list[Span]:
        """By host: which part of a piece it reduces."""
        edges = [n * h // layout.count for h in range(layout.count + 1)]
        return [(edges[h], edges[h + 1]) if in_parts else (0, n) for h in range(layout.count)]

    def begin(k: int) -> None:
        start, end = rounds.mine(k)
        mine = partials[k % _TURNS][: end - start]
        inputs = [reduction.widened(part) for part in _views(source, rounds.spans(k))]
        t.inside("reduce_scatter", mine, inputs, None, reduction.inside, reduction.inside_factor)
        of_host = parts(end - start)
        own = of_host[layout.host]
        first[k] = []
        for i, host in enumerate(layout.others):
            peer = layout.lane_peer(host) if layout.has_lane else -1
            if own[0] < own[1]:
                into = inbox[k % _TURNS * len(layout.others) + i][: own[1] - own[0]]
                first[k].append(bulk.recv(into, peer, 2 * k))
            a, b = of_host[host]
            if a < b:
                bulk.send(mine[a:b], peer, 2 * k)

    def combine(k: int) -> None:
        start, end = rounds.mine(k)
        result = results[k % _TURNS][: end - start]
        of_host = parts(end - start)
        a, b = of_host[layout.host]
        t.await_words(first.pop(k), layout.others)
        second[k] = []
        if a < b:
            by_host = [x[: b - a] for x in inbox[k % _TURNS * len(layout.others) :][: len(layout.others)]]
            by_host.insert(layout.host, partials[k % _TURNS][a:b])
            reduction.combine_hosts(result[a:b], by_host)
        if in_parts:
            for host in layout.others:
                peer = layout.lane_peer(host) if layout.has_lane else -1
                c, d = of_host[host]
                if c < d:
                    second[k].append(bulk.recv(result[c:d], peer, 2 * k + 1))
                if a < b:
                    bulk.send(result[a:b], peer, 2 * k + 1)

    def spread(k: int) -> None:
        start, end = rounds.mine(k)
        t.await_words(second.pop(k), layout.others)
        t.inside("all_gather", _views(target, rounds.spans(k)), results[k % _TURNS][: end - start], None)

    for k in range(rounds.count + 2):
        if k < rounds.count:
            begin(k)
        if 0 <= k - 1 < rounds.count:
            combine(k - 1)
        if k - 2 >= 0:
            spread(k - 2)
    if rounds.pieces():
        peers = [layout.lane_peer(h) for h in layout.others]
        t.settle(bulk, peers, peers)


def reduce_scatter(
    t: HostsGroup, bulk: Bulk, source: Tensor, target: Tensor, counts: Sequence[int], reduction: Reduction
) -> None:
    """Piece by piece over all hosts in turns: every host reduces a piece inside and sends it to the host that gets it.

    All hosts take the pieces in the same order, and none is more than a few ahead of what it has received, so the
    scratch memory is small, and no two wait for each other.
    """
    layout = t.layout
    chunks = spans_of(counts)
    item = reduction.partial_dtype.itemsize
    by_host = [Rounds(t, [chunks[r] for r in ranks], item) for ranks in layout.hosts]
    jobs = [(host, k) for k in range(max(r.count for r in by_host)) for host, r in enumerate(by_host) if k < r.count]
    length = max((end - start for r in by_host for start, end in r.pieces()), default=0)
    partials = t.scratch("partials", _TURNS, length, reduction.partial_dtype)
    inbox = t.scratch("inbox", _TURNS * len(layout.others), length, reduction.partial_dtype)
    results = t.scratch("results", 1, length, reduction.dtype)
    read: dict[int, Word] = {}  # by job: the word that says that the receiver has read the piece
    waiting: deque[tuple[int, list[Word]]] = deque()  # jobs of this host, with what they wait for

    def finish() -> None:
        job, words = waiting.popleft()
        host, k = jobs[job]
        start, end = by_host[host].mine(k)
        spans = by_host[host].spans(k)
        t.await_words(words, layout.others)
        parts = [x[: end - start] for x in inbox[job % _TURNS * len(layout.others) :][: len(layout.others)]]
        parts.insert(layout.host, partials[job % _TURNS][: end - start])
        own = chunks[layout.rank]
        # Usually a lane's piece is all its own rank's.
        direct = all(overlap(s, chunks[r]) == s or s[0] == s[1] for s, r in zip(spans, layout.mine, strict=True))
        result = target[start - own[0] : end - own[0]] if direct else results[0][: end - start]
        if start < end:
            reduction.combine_hosts(result, parts)
            for h in layout.others:
                bulk.acknowledge(layout.lane_peer(h), job)
        if not direct:
            pieces = [overlap(chunks[r], (start, end)) for r in layout.mine]
            gets = [overlap(own, s) for s in spans]
            t.inside(
                "all_to_all",
                [target[a - own[0] : b - own[0]] if a < b else target[:0] for a, b in gets],
                [result[a - start : b - start] if a < b else result[:0] for a, b in pieces],
                None,
                None,
            )

    for job, (host, k) in enumerate(jobs):
        while waiting and waiting[0][0] <= job - _BEHIND:
            finish()
        if job - _TURNS in read:
            t.await_words([read.pop(job - _TURNS)], [jobs[job - _TURNS][0]])
        start, end = by_host[host].mine(k)
        mine = partials[job % _TURNS][: end - start]
        words = []
        if host == layout.host and start < end:
            for i, h in enumerate(layout.others):
                into = inbox[job % _TURNS * len(layout.others) + i][: end - start]
                words.append(bulk.recv(into, layout.lane_peer(h), job))
        inputs = [reduction.widened(part) for part in _views(source, by_host[host].spans(k))]
        t.inside("reduce_scatter", mine, inputs, None, reduction.inside, reduction.inside_factor)
        if host == layout.host:
            waiting.append((job, words))
        elif start < end:
            bulk.send(mine, layout.lane_peer(host), job)
            read[job] = bulk.acknowledgement(layout.lane_peer(host), job)
    while waiting:
        finish()
    t.await_words(list(read.values()), sorted({jobs[job][0] for job in read}))


def all_gather(t: HostsGroup, bulk: Bulk, target: Tensor, input: Tensor, counts: Sequence[int]) -> None:
    """Each lane sends its share of what its host has to all others; what comes is spread inside, round by round."""
    layout = t.layout
    chunks = spans_of(counts)
    by_host = [Rounds(t, [chunks[r] for r in ranks], target.element_size()) for ranks in layout.hosts]
    coming: dict[int, list[Word]] = {}
    for host in layout.others:
        pieces = by_host[host].pieces()
        coming[host] = [bulk.recv(target[a:b], layout.lane_peer(host), k) for k, (a, b) in enumerate(pieces)]

    def send(whole: Tensor, first: int) -> None:
        for k, (a, b) in enumerate(by_host[layout.host].pieces()):
            for host in layout.others:
                bulk.send(whole[a - first : b - first], layout.lane_peer(host), k)

    own = chunks[layout.rank]
    # Usually a lane's share is its own rank's chunk, and can go out before the ranks inside have it.
    at_once = all(overlap(piece, own) == piece for piece in by_host[layout.host].pieces())
    if at_once:
        send(input, own[0])
    t.inside("all_gather", _views(target, [chunks[r] for r in layout.mine]), input, None)
    if not at_once:
        send(target, 0)
    for k in range(max((by_host[h].count for h in layout.others), default=0)):
        for host in layout.others:
            if k < by_host[host].count:
                _spread(t, target, by_host[host], k, coming[host], [host])
    if layout.has_lane:
        received = [layout.lane_peer(h) for h in layout.others if coming[h]]
        sent = [layout.lane_peer(h) for h in layout.others] if by_host[layout.host].pieces() else []
        t.settle(bulk, received, sent)


def broadcast(t: HostsGroup, bulk: Bulk, target: Tensor, root: int) -> None:
    """From the root's host to the next, and so on: every host sends it once at most."""
    layout = t.layout
    source = layout.host_of[root]
    rounds = Rounds(t, [(0, target.numel())], target.element_size())
    order = [(source + i) % layout.count for i in range(layout.count)]
    place = order.index(layout.host)
    before, after = order[place - 1] if place else None, order[place + 1] if place + 1 < len(order) else None
    pieces = rounds.pieces()
    if before is None:
        t.inside("broadcast", target, layout.mine.index(root), None)
        for k, (a, b) in enumerate(pieces):
            if after is not None:
                bulk.send(target[a:b], layout.lane_peer(after), k)
    else:
        coming = [bulk.recv(target[a:b], layout.lane_peer(before), k) for k, (a, b) in enumerate(pieces)]
        for k in range(rounds.count):
            a, b = rounds.mine(k)
            t.await_words(coming[k : k + 1], [before])
            if after is not None and a < b:
                bulk.send(target[a:b], layout.lane_peer(after), k)
            _spread(t, target, rounds, k, [], [])
    if pieces:
        received = [] if before is None else [layout.lane_peer(before)]
        t.settle(bulk, received, [] if after is None else [layout.lane_peer(after)])


def _spread(t: HostsGroup, target: Tensor, rounds: Rounds, k: int, coming: list[Word], hosts: Sequence[int]) -> None:
    """Has all ranks of this host get the pieces of a round, when this lane's has come."""
    t.await_words(coming[k : k + 1], hosts)
    spans = rounds.spans(k)
    start, end = spans[t.layout.local]
    t.inside("all_gather", _views(target, spans), target[start:end], None)


def exchange(t: HostsGroup, bulk: Bulk, outputs: Sequence[Tensor], inputs: Sequence[Tensor], apart: set[int]) -> None:
    """Sends every rank of another host its part, straight from tensor to tensor, and exchanges inside.

    ``apart`` are the hosts whose data has not come with the requests, and -1 - h of those that have not got this one's.
    """
    layout = t.layout
    far = [r for r in range(t.size) if layout.host_of[r] != layout.host]
    sources = [r for r in far if layout.host_of[r] in apart and outputs[r].numel()]
    targets = [r for r in far if -1 - layout.host_of[r] in apart and inputs[r].numel()]
    words = [bulk.recv(outputs[r], r, 0) for r in sources]
    for r in targets:
        bulk.send(inputs[r], r, 0)
    t.inside("all_to_all", [outputs[r] for r in layout.mine], [inputs[r] for r in layout.mine], None, None)
    t.await_words(words, sorted({layout.host_of[r] for r in sources}))
    t.settle(bulk, sources, targets)


def settle_words(bulk: Bulk, received: Sequence[int], sent: Sequence[int]) -> list[Word]:
    """Tells the ranks of which something was received, and the words that those sent to will send."""
    words = [bulk.acknowledgement(peer, _END) for peer in sent]
    for peer in received:
        bulk.acknowledge(peer, _END)
    return words
