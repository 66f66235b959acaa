"""Backends whose list forms take unequal tensors (nccl, hccl, xccl), and torch_npu's own uneven calls if there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base import ops
from ..base.handle import Handle
from .backend import BackendTransport, all_gather_single, handle_or_none


class ListsTransport(BackendTransport):
    """A backend whose list forms take unequal tensors."""

    def _all_gather(
        self, whole: Tensor, part: Tensor, counts: Sequence[int], result: Any, async_op: bool
    ) -> Handle | None:
        self._compare("all_gather", part.dtype, counts=counts)
        if len(set(counts)) == 1:
            works = [all_gather_single(whole, part, self.pg, async_op)]
        else:
            works = [dist.all_gather(list(torch.split(whole, list(counts))), part, group=self.pg, async_op=async_op)]
        return handle_or_none("all_gather", works, result, async_op)

    def _reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, result: Any, async_op: bool
    ) -> Handle | None:
        self._compare("reduce_scatter", part.dtype, op, counts, factor)
        chunks = list(torch.split(whole, list(counts)))
        works = [dist.reduce_scatter(part, chunks, ops.for_torch(op, factor), group=self.pg, async_op=async_op)]
        return handle_or_none("reduce_scatter", works, result, async_op)


class AscendTransport(BackendTransport):
    """hccl with a torch_npu that has the uneven calls itself."""

    CALLS = ("all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven")

    def __init__(self, pg: ProcessGroup, native: Any) -> None:
        super().__init__(pg)
        self.native = native

    def _all_gather(
        self, whole: Tensor, part: Tensor, counts: Sequence[int], result: Any, async_op: bool
    ) -> Handle | None:
        self._compare("all_gather", part.dtype, counts=counts)
        work = self.native.all_gather_into_tensor_uneven(
            whole, part, output_split_sizes=list(counts), group=self.pg, async_op=async_op
        )
        return handle_or_none("all_gather", [work], result, async_op)

    def _reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, result: Any, async_op: bool
    ) -> Handle | None:
        self._compare("reduce_scatter", part.dtype, op, counts, factor)
        work = self.native.reduce_scatter_tensor_uneven(
            part, whole, input_split_sizes=list(counts), op=ops.for_torch(op, factor), group=self.pg, async_op=async_op
        )
        return handle_or_none("reduce_scatter", [work], result, async_op)
