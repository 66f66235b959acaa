"""Large calls: steps inside the hosts by the core, bytes between them in lanes, piece by piece so that both overlap.

Words: a *round* is what all lanes handle at once, one piece each; ``mine`` is this lane's piece after the step inside.
Pieces that are reduced go from and to scratch memory of the heap, which is used in turns; pieces that are only moved go
from and to the caller's tensors. No rank ends a call before what it has sent has arrived.

Bytes that leave a host: all_reduce 2(H-1)/H of the whole, reduce-scatter what the other hosts get, all-gather what the
host has, to each other host; a broadcast goes from host to host, so none sends it twice. Nothing is padded.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .layout import Span, lane_pieces, overlap, spans_of
from .links import Bulk, ConnectionLost, Word
from .reduction import Reduction

if TYPE_CHECKING:
    from .state import HostsGroup

PIECE_BYTES = 1 << 20  # of one lane
_END = 1 << 30  # the index of the last acknowledgement
_TURNS = 5  # pieces of scratch memory
_BEHIND = 3  # how many rounds later a piece is waited for


class Rounds:
    """The pieces of all lanes over some spans, in steps: in each, every rank of this host handles one piece.

    If this host has fewer ranks than there are lanes, it takes several steps for a round of all lanes.
    """

    def __init__(self, t: HostsGroup, spans: Sequence[Span], item: int) -> None:
        self._layout = t.layout
        self._lanes = lane_pieces(spans, t.layout.lanes, max(1, PIECE_BYTES // item))
        self.count = max(map(len, self._lanes)) * t.layout.turns

    def _lane(self, step: int, local: int) -> int:
        return step % self._layout.turns * len(self._layout.mine) + local

    def _piece(self, step: int, local: int) -> Span:
        lane, k = self._lane(step, local), step // self._layout.turns
        if lane >= len(self._lanes) or k >= len(self._lanes[lane]):
            return (0, 0)
        return self._lanes[lane][k]

    def spans(self, step: int) -> list[Span]:
        """The pieces of a step, by local rank; empty ones for ranks without any."""
        return [self._piece(step, local) for local in range(len(self._layout.mine))]

    def mine(self, step: int) -> Span:
        return self._piece(step, self._layout.local)

    def peer(self, step: int, host: int) -> int:
        """The rank of another host that handles this rank's piece of a step."""
        return self._layout.lane_peer(self._lane(step, self._layout.local), host)

    def index(self, step: int) -> int:
        """The number of this rank's piece of a step among all, the same on every host."""
        return step // self._layout.turns * self._layout.lanes + self._lane(step, self._layout.local)

    def steps(self) -> list[int]:
        """The steps in which this rank has a piece."""
        return [step for step in range(self.count) if self.mine(step) != (0, 0)]

    def peers(self, hosts: Sequence[int]) -> list[int]:
        """The ranks of other hosts that handle any of this rank's pieces."""
        return sorted({self.peer(step, host) for step in self.steps() for host in hosts})


