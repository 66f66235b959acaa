"""Uneven collectives by send and receive, for gloo: every byte goes once from where it is to where it is wanted.

A call is an all-to-all of *letters*, which say what each rank was asked for and hold the data itself if that is
small. Larger data is posted at the same time, under a tag made of the request's digest, so it only ever meets data of
an equal request. If requests differ, every rank reads so in the letters and raises.

A second operation of gloo costs more than some ten thousand bytes in the first. So letters are as long as the data of
the call before would have needed, up to ``_MOST_LETTERS`` together: programs repeat themselves, and all ranks know that
call. (After a call on which ranks disagreed, those that have others under way already may not; gloo then ends them.)

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

from . import _core
from .agreement import NO_OP, Request, compare
from .composed_work import Driver
from .errors import MismatchError

_LETTER_BYTES = 4096  # of a letter, at least
_MOST_LETTERS = 1 << 20  # bytes of all letters of a rank that are longer, sent and received
_PIECE_BYTES = 2 << 20  # measured: smaller pieces cost more in posting, larger ones leave the caches
_PIECES_AHEAD = 2
_LEAST_SCRATCH = 64 << 10
_LEAST_RELAY = 1 << 20  # bytes of a chunk from which passing it on in shares pays
_TAGS = 0x4000_0000
_NO_OPTIONS = dist.AllToAllOptions()

Span = tuple[int, int]  # first element, and one after the last


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
        self._letter_bytes = _LETTER_BYTES  # of the next call
        self._lock = threading.Lock()

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
        if self.size == 2 or largest * part.element_size() < _LEAST_RELAY or 2 * largest <= to[-1][1]:
            return self._exchange(request, part, spans, whole, to, largest, async_op)
        # One rank has more than all others together. It sends each of the others a share of its chunk, and they pass
        # the shares on to one another, instead of sending everything to everybody while the others have nothing to do.
        root = counts.index(largest)
        others = [rank for rank in range(self.size) if rank != root]
        edges = [largest * i // len(others) for i in range(len(others) + 1)]
        shares = dict(zip(others, pairwise(edges), strict=True))
        start = to[root][0]
        if self.rank == root:
            spans = [shares.get(rank, spans[root]) for rank in range(self.size)]
            return self._exchange(request, part, spans, whole, to, largest, async_op)
        mine = (start + shares[self.rank][0], start + shares[self.rank][1])
        relay = [(rank, (start + a, start + b)) for rank, (a, b) in shares.items() if rank != self.rank]
        to[root] = mine
        return self._exchange(request, part, spans, whole, to, largest, async_op, (root, mine, relay))

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
        return self._exchange(
            request, input, _spans(input_counts), output, _spans(output_counts), max(matrix), async_op
        )

    def _exchange(
        self,
        request: Request,
        source: Tensor,
        spans: list[Span],
        output: Tensor,
        to: list[Span],
        largest: int,
        async_op: bool,
        relay: tuple[int, Span, list[tuple[int, Span]]] | None = None,
    ) -> dist.Work | None:
        """Sends ``spans[r]`` of the source to rank r, and receives ``to[r]`` of the output from it.

        ``largest`` is as in :meth:`_post`.

        With ``relay``, a root, a span of the output and a list of ranks with spans: passes the span on to those ranks
        when it has come from the root, and receives their spans from them.
        """
        post = self._post(request, source, spans, largest)
        small = post.fitting_elements
        for peer in reversed(self.peers):
            start, end = to[peer]
            if end - start > small:
                post.works.append((peer, post.recv(output[start:end], peer)))
        for peer in self.peers:
            start, end = spans[peer]
            if end - start > small:
                post.works.append((peer, post.send(source[start:end], peer)))
        passed_on = [(peer, post.recv(output[start:end], peer)) for peer, (start, end) in (relay[2] if relay else ())]

        def finish() -> None:
            post.compare(post.works)
            for peer in self.peers:
                start, end = to[peer]
                if start < end <= start + small:
                    post.copy_data(peer, output, start, end)
            (start, end), (own, own_end) = to[self.rank], spans[self.rank]
            mine = output[start:end]
            if mine.data_ptr() != source.data_ptr() + own * source.element_size():
                mine.copy_(source[own:own_end])
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
        post = self._post(Request("reduce_scatter", part.dtype, op, counts, factor), whole, spans, max(counts))
        small = post.fitting_elements
        sure = []  # what agreeing peers receive even if others disagree
        for peer in self.peers:
            start, end = spans[peer]
            if end - start > small:
                length = self._piece_elements(end - start, part.element_size())
                for i, piece in enumerate(torch.split(whole[start:end], length)):
                    post.works.append((peer, post.send(piece, peer)))
                    if i < _PIECES_AHEAD:
                        sure.append(post.works[-1])
        start, end = spans[self.rank]
        own = whole[start:end]
        pieces = _Pieces(self, post, part, own) if part.numel() > small and self.peers else None

        def finish() -> None:
            factors = post.compare(sure if pieces is None else [*sure, *pieces.under_way()])
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

    def _post(self, request: Request, source: Tensor, spans: list[Span], largest: int) -> _Post:
        """Sends the letters; ``largest`` are the most elements that any rank sends to another."""
        with self._lock:
            self._seq += 1
            letter = self._letter_bytes
            self._letter_bytes = self._letter_for(largest * source.element_size())
            return _Post(self, self._seq, request, source, spans, letter)

    def _letter_for(self, data_bytes: int) -> int:
        letter = _LETTER_BYTES
        while letter < data_bytes + Request.BYTES:
            letter *= 4
        return letter if 2 * self.size * letter <= _MOST_LETTERS else _LETTER_BYTES

    def _end(self, finish: Callable[[], None], output: Tensor, async_op: bool) -> dist.Work | None:
        if async_op:
            return self._driver.see_through(finish, output)
        finish()
        return None


class _Post:
    """The messages of one call. A work is waited for once only: gloo would take a second wait for another message."""

    def __init__(
        self, direct: Direct, seq: int, request: Request, source: Tensor, spans: list[Span], letter_bytes: int
    ) -> None:
        self.direct = direct
        self.pg = direct.pg
        self.seq = seq
        self.request = request
        self.tag = _TAGS | (int.from_bytes(request.digest[:3], "little") & 0xFFFFF) << 8 | seq & 0xFF
        self.works: list[tuple[int, Any]] = []
        item_bytes = source.element_size()
        self.letter_bytes = letter_bytes
        self.fitting_elements = (letter_bytes - Request.BYTES) // item_bytes  # what goes into the letter
        sent = torch.zeros(direct.size * letter_bytes, dtype=torch.uint8)
        # Raw copies: a few operations of torch per peer would cost as much as the message.
        first, letter = source.data_ptr(), sent.data_ptr()
        for start, end in spans:
            memmove(letter, request.bytes, Request.BYTES)
            if start < end <= start + self.fitting_elements:
                memmove(letter + Request.BYTES, first + start * item_bytes, (end - start) * item_bytes)
            letter += letter_bytes
        self.letters = torch.empty_like(sent)
        self.delivery = self.pg.alltoall_base(self.letters, sent, [], [], _NO_OPTIONS)

    def _place_of(self, rank: int) -> int:
        return self.letters.data_ptr() + rank * self.letter_bytes

    def copy_data(self, peer: int, output: Tensor, start: int, end: int) -> None:
        """Puts the data in a peer's letter into a span of the output."""
        item_bytes = output.element_size()
        source = self._place_of(peer) + Request.BYTES
        memmove(output.data_ptr() + start * item_bytes, source, (end - start) * item_bytes)

    def data_from(self, peer: int, like: Tensor) -> Tensor:
        """The data in a peer's letter."""
        start = peer * self.letter_bytes + Request.BYTES
        return self.letters[start : start + like.nbytes].view(like.dtype)

    def send(self, tensor: Tensor, peer: int) -> Any:
        return self.pg.send([tensor], peer, self.tag)

    def recv(self, tensor: Tensor, peer: int) -> Any:
        return self.pg.recv([tensor], peer, self.tag)

    def compare(self, sure: Iterable[tuple[int, Any]]) -> list[float]:
        """Reads the letters. Raises if requests differ, after the data has passed that agreeing ranks wait for too."""
        self.delivery.wait()
        requests = [string_at(self._place_of(rank), Request.BYTES) for rank in range(self.direct.size)]
        try:
            return compare(self.pg, self.seq, self.request, requests)
        except MismatchError as error:
            with self.direct._lock:
                if self.direct._seq == self.seq:  # else a later call has set it
                    self.direct._letter_bytes = _LETTER_BYTES
            for peer, work in sure:
                if peer not in error.peers:
                    work.wait()
            raise

    def wait(self, only: int | None = None) -> None:
        """Waits for the messages under way, to and from all peers or one."""
        waiting, self.works = self.works, [] if only is None else [pair for pair in self.works if pair[0] != only]
        for peer, work in waiting:
            if only is None or peer == only:
                work.wait()


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
        self.scratch = torch.empty(ahead, direct.size - 1, length, dtype=part.dtype)
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
