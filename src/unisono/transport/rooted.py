"""Any backend of which nothing is known but broadcast and reduce: one of them per rank, all under way at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base import ops
from ..base.handle import Handle
from .backend import BackendTransport, check_reduction, divide, handle_or_none

_PIECE_BYTES = 4 << 20  # of a chunk that has to be copied before a reduce that would overwrite it


class RootedTransport(BackendTransport):
    """A backend with rooted calls.

    A backend's reduce may use the tensors of the other ranks as its scratch (gloo's does). Unless it is known to keep
    them, and for PREMUL_SUM, chunks are copied piece by piece before they are reduced, one after the other.
    """

    def __init__(self, pg: ProcessGroup, keeps_input: bool) -> None:
        super().__init__(pg)
        self.keeps_input = keeps_input

    def _all_gather(
        self, whole: Tensor, part: Tensor, counts: Sequence[int], result: Any, async_op: bool
    ) -> Handle | None:
        self._compare("all_gather", part.dtype, counts=counts)
        chunks = torch.split(whole, list(counts))
        if chunks[self.rank].data_ptr() != part.data_ptr():
            chunks[self.rank].copy_(part)
        works = [
            dist.broadcast(chunk, group_src=root, group=self.pg, async_op=True)
            for root, chunk in enumerate(chunks)
            if chunk.numel()
        ]
        return handle_or_none("all_gather", works, result, async_op, wait=True)

    def _reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, result: Any, async_op: bool
    ) -> Handle | None:
        check_reduction(part, op)
        self._compare("reduce_scatter", part.dtype, op, counts, factor)
        premul = op == ops.PREMUL_SUM
        copies = premul or not self.keeps_input
        torch_op = ops.for_torch(ops.SUM if premul or op == ops.AVG else op, 1.0)
        works = []
        for root, chunk in enumerate(torch.split(whole, list(counts))):
            if root == self.rank:
                if part.data_ptr() != chunk.data_ptr():
                    part.copy_(chunk)
                if premul:
                    part.mul_(factor)
                chunk = part
            length = max(1, _PIECE_BYTES // chunk.element_size()) if copies else max(1, chunk.numel())
            for piece in torch.split(chunk, length) if chunk.numel() else ():
                if copies and root != self.rank:
                    piece = piece * factor if premul else piece.clone()
                work = dist.reduce(piece, group_dst=root, op=torch_op, group=self.pg, async_op=True)
                if copies:
                    work.wait()
                else:
                    works.append(work)
        after = (lambda: divide(part, self.size)) if op == ops.AVG else None
        return handle_or_none("reduce_scatter", works, result, async_op, after, wait=True)
