"""Several tensors per rank in one call, a form that torch has given up and gloo still serves.

``pg.allreduce([a, b])`` combines the tensors of all lists on all ranks, and every tensor gets the result;
``pg.broadcast([a, b])`` copies one tensor of the root into all; ``pg.allgather([[…], […]], [a, b])`` fills every output
list with all tensors of all ranks. torch.distributed's functions pass one tensor, so nothing here is on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _core
from ..base import ops
from ..base.errors import ArgumentError
from ..base.handle import Handle
from ..base.work import Work
from . import checks, refusals, sparse
from .strided import share_memory

if TYPE_CHECKING:
    from .adapter import ProcessGroupAdapter


def all_reduce(adapter: ProcessGroupAdapter, tensors: Sequence[Tensor], opts: Any) -> Work:
    """Combines what this rank's tensors give with all other ranks' and puts it into each of them."""
    if not tensors:
        raise refusals.not_one_tensor(0, "allreduce: requires non-empty tensor list")
    first = tensors[0]
    checks.same_layout("allreduce", tensors)
    checks.alike("allreduce", tensors, first)
    op = ops.read(opts.reduceOp)[0]
    if first.layout is not torch.strided:
        return _all_reduce_sparse(adapter, tensors, opts)
    _refuse_overlap("allreduce", tensors)
    # In list order, as ranks are combined in rank order. A mean is that of the ranks, so each gives its sum.
    local = ops.SUM if op in (ops.AVG, ops.PREMUL_SUM) else op
    inputs = [tensor.detach().contiguous() for tensor in tensors]
    total = torch.empty_like(inputs[0])
    try:
        _core.combine(total, inputs, local, [1.0] * len(inputs))
    except ArgumentError as error:
        raise refusals.refusal("all_reduce", (tensors,), error) from None
    return _begin(adapter, "all_reduce", [(total, None, opts.reduceOp, None)], opts, tensors, [total])


def _all_reduce_sparse(adapter: ProcessGroupAdapter, tensors: Sequence[Tensor], opts: Any) -> Work:
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total = total + tensor
    try:
        result = sparse.all_reduce(adapter.unisono_group, total, opts.reduceOp)
    except ArgumentError as error:
        raise refusals.refusal("all_reduce", (), error) from None
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(result)
    return Work((), list(tensors))


def broadcast(adapter: ProcessGroupAdapter, tensors: Sequence[Tensor], opts: Any) -> Work:
    """Copies the root's tensor number ``rootTensor`` into all tensors of all ranks."""
    if not tensors:
        raise refusals.not_one_tensor(0, "broadcast: invalid root tensor: 0")
    checks.root("broadcast", opts.rootRank, adapter.size(), opts.rootTensor, len(tensors))
    checks.dense("broadcast", tensors)
    checks.alike("broadcast", tensors, tensors[0])
    _refuse_overlap("broadcast", tensors)
    chosen = tensors[opts.rootTensor].detach().contiguous()
    return _begin(adapter, "broadcast", [(chosen, opts.rootRank, None)], opts, tensors, [chosen])


def all_gather(adapter: ProcessGroupAdapter, output_lists: Any, inputs: Sequence[Tensor], opts: Any) -> Work:
    """Tensor i of rank r goes to place r * n + i of every output list, n being the tensors of one rank."""
    if not inputs:
        raise refusals.not_one_tensor(0, "allgather: requires non-empty input tensor list")
    size, n = adapter.size(), len(inputs)
    checks.all_gather(output_lists, inputs, size)
    outputs = [tensor for part in output_lists for tensor in part]
    _refuse_overlap("allgather", [*outputs, *inputs], same_may=False)
    like = inputs[0]
    gathered = [torch.empty((size, *like.shape), dtype=like.dtype) for _ in inputs]
    calls = [(whole, tensor.detach().contiguous(), None) for whole, tensor in zip(gathered, inputs, strict=True)]
    sources = [gathered[i][r] for _ in output_lists for r in range(size) for i in range(n)]
    lists = [list(part) for part in output_lists]
    return _begin(adapter, "all_gather", calls, opts, outputs, sources, lists)


def _begin(
    adapter: ProcessGroupAdapter, verb: str, calls: Sequence[tuple[Any, ...]], opts: Any, targets: Sequence[Tensor],
    sources: Sequence[Tensor], outputs: Any = None,
) -> Work:  # fmt: skip
    """Starts calls on tensors of our own, whose results go to the caller's when they are there."""
    call = getattr(adapter.unisono_group.transport, verb)
    timeout_s = adapter.timeout_of(opts)
    try:
        handles: list[Handle] = [call(*arguments, timeout_s, True) for arguments in calls]
    except ArgumentError as error:
        raise refusals.refusal(verb, calls, error) from None
    return Work(handles, list(targets) if outputs is None else outputs, after=[_copy_once(targets, sources)])


def _copy_once(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
    """A step that fills the targets from the sources, or all from the only one; does it once, whoever asks."""
    lock, left = threading.Lock(), [list(targets)]

    def copy() -> None:
        with lock:
            for i, target in enumerate(left[0]):
                target.detach().copy_(sources[i if len(sources) > 1 else 0])
            left[0] = []

    return copy


def _refuse_overlap(name: str, tensors: Sequence[Tensor], same_may: bool = True) -> None:
    """Refuses tensors that share some of their memory; ``same_may``: the very same one may be there twice."""
    if share_memory(tensors, same_may):
        raise checks.refuse(name, "tensors of the list share memory: one result would overwrite the other")
