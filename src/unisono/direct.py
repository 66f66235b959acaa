"""Uneven collectives by send and receive, for gloo: every byte goes once from where it is to where it is wanted.

A call sends one *letter* to each peer and gets one from each: what it was asked for, and the data itself if that is
small. Larger data is posted at the same time, under a tag made of the request's digest, so it only ever meets data of
an equal request. If requests differ, every rank reads so in the letters and raises.

A reduce-scatter receives the chunk of this rank piece by piece from all peers, and combines each piece in rank order
with the core's kernels: the same bits as on a unisono group. While a piece is combined the next ones arrive. The memory
for pieces is at most the size of the output (or ``_LEAST_SCRATCH``, if that is more).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from . import _core
from .agreement import NO_OP, Request, compare
from .composed_work import Driver
from .errors import MismatchError

_ROOM = 4096 - Request.BYTES  # bytes of data in a letter
_PIECE_BYTES = 1 << 20  # measured: smaller pieces cost more in posting, larger ones leave the caches
_PIECES_AHEAD = 2
_LEAST_SCRATCH = 64 << 10
_LETTER_TAGS = 0x6000_0000
_DATA_TAGS = 0x4000_0000


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

    @property
    def pg(self) -> ProcessGroup:
        pg = self._pg()
        assert pg is not None  # the caller of a verb holds it
        return pg

    def all_gather(self, whole: Tensor, part: Tensor, counts: Sequence[int], async_op: bool) -> dist.Work | None:
        chunks = torch.split(whole, list(counts))
        request = Request("all_gather", part.dtype, NO_OP, counts)
        return self._exchange(request, whole, [part] * self.size, chunks, async_op)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        matrix: Sequence[int],
        async_op: bool,
    ) -> dist.Work | None:
        to, source = torch.split(output, list(output_counts)), torch.split(input, list(input_counts))
        return self._exchange(Request("all_to_all", input.dtype, NO_OP, matrix), output, source, to, async_op)

    def _exchange(
        self, request: Request, output: Tensor, sources: Sequence[Tensor], to: Sequence[Tensor], async_op: bool
    ) -> dist.Work | None:
        """Sends ``sources[r]`` to rank r, and receives ``to[r]`` from it."""
        post = self._post(request, sources)
        for peer in reversed(self.peers):
            if to[peer].nbytes > _ROOM:
                post.works.append((peer, post.recv(to[peer], peer)))
        for peer in self.peers:
            if sources[peer].nbytes > _ROOM:
                post.send(sources[peer], peer)

        def finish() -> None:
            post.compare(post.works)
            for peer in self.peers:
                if 0 < to[peer].nbytes <= _ROOM:
                    to[peer].copy_(post.data_from(peer, to[peer]))
            if to[self.rank].data_ptr() != sources[self.rank].data_ptr():
                to[self.rank].copy_(sources[self.rank])
            post.wait()

        return self._end(finish, output, async_op)

    def reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> dist.Work | None:
        _core.combine(part[:0], [part[:0]], op, [factor])  # says whether the op means something for the dtype
        chunks = torch.split(whole, list(counts))
        post = self._post(Request("reduce_scatter", part.dtype, op, counts, factor), chunks)
        sure = []  # what agreeing peers receive even if others disagree
        for peer in self.peers:
            if chunks[peer].nbytes > _ROOM:
                for i, piece in enumerate(torch.split(chunks[peer], self._piece_elements(chunks[peer]))):
                    work = post.send(piece, peer)
                    sure += [(peer, work)] if i < _PIECES_AHEAD else []
        own = chunks[self.rank]
        pieces = _Pieces(self, post, part, own) if part.nbytes > _ROOM and self.peers else None

        def finish() -> None:
            factors = post.compare(sure if pieces is None else [*sure, *pieces.under_way()])
            if pieces is not None:
                pieces.combine(op, factors)
            else:
                inputs = [post.data_from(rank, part) if rank != self.rank else own for rank in range(self.size)]
                _core.combine(part, inputs, op, factors)
            post.wait()

        return self._end(finish, part, async_op)

    def _piece_elements(self, chunk: Tensor) -> int:
        """Elements of a piece of a chunk: the same on sender and receiver."""
        scratch_bytes = max(chunk.nbytes, _LEAST_SCRATCH)
        fitting = scratch_bytes // (_PIECES_AHEAD * (self.size - 1))
        return max(1, min(fitting, _PIECE_BYTES) // chunk.element_size())

    def _post(self, request: Request, sources: Sequence[Tensor]) -> _Post:
        with self._lock:
            self._seq += 1
            return _Post(self, self._seq, request, sources)

    def _end(self, finish: Callable[[], None], output: Tensor, async_op: bool) -> dist.Work | None:
        if async_op:
            return self._driver.see_through(finish, output)
        finish()
        return None


class _Post:
    """The messages of one call. A work is waited for once only: gloo would take a second wait for another message."""

    def __init__(self, direct: Direct, seq: int, request: Request, sources: Sequence[Tensor]) -> None:
        self.direct = direct
        self.pg = direct.pg
        self.seq = seq
        self.request = request
        self.tag = _DATA_TAGS | (int.from_bytes(request.digest[:3], "little") & 0xFFFFF) << 8 | seq & 0xFF
        self.works: list[tuple[int, Any]] = []
        letter_tag = _LETTER_TAGS | seq & 0xFFFFFF
        mine = request.bytes + bytes(_ROOM)
        self.letters = [bytearray(mine) for _ in range(direct.size)]
        self.receipts = [
            self.pg.recv([torch.frombuffer(self.letters[peer], dtype=torch.uint8)], peer, letter_tag)
            for peer in reversed(direct.peers)
        ]
        self.sent = [self.pg.send([_letter(mine, sources[peer])], peer, letter_tag) for peer in direct.peers]

    def data_from(self, peer: int, like: Tensor) -> Tensor:
        """The data in a peer's letter."""
        if not like.numel():
            return like
        return torch.frombuffer(self.letters[peer], dtype=like.dtype, count=like.numel(), offset=Request.BYTES)

    def send(self, tensor: Tensor, peer: int) -> Any:
        work = self.pg.send([tensor], peer, self.tag)
        self.works.append((peer, work))
        return work

    def recv(self, tensor: Tensor, peer: int) -> Any:
        return self.pg.recv([tensor], peer, self.tag)

    def compare(self, sure: Iterable[tuple[int, Any]]) -> list[float]:
        """Reads the letters. Raises if requests differ, after the data has passed that agreeing ranks wait for too."""
        for work in (*self.receipts, *self.sent):
            work.wait()
        try:
            return compare(self.pg, self.seq, self.request, self.letters)
        except MismatchError as error:
            for peer, work in sure:
                if peer not in error.peers:
                    work.wait()
            raise

    def wait(self) -> None:
        for _, work in self.works:
            work.wait()


def _letter(start: bytes, data: Tensor) -> Tensor:
    """A letter with this start, and the data if there is room for it."""
    letter = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    if 0 < data.nbytes <= _ROOM:
        letter[Request.BYTES : Request.BYTES + data.nbytes] = data.view(torch.uint8)
    return letter


class _Pieces:
    """The chunk of this rank on its way in: up to _PIECES_AHEAD pieces per peer are received while one is combined."""

    def __init__(self, direct: Direct, post: _Post, part: Tensor, mine: Tensor) -> None:
        length = direct._piece_elements(part)
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
