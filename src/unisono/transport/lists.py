"""Backends whose list forms take unequal tensors (nccl, hccl, xccl), and torch_npu's own uneven calls if there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base import ops
from ..base.handle import Pending
from .backend import BackendTransport, pending_works


class ListsTransport(BackendTransport):
    """A backend whose list forms take unequal tensors."""

    def _all_gather(self, whole: Tensor, part: Tensor, counts: Sequence[int], async_op: bool) -> Pending | None:
        if len(set(counts)) == 1:
            work = dist.all_gather_single(whole, part, self.pg, async_op)
        else:
            work = dist.all_gather(list(torch.split(whole, list(counts))), part, self.pg, async_op)
        return pending_works([work], async_op)

    def _reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> Pending | None:
        chunks = list(torch.split(whole, list(counts)))
        work = dist.reduce_scatter(part, chunks, ops.for_torch(op, factor), self.pg, async_op)
        return pending_works([work], async_op)


class AscendTransport(BackendTransport):
    """hccl with a torch_npu that has the uneven calls itself."""

    CALLS = ("all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven")

    def __init__(self, pg: ProcessGroup, native: Any) -> None:
        super().__init__(pg)
        self.native = native

    def _all_gather(self, whole: Tensor, part: Tensor, counts: Sequence[int], async_op: bool) -> Pending | None:
        work = self.native.all_gather_into_tensor_uneven(
            whole, part, output_split_sizes=list(counts), group=self.pg, async_op=async_op
        )
        return pending_works([work], async_op)

    def _reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> Pending | None:
        work = self.native.reduce_scatter_tensor_uneven(
            part, whole, input_split_sizes=list(counts), op=ops.for_torch(op, factor), group=self.pg, async_op=async_op
        )
        return pending_works([work], async_op)
