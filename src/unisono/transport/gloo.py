"""Uneven collectives by send and receive, for gloo: every byte goes once from where it is to where it is wanted.

In a call each rank sends each other a *letter*, which says what it was asked for and holds the data itself if that is
small. Larger data is sent beside it, under a tag made of the request's digest, so it only ever meets data of an equal
request. If requests differ, every rank reads so in the letters and raises.

Of two ranks the lower one writes first and the higher one answers. When both write at once, gloo's thread may find the
connection locked by a sender that it has itself displaced from the CPU, and tries again until its time slice ends.

A reduce-scatter receives the chunk of this rank piece by piece from all peers, and combines each piece in rank order
with the core's kernels: the same bits as on a unisono group. While a piece is combined the next ones arrive. The memory
for pieces is at most the size of the output (or ``_LEAST_SCRATCH``, if that is more).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from ctypes import memmove, string_at
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import _core
from ..base.errors import MismatchError
from .agreement import NO_OP, Request, compare
from .composed_work import Driver

_LETTERS_BYTES = 1 << 20  # of all letters of a call to and from a rank
_GATHER_BYTES = 8 << 20  # the same in an all-gather, where they are together not more than the output
_LEAST_LETTER = 4 << 10  # of one letter, however many ranks there are
_PIECE_BYTES = 2 << 20  # measured: smaller pieces cost more in posting, larger ones leave the caches
_PIECES_AHEAD = 2
_LEAST_SCRATCH = 1 << 20
_LEAST_RELAY = 1 << 20  # bytes of a chunk from which passing it on in shares pays
_TAGS = 0x4000_0000
_LETTER_TAGS = 0x2000_0000

Span = tuple[int, int]  # first element, and one after the last
Cut = Callable[[Tensor], Sequence[Tensor]]  # a chunk into the messages it is sent in


class Direct:
    """The composition of a gloo group."""

    def __init__(self, pg: ProcessGroup) -> None:
        self._pg = weakref.ref(pg)  # what is kept for a group must not keep the group
        self.rank = pg.rank()
        self.size = pg.size()
        # The next rank first, so that not everybody begins with rank 0.
        self.peers = [(self.rank + by) % self.size for by in range(1, self.size)]
        self._driver = Driver()
        self._seq = 0
        self._lock = threading.Lock()
        links = max(1, 2 * len(self.peers))
        self.letter_bytes = max(_LEAST_LETTER, _LETTERS_BYTES // links & -_LEAST_LETTER)
        self.most_bytes = max(_LEAST_LETTER, _GATHER_BYTES // links & -_LEAST_LETTER)
        self._papers: list[Tensor] = []  # for letters; kept, since fresh memory would cost a page fault every 4 KiB

    @property
    def pg(self) -> ProcessGroup:
        pg = self._pg()
        assert pg is not None  # the caller of a verb holds it
        return pg

    def all_gather(self, whole: Tensor, part: Tensor, counts: Sequence[int], async_op: bool) -> dist.Work | None:
        request = Request("all_gather", part.dtype, NO_OP, counts)
        to = _spans(counts)
        spans = [(0, part.numel())] * self.size
        largest = max(counts)
        if self.size <= 2 or largest * part.element_size() < _LEAST_RELAY or 2 * largest <= to[-1][1]:
            return self._exchange(request, part, spans, whole, to, self.most_bytes, async_op)
        # One rank has more than all others together. It sends each of the others a share of its chunk, and they pass
        # the shares on to one another, instead of sending everything to everybody while the others have nothing to do.
        root = counts.index(largest)
        others = [rank for rank in range(self.size) if rank != root]
        edges = [largest * i // len(others) for i in range(len(others) + 1)]
        shares = dict(zip(others, pairwise(edges), strict=True))
        start = to[root][0]
        if self.rank == root:
            spans = [shares.get(rank, spans[root]) for rank in range(self.size)]
            return self._exchange(request, part, spans, whole, to, self.most_bytes, async_op)
        mine = (start + shares[self.rank][0], start + shares[self.rank][1])
        relay = [(rank, (start + a, start + b)) for rank, (a, b) in shares.items() if rank != self.rank]
        to[root] = mine
        return self._exchange(request, part, spans, whole, to, self.most_bytes, async_op, (root, mine, relay))

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        matrix: Sequence[int],
        async_op: bool,
    ) -> dist.Work | None:
        request = Request("all_to_all", input.dtype, NO_OP, matrix)
        spans, to = _spans(input_counts), _spans(output_counts)
        return self._exchange(request, input, spans, output, to, self.letter_bytes, async_op)

    def _exchange(
        self,
        request: Request,
        source: Tensor,
        spans: list[Span],
        output: Tensor,
        to: list[Span],
        room: int,
        async_op: bool,
        relay: tuple[int, Span, list[tuple[int, Span]]] | None = None,
    ) -> dist.Work | None:
        """Sends ``spans[r]`` of the source to rank r, and receives ``to[r]`` of the output from it.

        With ``relay``, a root, a span of the output and a list of ranks with spans: passes the span on to those ranks
        when it has come from the root, and receives their spans from them.
        """
        post = self._post(request, source, spans, room, lambda chunk: (chunk,), async_op)
        small = post.fitting_elements
        receiving = [
            (peer, post.recv(output[start:end], peer))
            for peer in reversed(self.peers)
            for start, end in (to[peer],)
            if end - start > small
        ]
        post.works += receiving
        passed_on = [(peer, post.recv(output[start:end], peer)) for peer, (start, end) in (relay[2] if relay else ())]
        post.finish_posting()

        def finish() -> None:
            (start, end), own = to[self.rank], spans[self.rank][0]
            _copy(output, start, end, source.data_ptr() + own * source.element_size())  # while letters are on their way
            post.compare(receiving)
            for peer in self.peers:
                start, end = to[peer]
                if start < end <= start + small:
                    _copy(output, start, end, post.data_place(peer))
            if relay is not None:
                root, (start, end), peers = relay
                post.wait(root)
                post.works += [(peer, post.send(output[start:end], peer)) for peer, _ in peers]
                post.works += passed_on
            post.wait()

        return self._end(finish, output, async_op)

    def reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> dist.Work | None:
        _core.combine(part[:0], [part[:0]], op, [factor])  # says whether the op means something for the dtype
        spans = _spans(counts)
        request = Request("reduce_scatter", part.dtype, op, counts, factor)
        item_bytes = part.element_size()

        def cut(chunk: Tensor) -> Sequence[Tensor]:
            return torch.split(chunk, self._piece_elements(chunk.numel(), item_bytes))

        post = self._post(request, whole, spans, self.letter_bytes, cut, async_op)
        small = post.fitting_elements
        start, end = spans[self.rank]
        own = whole[start:end]
        pieces = _Pieces(self, post, part, own) if part.numel() > small and self.peers else None
        post.finish_posting()

        def finish() -> None:
            factors = post.compare([] if pieces is None else pieces.under_way())
            if pieces is not None:
                pieces.combine(op, factors)
            else:
                inputs = [post.data_from(rank, part) if rank != self.rank else own for rank in range(self.size)]
                _core.combine(part, inputs, op, factors)
            post.wait()

        return self._end(finish, part, async_op)

    def _piece_elements(self, elements: int, item_bytes: int) -> int:
        """Elements of a piece of a chunk: the same on sender and receiver."""
        scratch_bytes = max(elements * item_bytes, _LEAST_SCRATCH)
        fitting = scratch_bytes // (_PIECES_AHEAD * (self.size - 1))
        return max(1, min(fitting, _PIECE_BYTES) // item_bytes)

    def _post(self, request: Request, source: Tensor, spans: list[Span], room: int, cut: Cut, async_op: bool) -> _Post:
        with self._lock:
            self._seq += 1
            seq = self._seq
        return _Post(self, seq, request, source, spans, room, cut, async_op)

    def paper(self) -> Tensor:
        """Memory for a letter, of the longest kind: what a peer will write is not known."""
        try:
            return self._papers.pop()
        except IndexError:
            return torch.empty(self.most_bytes, dtype=torch.uint8, device="cpu")

    def take_back(self, papers: list[Tensor]) -> None:
        self._papers += papers[: max(0, 2 * len(self.peers) - len(self._papers))]

    def _end(self, finish: Callable[[], None], output: Tensor, async_op: bool) -> dist.Work | None:
        if async_op:
            return self._driver.see_through(finish, output)
        finish()
        return None


class _Post:
    """The messages of one call. A work is waited for once only: gloo would take a second wait for another message."""

    def __init__(
        self,
        direct: Direct,
        seq: int,
        request: Request,
        source: Tensor,
        spans: list[Span],
        room: int,
        cut: Cut,
        at_once: bool,
    ) -> None:
        self.direct = direct
        self.pg = direct.pg
        self.seq = seq
        self.request = request
        self.source = source
        self.spans = spans
        self.cut = cut
        # An equal request has another tag in every other call: what a call has given up must never meet a later one.
        self.tag = _TAGS | (int.from_bytes(request.digest[:4], "little") + seq * 0x9E37_79B1) & 0x3FFF_FFFF
        self.letter_tag = _LETTER_TAGS | seq & 0xFF_FFFF
        self.fitting_elements = (room - Request.BYTES) // source.element_size()
        self.works: list[tuple[int, Any]] = []
        self.sure: list[tuple[int, Any]] = []  # sends that an agreeing peer receives even if others disagree
        self.letters: dict[Span, Tensor] = {}
        self.sent: list[Any] = []
        self.received: dict[int, tuple[Tensor, Any]] = {}
        # First what others wait for. An asynchronous call answers before it is asked: later there may be no thread of
        # Python's free to do so.
        self.answered = at_once
        for peer in direct.peers:
            if peer > direct.rank:
                self._write(peer)
                self._send_data(peer)
            elif at_once:
                self._write(peer)
        for peer in direct.peers:
            paper = direct.paper()
            self.received[peer] = (paper, self.pg.recv([paper], peer, self.letter_tag))

    def finish_posting(self) -> None:
        """To be called when all is posted that is to be received."""
        for peer in self.direct.peers:
            if peer < self.direct.rank:
                self._send_data(peer)

    def _write(self, peer: int) -> None:
        start, end = self.spans[peer]
        if end - start > self.fitting_elements:
            start = end = 0
        data_bytes = (end - start) * self.source.element_size()
        letter = self.letters.get((start, end))
        if letter is None:
            # Raw copies: operations of torch would cost as much as the message.
            letter = self.letters[start, end] = self.direct.paper()
            place, data = letter.data_ptr(), self.source.data_ptr() + start * self.source.element_size()
            memmove(place, self.request.bytes, Request.BYTES)
            memmove(place + Request.BYTES, data, data_bytes)
        self.sent.append(self.pg.send([letter[: Request.BYTES + data_bytes]], peer, self.letter_tag))

    def _send_data(self, peer: int) -> None:
        start, end = self.spans[peer]
        if end - start > self.fitting_elements:
            works = [(peer, self.send(piece, peer)) for piece in self.cut(self.source[start:end])]
            self.works += works
            self.sure += works[:_PIECES_AHEAD]

    def data_place(self, peer: int) -> int:
        """Where the data in a peer's letter is."""
        return self.received[peer][0].data_ptr() + Request.BYTES

    def data_from(self, peer: int, like: Tensor) -> Tensor:
        """The data in a peer's letter."""
        return self.received[peer][0][Request.BYTES : Request.BYTES + like.nbytes].view(like.dtype)

    def send(self, tensor: Tensor, peer: int) -> Any:
        return self.pg.send([tensor], peer, self.tag)

    def recv(self, tensor: Tensor, peer: int) -> Any:
        return self.pg.recv([tensor], peer, self.tag)

    def compare(self, receiving: Iterable[tuple[int, Any]]) -> list[float]:
        """Reads the letters and answers them. Raises if requests differ, but not before the data has passed that
        agreeing ranks have asked each other for already: ``receiving`` is what this one has."""
        requests = [self.request.bytes] * self.direct.size
        for peer in sorted(self.received):
            letter, work = self.received[peer]
            work.wait()
            requests[peer] = string_at(letter.data_ptr(), Request.BYTES)
            if peer < self.direct.rank and not self.answered:
                self._write(peer)
        try:
            return compare(self.pg, self.seq, self.request, requests)
        except MismatchError as error:
            for peer, work in (*receiving, *self.sure):
                if peer not in error.peers:
                    work.wait()
            self._end_letters()
            raise

    def _end_letters(self) -> None:
        for work in self.sent:
            work.wait()
        self.direct.take_back([*self.letters.values(), *(letter for letter, _ in self.received.values())])

    def wait(self, only: int | None = None) -> None:
        """Waits for the messages under way, to and from all peers or one. After all, the letters are used again."""
        waiting, self.works = self.works, [] if only is None else [pair for pair in self.works if pair[0] != only]
        for peer, work in waiting:
            if only is None or peer == only:
                work.wait()
        if only is None:
            self._end_letters()