def _views(tensor: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    return [tensor[start:end] for start, end in spans]


def all_reduce(t: HostsGroup, bulk: Bulk, source: Tensor, target: Tensor, reduction: Reduction) -> None:
    """Two hosts send each other their partial sums whole, which is as many bytes as halves there and back; of more,
    each reduces one part of every piece and sends it to the others."""
    layout = t.layout
    rounds = Rounds(t, [(0, source.numel())], reduction.partial_dtype.itemsize)
    in_parts = layout.count > 2
    length = _longest(rounds)
    turns = _TURNS * layout.turns
    partials = t.scratch("partials", turns, length, reduction.partial_dtype)
    inbox = t.scratch("inbox", turns * len(layout.others), length, reduction.partial_dtype)
    results = [] if layout.is_alone else t.scratch("results", turns, length, reduction.dtype)
    first: dict[int, list[Word]] = {}
    second: dict[int, list[Word]] = {}

    def result_of(k: int) -> Tensor:
        """Where this lane's piece is put together: on a host with other ranks it is spread from there."""
        start, end = rounds.mine(k)
        return target[start:end] if layout.is_alone else results[k % turns][: end - start]

    def parts(n: int) -> list[Span]:
        """By host: which part of a piece it reduces."""
        edges = [n * h // layout.count for h in range(layout.count + 1)]
        return [(edges[h], edges[h + 1]) if in_parts else (0, n) for h in range(layout.count)]

    def begin(k: int) -> None:
        start, end = rounds.mine(k)
        mine = partials[k % turns][: end - start]
        inputs = [reduction.widened(part) for part in _views(source, rounds.spans(k))]
        t.inside("reduce_scatter", mine, inputs, None, reduction.inside, reduction.inside_factor)
        of_host = parts(end - start)
        own = of_host[layout.host]
        first[k] = []
        for i, host in enumerate(layout.others):
            if own[0] < own[1]:
                into = inbox[k % turns * len(layout.others) + i][: own[1] - own[0]]
                first[k].append(bulk.recv(into, rounds.peer(k, host), 2 * rounds.index(k)))
            a, b = of_host[host]
            if a < b:
                bulk.send(mine[a:b], rounds.peer(k, host), 2 * rounds.index(k))

    def combine(k: int) -> None:
        start, end = rounds.mine(k)
        result = result_of(k)
        of_host = parts(end - start)
        a, b = of_host[layout.host]
        t.await_words(first.pop(k), layout.others)
        second[k] = []
        if a < b:
            by_host = [x[: b - a] for x in inbox[k % turns * len(layout.others) :][: len(layout.others)]]
            by_host.insert(layout.host, partials[k % turns][a:b])
            reduction.combine_hosts(result[a:b], by_host)
        if in_parts:
            for host in layout.others:
                c, d = of_host[host]
                if c < d:
                    second[k].append(bulk.recv(result[c:d], rounds.peer(k, host), 2 * rounds.index(k) + 1))
                if a < b:
                    bulk.send(result[a:b], rounds.peer(k, host), 2 * rounds.index(k) + 1)

    def spread(k: int) -> None:
        t.await_words(second.pop(k), layout.others)
        if not layout.is_alone:
            t.inside("all_gather", _views(target, rounds.spans(k)), result_of(k), None)

    for k in range(rounds.count + 2):
        if k < rounds.count:
            begin(k)
        if 0 <= k - 1 < rounds.count:
            combine(k - 1)
        if k - 2 >= 0:
            spread(k - 2)
    peers = rounds.peers(layout.others)
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
    turns, behind = _TURNS * layout.turns, _BEHIND * layout.turns
    jobs = [
        (host, step)
        for first in range(0, max(r.count for r in by_host), layout.turns)
        for host, r in enumerate(by_host)
        for step in range(first, first + layout.turns)
        if step < r.count
    ]
    length = max(map(_longest, by_host))
    partials = t.scratch("partials", turns, length, reduction.partial_dtype)
    inbox = t.scratch("inbox", turns * len(layout.others), length, reduction.partial_dtype)
    results = t.scratch("results", 1, length, reduction.dtype)
    read: dict[int, tuple[int, Word]] = {}  # by job: the receiver, and the word that says that it has read the piece
    waiting: deque[tuple[int, list[Word]]] = deque()  # jobs of this host, with what they wait for

    def index(job: int) -> int:
        """The number of this rank's piece among those of all hosts, the same on every host."""
        host, step = jobs[job]
        return by_host[host].index(step) * layout.count + host

    def finish() -> None:
        job, words = waiting.popleft()
        host, k = jobs[job]
        start, end = by_host[host].mine(k)
        spans = by_host[host].spans(k)
        t.await_words(words, layout.others)
        parts = [x[: end - start] for x in inbox[job % turns * len(layout.others) :][: len(layout.others)]]
        parts.insert(layout.host, partials[job % turns][: end - start])
        own = chunks[layout.rank]
        # Usually a lane's piece is all its own rank's.
        direct = all(overlap(s, chunks[r]) == s or s[0] == s[1] for s, r in zip(spans, layout.mine, strict=True))
        result = target[start - own[0] : end - own[0]] if direct else results[0][: end - start]
        if start < end:
            reduction.combine_hosts(result, parts)
            for h in layout.others:
                bulk.acknowledge(by_host[host].peer(k, h), index(job))
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
        while waiting and waiting[0][0] <= job - behind:
            finish()
        if job - turns in read:
            t.await_words([read.pop(job - turns)[1]], [jobs[job - turns][0]])
        start, end = by_host[host].mine(k)
        mine = partials[job % turns][: end - start]
        words = []
        if host == layout.host and start < end:
            for i, h in enumerate(layout.others):
                into = inbox[job % turns * len(layout.others) + i][: end - start]
                words.append(bulk.recv(into, by_host[host].peer(k, h), index(job)))
        inputs = [reduction.widened(part) for part in _views(source, by_host[host].spans(k))]
        t.inside("reduce_scatter", mine, inputs, None, reduction.inside, reduction.inside_factor)
        if host == layout.host:
            waiting.append((job, words))
        elif start < end:
            peer = by_host[host].peer(k, host)
            bulk.send(mine, peer, index(job))
            read[job] = (peer, bulk.acknowledgement(peer, index(job)))
    while waiting:
        finish()
    t.await_reading(list(read.values()))


def all_gather(t: HostsGroup, bulk: Bulk, target: Tensor, input: Tensor, counts: Sequence[int]) -> None:
    """Each lane sends its share of what its host has to all others; what comes is spread inside, round by round."""
    layout = t.layout
    chunks = spans_of(counts)
    by_host = [Rounds(t, [chunks[r] for r in ranks], target.element_size()) for ranks in layout.hosts]
    coming = {
        host: {
            k: bulk.recv(target[slice(*by_host[host].mine(k))], by_host[host].peer(k, host), by_host[host].index(k))
            for k in by_host[host].steps()
        }
        for host in layout.others
    }
    here = by_host[layout.host]

    def send(whole: Tensor, first: int) -> None:
        for k in here.steps():
            a, b = here.mine(k)
            for host in layout.others:
                bulk.send(whole[a - first : b - first], here.peer(k, host), here.index(k))

    own = chunks[layout.rank]
    # Usually a lane's share is its own rank's chunk, and can go out before the ranks inside have it.
    at_once = all(overlap(here.mine(k), own) == here.mine(k) for k in here.steps())
    if at_once:
        send(input, own[0])
    t.inside("all_gather", _views(target, [chunks[r] for r in layout.mine]), input, None)
    if not at_once:
        send(target, 0)
    for k in range(max((by_host[h].count for h in layout.others), default=0)):
        for host in layout.others:
            if k < by_host[host].count:
                _spread(t, target, by_host[host], k, coming[host], [host])
    received = {by_host[h].peer(k, h) for h in layout.others for k in coming[h]}
    t.settle(bulk, sorted(received), here.peers(layout.others))


def broadcast(t: HostsGroup, bulk: Bulk, target: Tensor, root: int) -> None:
    """From the root's host to the next, and so on: every host sends it once at most."""
    layout = t.layout
    source = layout.host_of[root]
    rounds = Rounds(t, [(0, target.numel())], target.element_size())
    order = [(source + i) % layout.count for i in range(layout.count)]
    place = order.index(layout.host)
    before, after = order[place - 1] if place else None, order[place + 1] if place + 1 < len(order) else None

    def pass_on(k: int) -> None:
        a, b = rounds.mine(k)
        if after is not None and a < b:
            bulk.send(target[a:b], rounds.peer(k, after), rounds.index(k))

    if before is None:
        if not layout.is_alone:
            t.inside("broadcast", target, layout.mine.index(root), None)
        for k in rounds.steps():
            pass_on(k)
    else:
        coming = {
            k: bulk.recv(target[slice(*rounds.mine(k))], rounds.peer(k, before), rounds.index(k))
            for k in rounds.steps()
        }
        for k in range(rounds.count):
            if k in coming:
                t.await_words([coming[k]], [before])
            pass_on(k)
            _spread(t, target, rounds, k, {}, [])
    received = [] if before is None else rounds.peers([before])
    t.settle(bulk, received, [] if after is None else rounds.peers([after]))


def _longest(rounds: Rounds) -> int:
    return max((rounds.mine(k)[1] - rounds.mine(k)[0] for k in rounds.steps()), default=0)


def _spread(
    t: HostsGroup, target: Tensor, rounds: Rounds, k: int, coming: Mapping[int, Word], hosts: Sequence[int]
) -> None:
    """Has all ranks of this host get the pieces of a step, when this rank's has come."""
    if k in coming:
        t.await_words([coming[k]], hosts)
    if t.layout.is_alone:
        return
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


def settle_words(bulk: Bulk, received: Sequence[int], sent: Sequence[int]) -> dict[int, Word]:
    """Tells the ranks of which something was received; by rank, the words that those sent to will send.

    A rank whose connection is closed is told nothing, and nothing is expected of it: it may have left after this call.
    """
    words = {}
    for peer in sent:
        with contextlib.suppress(ConnectionLost):
            words[peer] = bulk.acknowledgement(peer, _END)
    for peer in received:
        with contextlib.suppress(ConnectionLost):
            bulk.acknowledge(peer, _END)
    return words
