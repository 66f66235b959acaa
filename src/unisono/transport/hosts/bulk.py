"""Large calls: steps inside the hosts by the core, bytes between them in lanes, piece by piece so that both overlap.

Receives are posted long before their turn: the other end sends no data before it hears of them, and that waits behind
all data which this rank has sent on the connection.

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

from ..spans import Span, overlap, spans_of
from .layout import lane_pieces
from .links import Bulk, ConnectionLost, Expected, Word
from .reduction import Reduction

if TYPE_CHECKING:
    from .calling import HostsGroup

_LEAST_PIECE, _LARGEST_PIECE = 1 << 20, 4 << 20  # bytes of one lane
_PIECES = 4  # of a lane, unless they would be shorter or longer than that
_END = 1 << 30  # the index of the last acknowledgement
_TURNS = 5  # pieces of scratch memory of an all_reduce
_AHEAD = 2  # how many steps before its turn what will come for a step of an all_reduce is expected
_BEHIND = 5  # how many pieces later one of this host's own is waited for in a reduce-scatter


def piece_bytes(lane_bytes: int, hosts: int, turns: int) -> int:
    """How long a lane's pieces are: each costs its messages and barriers, but nothing overlaps with a single one.

    ``turns``: lanes of a rank on the smallest host. Scratch memory grows with them and with the hosts.
    """
    largest = max(_LEAST_PIECE, _LARGEST_PIECE // (turns * (hosts - 1)))
    return min(max(-(-lane_bytes // _PIECES), _LEAST_PIECE), largest)


class Rounds:
    """The pieces of all lanes over some spans, in steps: in each, every rank of this host handles one piece.

    If this host has fewer ranks than there are lanes, it takes several steps for a round of all lanes.
    """

    def __init__(self, t: HostsGroup, spans: Sequence[Span], item: int) -> None:
        self._layout = t.layout
        layout = t.layout
        longest = -(-sum(end - start for start, end in spans) // layout.lanes) * item
        piece = piece_bytes(longest, layout.count, layout.most_turns)
        self._lanes = lane_pieces(spans, layout.lanes, -(-piece // item))
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
    _AllReduce(t, bulk, source, target, reduction).run()


class _Reducing:
    """A large call that reduces: its tensors, and scratch memory for partial sums, which is used in turns."""

    def __init__(self, t: HostsGroup, bulk: Bulk, source: Tensor, target: Tensor, reduction: Reduction) -> None:
        self.t, self.bulk, self.source, self.target, self.reduction = t, bulk, source, target, reduction
        self.layout = t.layout

    def _make_scratch(self, length: int, turns: int, inbox_turns: int, results: int) -> None:
        dtype, others = self.reduction.partial_dtype, len(self.layout.others)
        self.turns, self.inbox_turns = turns, inbox_turns
        self.partials = self.t.scratch("partials", turns, length, dtype)
        self.inbox = self.t.scratch("inbox", inbox_turns * others, length, dtype)
        self.results = self.t.scratch("results", results, length, self.reduction.dtype) if results else []

    def _inbox_of(self, k: int, length: int) -> list[Tensor]:
        """By place in ``layout.others``: where a host's part of this host's k-th piece comes."""
        others = len(self.layout.others)
        return [x[:length] for x in self.inbox[k % self.inbox_turns * others :][:others]]


class _AllReduce(_Reducing):
    """A large all_reduce: a step is begun while the one before it is combined and the one before that is spread."""

    def __init__(self, t: HostsGroup, bulk: Bulk, source: Tensor, target: Tensor, reduction: Reduction) -> None:
        super().__init__(t, bulk, source, target, reduction)
        self.rounds = Rounds(t, [(0, source.numel())], reduction.partial_dtype.itemsize)
        self.in_parts = t.layout.count > 2
        turns = _TURNS * t.layout.turns
        self._make_scratch(_longest(self.rounds), turns, turns, 0 if t.layout.is_alone else turns)
        self.partials_coming: dict[int, list[Expected]] = {}
        self.sums_coming: dict[int, list[Expected]] = {}

    def run(self) -> None:
        count = self.rounds.count
        for k in range(min(_AHEAD, count)):
            self._expect(k)
        for k in range(count + 2):
            if k + _AHEAD < count:
                self._expect(k + _AHEAD)
            if k < count:
                self._begin(k)
            if 0 <= k - 1 < count:
                self._combine(k - 1)
            if k - 2 >= 0:
                self._spread(k - 2)
        peers = self.rounds.peers(self.layout.others)
        self.t.settle(self.bulk, peers, peers)

    def _result_of(self, k: int) -> Tensor:
        """Where this lane's piece is put together: on a host with other ranks it is spread from there."""
        start, end = self.rounds.mine(k)
        return self.target[start:end] if self.layout.is_alone else self.results[k % self.turns][: end - start]

    def _parts(self, n: int) -> list[Span]:
        """By host: which part of a piece it reduces."""
        hosts = self.layout.count
        edges = [n * h // hosts for h in range(hosts + 1)]
        return [(edges[h], edges[h + 1]) if self.in_parts else (0, n) for h in range(hosts)]

    def _expect(self, k: int) -> None:
        """Posts the receives of a step: of the others' partial sums, and of the sums if each reduces a part."""
        rounds, layout = self.rounds, self.layout
        start, end = rounds.mine(k)
        of_host = self._parts(end - start)
        a, b = of_host[layout.host]
        result = self._result_of(k)
        partials = self.partials_coming[k] = []
        sums = self.sums_coming[k] = []
        for into, host in zip(self._inbox_of(k, b - a), layout.others, strict=True):
            if a < b:
                partials.append((self.bulk.recv(into, rounds.peer(k, host), 2 * rounds.index(k)), host))
            c, d = of_host[host]
            if self.in_parts and c < d:
                sums.append((self.bulk.recv(result[c:d], rounds.peer(k, host), 2 * rounds.index(k) + 1), host))

    def _begin(self, k: int) -> None:
        """Reduces a step inside, and sends every host its part of the partial sums."""
        rounds, layout, reduction = self.rounds, self.layout, self.reduction
        start, end = rounds.mine(k)
        mine = self.partials[k % self.turns][: end - start]
        inputs = [reduction.widened(part) for part in _views(self.source, rounds.spans(k))]
        self.t.inside("reduce_scatter", mine, inputs, None, reduction.inside, reduction.inside_factor)
        of_host = self._parts(end - start)
        for host in layout.others:
            a, b = of_host[host]
            if a < b:
                self.bulk.send(mine[a:b], rounds.peer(k, host), 2 * rounds.index(k))

    def _combine(self, k: int) -> None:
        """Adds the partial sums of all hosts up; if each host has a part only, the parts are exchanged."""
        rounds, layout = self.rounds, self.layout
        start, end = rounds.mine(k)
        result = self._result_of(k)
        a, b = self._parts(end - start)[layout.host]
        self.t.await_words(self.partials_coming.pop(k))
        if a == b:
            return
        by_host = self._inbox_of(k, b - a)
        by_host.insert(layout.host, self.partials[k % self.turns][a:b])
        self.reduction.combine_hosts(result[a:b], by_host)
        if self.in_parts:
            for host in layout.others:
                self.bulk.send(result[a:b], rounds.peer(k, host), 2 * rounds.index(k) + 1)

    def _spread(self, k: int) -> None:
        self.t.await_words(self.sums_coming.pop(k))
        if not self.layout.is_alone:
            self.t.inside("all_gather", _views(self.target, self.rounds.spans(k)), self._result_of(k), None)


def reduce_scatter(
    t: HostsGroup, bulk: Bulk, source: Tensor, target: Tensor, counts: Sequence[int], reduction: Reduction
) -> None:
    """Piece by piece over all hosts in turns: every host reduces a piece inside and sends it to the host that gets it.

    All hosts take the pieces in the same order, and none is more than a few ahead of what it has received, so the
    scratch memory is small, and no two wait for each other.
    """
    _ReduceScatter(t, bulk, source, target, counts, reduction).run()


class _ReduceScatter(_Reducing):
    """A large reduce-scatter; a *job* is one step of one host's pieces."""

    def __init__(
        self, t: HostsGroup, bulk: Bulk, source: Tensor, target: Tensor, counts: Sequence[int], reduction: Reduction
    ) -> None:
        super().__init__(t, bulk, source, target, reduction)
        self.chunks = spans_of(counts)
        layout, item = t.layout, reduction.partial_dtype.itemsize
        self.by_host = [Rounds(t, [self.chunks[r] for r in ranks], item) for ranks in layout.hosts]
        self.jobs = [
            (host, step)
            for first in range(0, max(r.count for r in self.by_host), layout.turns)
            for host, r in enumerate(self.by_host)
            for step in range(first, first + layout.turns)
            if step < r.count
        ]
        self.own = [job for job, (host, _) in enumerate(self.jobs) if host == layout.host]
        self.behind = _BEHIND * layout.turns
        self.ahead = (_BEHIND // layout.count + 2) * layout.turns  # of this host's jobs whose parts are expected
        self._make_scratch(max(map(_longest, self.by_host)), (_BEHIND + 2) * layout.turns, self.ahead, 1)
        self.expected: deque[list[Expected]] = deque()  # of this host's next jobs: what they wait for
        self.finished = 0  # how many of this host's jobs
        self.read: dict[int, tuple[int, Word]] = {}  # by job: the receiver, and the word that it has read the piece

    def run(self) -> None:
        for k in range(min(self.ahead, len(self.own))):
            self._expect(k)
        for job in range(len(self.jobs)):
            while self.finished < len(self.own) and self.own[self.finished] <= job - self.behind:
                self._finish()
            if job - self.turns in self.read:
                self.t.await_words([(self.read.pop(job - self.turns)[1], self.jobs[job - self.turns][0])])
            self._begin(job)
        while self.finished < len(self.own):
            self._finish()
        self.t.await_reading(list(self.read.values()))

    def _index(self, job: int) -> int:
        """The number of this rank's piece among those of all hosts, the same on every host."""
        host, step = self.jobs[job]
        return self.by_host[host].index(step) * self.layout.count + host

    def _expect(self, k: int) -> None:
        """Posts the receives of this host's k-th job."""
        job = self.own[k]
        host, step = self.jobs[job]
        rounds = self.by_host[host]
        start, end = rounds.mine(step)
        words = []
        if start < end:
            for into, h in zip(self._inbox_of(k, end - start), self.layout.others, strict=True):
                words.append((self.bulk.recv(into, rounds.peer(step, h), self._index(job)), h))
        self.expected.append(words)

    def _begin(self, job: int) -> None:
        """Reduces a piece inside, and sends it unless it is this host's."""
        host, k = self.jobs[job]
        rounds, reduction = self.by_host[host], self.reduction
        start, end = rounds.mine(k)
        mine = self.partials[job % self.turns][: end - start]
        inputs = [reduction.widened(part) for part in _views(self.source, rounds.spans(k))]
        self.t.inside("reduce_scatter", mine, inputs, None, reduction.inside, reduction.inside_factor)
        if host != self.layout.host and start < end:
            peer = rounds.peer(k, host)
            self.bulk.send(mine, peer, self._index(job))
            self.read[job] = (peer, self.bulk.acknowledgement(peer, self._index(job)))

    def _finish(self) -> None:
        """Adds up what has come for the next job of this host, and deals it out inside."""
        number, self.finished = self.finished, self.finished + 1
        job = self.own[number]
        host, k = self.jobs[job]
        layout, rounds, chunks = self.layout, self.by_host[host], self.chunks
        start, end = rounds.mine(k)
        spans = rounds.spans(k)
        self.t.await_words(self.expected.popleft())
        own = chunks[layout.rank]
        # Usually a lane's piece is all its own rank's.
        direct = all(overlap(s, chunks[r]) == s or s[0] == s[1] for s, r in zip(spans, layout.mine, strict=True))
        result = self.target[start - own[0] : end - own[0]] if direct else self.results[0][: end - start]
        if start < end:
            parts = self._inbox_of(number, end - start)
            parts.insert(layout.host, self.partials[job % self.turns][: end - start])
            self.reduction.combine_hosts(result, parts)
            for h in layout.others:
                self.bulk.acknowledge(rounds.peer(k, h), self._index(job))
        if number + self.ahead < len(self.own):
            self._expect(number + self.ahead)
        if not direct:
            self._deal_out(result, start, [overlap(chunks[r], (start, end)) for r in layout.mine], spans)

    def _deal_out(self, result: Tensor, start: int, pieces: Sequence[Span], spans: Sequence[Span]) -> None:
        """Gives each rank of this host what is its own of the pieces that the others have put together."""
        own = self.chunks[self.layout.rank]
        gets = [overlap(own, s) for s in spans]
        self.t.inside(
            "all_to_all",
            [self.target[a - own[0] : b - own[0]] if a < b else self.target[:0] for a, b in gets],
            [result[a - start : b - start] if a < b else result[:0] for a, b in pieces],
            None,
            None,
        )


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
                _spread(t, target, by_host[host], k, coming[host], host)
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
                t.await_words([(coming[k], before)])
            pass_on(k)
            _spread(t, target, rounds, k, {}, layout.host)
    received = [] if before is None else rounds.peers([before])
    t.settle(bulk, received, [] if after is None else rounds.peers([after]))


def _longest(rounds: Rounds) -> int:
    return max((rounds.mine(k)[1] - rounds.mine(k)[0] for k in rounds.steps()), default=0)


def _spread(t: HostsGroup, target: Tensor, rounds: Rounds, k: int, coming: Mapping[int, Word], host: int) -> None:
    """Has all ranks of this host get the pieces of a step, when this rank's has come."""
    if k in coming:
        t.await_words([(coming[k], host)])
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
    words = [(bulk.recv(outputs[r], r, 0), layout.host_of[r]) for r in sources]
    for r in targets:
        bulk.send(inputs[r], r, 0)
    t.inside("all_to_all", [outputs[r] for r in layout.mine], [inputs[r] for r in layout.mine], None, None)
    t.await_words(words)
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
