"""Uneven collectives by send and receive, for gloo: every byte goes once from where it is to where it is wanted.

A call has one *request* per pair of ranks and then the data, all posted at once. The data's tag comes from the
request's digest, so data only ever meets data of an equal request; when requests differ, every rank sees it in the
requests themselves and raises.

A reduce-scatter receives the chunk of this rank piece by piece from all peers, and combines each piece in rank order
with the core's kernels: the same bits as on a unisono group. While one piece is combined the next ones arrive. The
memory for pieces is at most the size of the output (or ``_LEAST_SCRATCH``, if that is more).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from . import _core
from .agreement import Request, compare, copy_unless_same, spans
from .composed_work import Driver

_PIECE_BYTES = 1 << 20  # measured: smaller pieces cost more in posting, larger ones leave the caches
_PIECES_AHEAD = 2
_LEAST_SCRATCH = 64 << 10
_REQUEST_TAGS = 0x6000_0000
_DATA_TAGS = 0x4000_0000


class _Posted:
    """The sends and receives of one call, with the request that goes before them."""

    def __init__(self, pg: ProcessGroup, seq: int, request: Request) -> None:
        self.pg = pg
        self.seq = seq
        self.request = request
        self.rank = pg.rank()
        self.tag = _DATA_TAGS | (int.from_bytes(request.digest[:3], "little") & 0xFFFFF) << 8 | seq & 0xFF
        self.works: list[tuple[int, Any]] = []
        self.letter = request.tensor()
        self.letters = [
            self.letter if rank == self.rank else torch.empty(Request.BYTES, dtype=torch.uint8)
            for rank in range(pg.size())
        ]
        tag = _REQUEST_TAGS | seq & 0xFFFFFF
        peers = [rank for rank in range(pg.size()) if rank != self.rank]
        self.receipts = [pg.recv([self.letters[peer]], peer, tag) for peer in peers]
        self.sent = [pg.send([self.letter], peer, tag) for peer in peers]

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self.works.append((peer, self.pg.send([tensor], peer, self.tag)))

    def recv(self, tensor: torch.Tensor, peer: int) -> Any:
        return self.pg.recv([tensor], peer, self.tag)

    def compare(self) -> list[float]:
        for work in (*self.receipts, *self.sent):
            work.wait()
        return compare(self.pg, self.seq, self.request, self.letters)

    def wait(self) -> None:
        for _, work in self.works:
            work.wait()


class Direct:
    """The composition of a gloo group."""

    def __init__(self, pg: ProcessGroup) -> None:
        self.pg = pg
        self.rank = pg.rank()
        self.size = pg.size()
        self.driver = Driver()
        self._seq = 0
        self._lock = threading.Lock()

    def _post(self, request: Request) -> _Posted:
        with self._lock:
            self._seq += 1
            return _Posted(self.pg, self._seq, request)

    def _end(self, finish: Callable[[], None], output: torch.Tensor, async_op: bool) -> dist.Work | None:
        if async_op:
            return self.driver.see_through(finish, output)
        finish()
        return None

    def _peers(self) -> list[int]:
        """All other ranks, the next one first, so that not everybody begins with rank 0."""
        return [(self.rank + by) % self.size for by in range(1, self.size)]

    def all_gather(
        self, whole: torch.Tensor, part: torch.Tensor, counts: Sequence[int], async_op: bool
    ) -> dist.Work | None:
        posted = self._post(Request("all_gather", part.dtype, -1, counts))
        edges = spans(counts)
        for peer in reversed(self._peers()):
            if counts[peer]:
                posted.works.append((peer, posted.recv(whole[slice(*edges[peer])], peer)))
        if counts[self.rank]:
            for peer in self._peers():
                posted.send(part, peer)

        def finish() -> None:
            posted.compare()
            copy_unless_same(whole[slice(*edges[self.rank])], part)
            posted.wait()

        return self._end(finish, whole, async_op)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        matrix: Sequence[int],
        async_op: bool,
    ) -> dist.Work | None:
        posted = self._post(Request("all_to_all", input.dtype, -1, matrix))
        to, source = spans(output_counts), spans(input_counts)
        for peer in reversed(self._peers()):
            if output_counts[peer]:
                posted.works.append((peer, posted.recv(output[slice(*to[peer])], peer)))
        for peer in self._peers():
            if input_counts[peer]:
                posted.send(input[slice(*source[peer])], peer)

        def finish() -> None:
            posted.compare()
            copy_unless_same(output[slice(*to[self.rank])], input[slice(*source[self.rank])])
            posted.wait()

        return self._end(finish, output, async_op)

    def _piece(self, count: int, item_bytes: int) -> int:
        """Elements of a piece of a chunk: the same on sender and receiver."""
        scratch_bytes = max(count * item_bytes, _LEAST_SCRATCH)
        room = scratch_bytes // (_PIECES_AHEAD * (self.size - 1) * item_bytes) if self.size > 1 else count
        return max(1, min(room, _PIECE_BYTES // item_bytes, count))

    def reduce_scatter(
        self, part: torch.Tensor, whole: torch.Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> dist.Work | None:
        posted = self._post(Request("reduce_scatter", part.dtype, op, counts, factor))
        edges = spans(counts)
        for peer in self._peers():
            chunk = whole[slice(*edges[peer])]
            if counts[peer]:
                for piece in torch.split(chunk, self._piece(counts[peer], part.element_size())):
                    posted.send(piece, peer)
        count = counts[self.rank]
        pieces = _Pieces(self, posted, part, whole[slice(*edges[self.rank])]) if count else None

        def finish() -> None:
            factors = posted.compare()
            if pieces is not None:
                pieces.combine(op, factors)
            posted.wait()

        return self._end(finish, part, async_op)


class _Pieces:
    """The chunk of this rank on its way in: up to _PIECES_AHEAD pieces per peer are received while one is combined."""

    def __init__(self, direct: Direct, posted: _Posted, part: torch.Tensor, mine: torch.Tensor) -> None:
        length = direct._piece(part.numel(), part.element_size())
        self.posted = posted
        self.outputs = torch.split(part, length)
        self.mine = torch.split(mine, length)
        self.rank = direct.rank
        self.peers = list(reversed(direct._peers()))
        ahead = min(_PIECES_AHEAD, len(self.outputs))
        self.scratch = torch.empty(ahead, direct.size - 1, length, dtype=part.dtype)
        self.under_way: list[tuple[list[torch.Tensor], list[Any]]] = [self._receive(i) for i in range(ahead)]

    def _receive(self, i: int) -> tuple[list[torch.Tensor], list[Any]]:
        """Posts piece i of every peer; returns the tensors by rank, and the works."""
        rows = self.scratch[i % len(self.scratch)]
        length = self.outputs[i].numel()
        tensors = [rows[peer - (peer > self.rank)][:length] for peer in range(len(self.peers) + 1) if peer != self.rank]
        tensors.insert(self.rank, self.mine[i])
        return tensors, [self.posted.recv(tensors[peer], peer) for peer in self.peers]

    def combine(self, op: int, factors: list[float]) -> None:
        for i, output in enumerate(self.outputs):
            tensors, works = self.under_way.pop(0)
            for work in works:
                work.wait()
            _core.combine(output, tensors, op, factors)
            if i + len(self.scratch) < len(self.outputs):
                self.under_way.append(self._receive(i + len(self.scratch)))
