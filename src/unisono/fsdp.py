"""FSDP2 on unisono: its communication buffers in shared memory, and its padding left where it is.

FSDP2 gathers and reduces buffers of one row per rank, in which every parameter has room for the largest shard. Shards
are rows of dimension 0; where they do not divide, the last ranks have fewer, and the room that is left is padding:

    a parameter of 4 rows, then one of 3, on 3 ranks      rank 0   a a b
                                                          rank 1   a a b
                                                          rank 2   . . b

Nobody reads it. A *run* is a stretch of parameters that travel in one call, without the padding at its end. Every run
costs a call, so a row is cut only behind parameters with much padding.

Imported when ``unisono.fsdp`` is first used, since it brings in all of FSDP.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
)

from .base.work import Work
from .group import names as groups

Model = TypeVar("Model", bound=nn.Module)

#: Padding of all ranks together that takes longer to copy than a call of its own.
WORTH_A_CALL_BYTES = 256 << 10


def use_shared_memory(model: Model, enable: bool = True) -> Model:
    """Has every ``fully_shard``-ed part of a model take its buffers from its process group; returns the model::

        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        unisono.fsdp.use_shared_memory(fully_shard(model, mesh=mesh))

    It calls FSDP2's own ``set_allocate_memory_from_process_group_for_comm``, which works on one module and not on those
    inside it. What is gathered is then written once, into the buffer the layer's parameters are taken from, and
    gradients are reduced straight from where they are collected. Parts whose group is on another backend stay as
    they are. Parameters need not be in shared memory themselves.

    Parts with much padding get an all-gather and a reduce-scatter that leave it out; parameters and gradients have the
    same bits as with it.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        raise ValueError(
            "use_shared_memory takes a model that fully_shard was called on, got one without any FSDPModule"
        )
    backends = set()
    for part in parts:
        for param_group in part._get_fsdp_state()._fsdp_param_groups:
            process_group = param_group._all_gather_process_group
            backends.add(process_group.name())
            if groups.native(process_group) is not None:
                param_group.set_allocate_memory_from_process_group(enable)
                if enable and sum(map(_padding, param_group.fsdp_params)) >= WORTH_A_CALL_BYTES:
                    _leave_padding_out(param_group)
    if backends and "unisono" not in backends:
        raise ValueError(f"Expected process groups on unisono, got {', '.join(sorted(backends))}")
    return model


def padding_bytes(part: FSDPModule) -> int:
    """Padding of all ranks together in the buffers of one module that ``fully_shard`` was called on."""
    param_groups = part._get_fsdp_state()._fsdp_param_groups
    return sum(_padding(param) for param_group in param_groups for param in param_group.fsdp_params)


class Run(NamedTuple):
    """Parameters that travel together: where they begin in a row, and how far each rank's elements go."""

    begin: int
    counts: list[int]


class AllGather(ProcessGroupAllocAllGather):
    """Gathers what the ranks have; the padding of the others is not written."""

    def __init__(self, group: dist.ProcessGroup, params: Sequence[Any]) -> None:
        super().__init__(group)
        self._runs, self._width = _runs(params), _width(params)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        # Another width: parameters of several dtypes as bytes, or shards of the smaller group of reshard_after_forward.
        if input_tensor.numel() != self._width or output_tensor.numel() != self._width * len(self._runs[0].counts):
            return super().__call__(output_tensor, input_tensor, group, async_op)
        rows = output_tensor.view(-1, self._width)
        rank = group.rank()
        works = []
        for begin, counts in self._runs:
            outputs = [row[begin : begin + count] for row, count in zip(rows, counts, strict=True)]
            works.append(dist.all_gather(outputs, outputs[rank], group, async_op))
        return Work.joined(works) if async_op else None


class ReduceScatter(ProcessGroupAllocReduceScatter):
    """Reduces what will be read; this rank's padding is zero, as it is where padding is reduced."""

    def __init__(self, group: dist.ProcessGroup, params: Sequence[Any]) -> None:
        super().__init__(group)
        self._params = params
        self._width = -1
        self._runs: list[Run] = []
        self._trained: list[bool] = []

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        trained = [param.sharded_param.requires_grad for param in self._params]
        if trained != self._trained:  # the first call, or other parameters are frozen now
            self._trained = trained
            params = list(itertools.compress(self._params, trained))
            self._width, self._runs = _width(params), _runs(params)
        if output_tensor.numel() != self._width:  # some got no gradient, and which ones is not told
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        rows = input_tensor.view(-1, self._width)
        rank = group.rank()
        works = []
        ends = [run.begin for run in self._runs[1:]] + [self._width]
        for (begin, counts), end in zip(self._runs, ends, strict=True):
            inputs = [row[begin : begin + count] for row, count in zip(rows, counts, strict=True)]
            output_tensor[begin + counts[rank] : end].zero_()
            works.append(dist.reduce_scatter(output_tensor[begin : begin + counts[rank]], inputs, op, group, async_op))
        return Work.joined(works) if async_op else None


def _leave_padding_out(param_group: Any) -> None:
    params = param_group.fsdp_params
    # A tensor with a way of its own to be gathered decides itself what the buffer holds.
    if not any(hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in params):
        param_group._all_gather_comm = AllGather(param_group._all_gather_process_group, params)
    param_group._reduce_scatter_comm = ReduceScatter(param_group._reduce_scatter_process_group, params)


def _counts(param: Any) -> list[int]:
    """The elements of a parameter that each rank has; rank 0 has as many as there is room for."""
    room, size = param.padded_sharded_param_size.numel(), getattr(param.mesh_info, "shard_mesh_size", 1)
    whole = math.prod(param._orig_size)
    return [min(max(whole - rank * room, 0), room) for rank in range(size)]


def _padding(param: Any) -> int:
    counts = _counts(param)
    return int((counts[0] * len(counts) - sum(counts)) * param.sharded_param.dtype.itemsize)


def _width(params: Sequence[Any]) -> int:
    return sum(_counts(param)[0] for param in params)


def _runs(params: Sequence[Any]) -> list[Run]:
    """The row of a buffer, cut behind every parameter with much padding."""
    runs: list[Run] = []
    begin, cut = 0, True
    for param in params:
        counts = _counts(param)
        if cut:
            runs.append(Run(begin, [0] * len(counts)))
        run = runs[-1]
        for rank, count in enumerate(counts):
            if count:
                run.counts[rank] = begin - run.begin + count
        begin += counts[0]
        cut = _padding(param) >= WORTH_A_CALL_BYTES
    return runs