def _copy(output: Tensor, start: int, end: int, place: int) -> None:
    """Puts what is in memory at ``place`` into a span of the output, unless it is there already."""
    item_bytes = output.element_size()
    to = output.data_ptr() + start * item_bytes
    if to != place:
        memmove(to, place, (end - start) * item_bytes)


def _spans(counts: Sequence[int]) -> list[Span]:
    ends = list(accumulate(counts))
    return list(zip([0, *ends], ends, strict=False))


class _Pieces:
    """The chunk of this rank on its way in: up to _PIECES_AHEAD pieces per peer are received while one is combined."""

    def __init__(self, direct: Direct, post: _Post, part: Tensor, mine: Tensor) -> None:
        length = direct._piece_elements(part.numel(), part.element_size())
        self.direct = direct
        self.post = post
        self.outputs = torch.split(part, length)
        self.mine = torch.split(mine, length)
        ahead = min(_PIECES_AHEAD, len(self.outputs))
        self.scratch = torch.empty(ahead, direct.size - 1, length, dtype=part.dtype, device="cpu")
        self.waiting = deque(self._receive(i) for i in range(ahead))

    def _receive(self, i: int) -> tuple[list[Tensor], list[tuple[int, Any]]]:
        """Posts piece i of every peer; returns the tensors by rank, and the works."""
        length = self.outputs[i].numel()
        tensors = [row[:length] for row in self.scratch[i % len(self.scratch)]]
        tensors.insert(self.direct.rank, self.mine[i])
        return tensors, [(p, self.post.recv(tensors[p], p)) for p in reversed(self.direct.peers)]

    def under_way(self) -> list[tuple[int, Any]]:
        return [pair for _, works in self.waiting for pair in works]

    def combine(self, op: int, factors: list[float]) -> None:
        for i, output in enumerate(self.outputs):
            tensors, works = self.waiting.popleft()
            for _, work in works:
                work.wait()
            _core.combine(output, tensors, op, factors)
            if i + len(self.scratch) < len(self.outputs):
                self.waiting.append(self._receive(i + len(self.scratch)))
