"""The functional collectives as torch operators ``unisono::…``: for autograd, torch.compile and fake tensors.

Eager calls without gradients do not come here. An operator names its group by a word that is looked up when it runs.
Everything that a shape or a gradient depends on is an argument (rank, size, splits, root): compiled graphs are cached
and shared between processes, so what is not in the arguments must not be in the graph.

Gradients are those of the whole program: of the sum of all ranks' losses. Each backward is made of these operators, so
it can be differentiated again. All ranks must take part in a backward as in the forward.

    all_reduce sum    ->  all_reduce sum          broadcast  <->  reduce sum
    all_gather       <->  reduce_scatter sum      scatter    <->  gather
    all_to_all        ->  all_to_all, splits exchanged
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.library import custom_op

from ..base.handle import Finished, Handle
from ..transport.find import find
from ..transport.protocol import Transport
from . import inductor, run


class _AsyncRequest(threading.local):
    """Whether the operator that this thread is about to run is to be asynchronous, and then its handle."""

    async_op = False
    handle: Handle | None = None


_asked = _AsyncRequest()


def start(async_op: bool, name: str, operator: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, Handle | None]:
    """Runs an operator. In a compiled graph it runs to its end there; the handle of such a call is complete."""
    if not async_op:
        return operator(*arguments), None
    if torch.compiler.is_compiling():
        out = operator(*arguments)
        return out, Handle(Finished(), name, out)
    _asked.async_op, _asked.handle = True, None
    try:
        out = operator(*arguments)
        return out, _asked.handle or Handle(Finished(), name, out)  # a fake tensor's call has none
    finally:
        _asked.async_op, _asked.handle = False, None


def _transport(key: str, rank: int, size: int, tensor: Tensor) -> Transport:
    """The transport of the group an operator was given, which must still be as it was when the graph was made."""
    found = find(key or None, tensor)
    if found is None:
        raise RuntimeError(f"this process is not in the group {key!r} any more")
    if (found.rank, found.size) != (rank, size):
        raise RuntimeError(
            f"the call was compiled for rank {rank} of {size}, and the group is now seen by rank {found.rank} of "
            f"{found.size}; compile again after a change of groups (torch.compiler.reset())"
        )
    return found


def _factor(op: str, factor: float | None) -> float | None:
    """The factor as a transport takes it: with a premul_sum only."""
    return factor if op == "premul_sum" else None


def _kept(result: run.Result) -> Tensor:
    out, _asked.handle = result
    return out


# -- the operators


@custom_op("unisono::all_reduce", mutates_args=())
def all_reduce(tensor: Tensor, op: str, factor: float | None, rank: int, size: int, group: str) -> Tensor:
    """Every rank: the ranks' tensors combined."""
    where = _transport(group, rank, size, tensor)
    return _kept(run.all_reduce(where, tensor, op, _factor(op, factor), _asked.async_op))


@custom_op("unisono::all_gather", mutates_args=())
def all_gather(tensor: Tensor, splits: Sequence[int], rank: int, group: str) -> Tensor:
    """Every rank: the ranks' rows behind one another; splits[r] of rank r."""
    return _kept(run.all_gather(_transport(group, rank, len(splits), tensor), tensor, splits, _asked.async_op))


@custom_op("unisono::reduce_scatter", mutates_args=())
def reduce_scatter(
    tensor: Tensor, splits: Sequence[int], op: str, factor: float | None, rank: int, group: str
) -> Tensor:
    """Rank r: its splits[r] rows of the ranks' tensors combined."""
    where = _transport(group, rank, len(splits), tensor)
    return _kept(run.reduce_scatter(where, tensor, splits, op, _factor(op, factor), _asked.async_op))


@custom_op("unisono::reduce", mutates_args=())
def reduce(tensor: Tensor, root: int, op: str, factor: float | None, rank: int, size: int, group: str) -> Tensor:
    """Root: the ranks' tensors combined; others: a 0."""
    return run.reduce(_transport(group, rank, size, tensor), tensor, root, op, _factor(op, factor))


@custom_op("unisono::broadcast", mutates_args=())
def broadcast(tensor: Tensor, root: int, rank: int, size: int, group: str) -> Tensor:
    """Every rank: the root's tensor."""
    return run.broadcast(_transport(group, rank, size, tensor), tensor, root)


@custom_op("unisono::scatter", mutates_args=())
def scatter(tensor: Tensor, root: int, rank: int, size: int, group: str) -> Tensor:
    """Rank r: the r-th of equal shares of the root's rows."""
    return run.scatter(_transport(group, rank, size, tensor), tensor, root)


@custom_op("unisono::gather", mutates_args=())
def gather(tensor: Tensor, root: int, rank: int, size: int, group: str) -> Tensor:
    """Root: the ranks' rows behind one another; others: a 0."""
    return run.gather(_transport(group, rank, size, tensor), tensor, root)


@custom_op("unisono::all_to_all", mutates_args=())
def all_to_all(
    tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], rank: int, group: str
) -> Tensor:
    """Rank r: the rows that the others have for it, in their order."""
    where = _transport(group, rank, len(input_splits), tensor)
    return _kept(run.all_to_all(where, tensor, output_splits, input_splits, _asked.async_op))


_OPERATORS = (all_reduce, all_gather, reduce_scatter, reduce, broadcast, scatter, gather, all_to_all)

# Ranks must make the same calls in the same order. To a compiler these operators look like arithmetic, which it may
# move, or leave out where a result is empty or unused; the effect tells it not to.
for _operator in _OPERATORS:
    _operator.register_effect(EffectType.ORDERED)


# -- their shapes


def _like(tensor: Tensor, *_: Any) -> Tensor:
    inductor.teach(_OPERATORS)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _rows(tensor: Tensor, rows: int) -> Tensor:
    inductor.teach(_OPERATORS)
    return tensor.new_empty((rows, *tensor.shape[1:]))


def _nothing(tensor: Tensor) -> Tensor:
    inductor.teach(_OPERATORS)
    return tensor.new_empty(1)


all_reduce.register_fake(_like)
broadcast.register_fake(_like)


@all_gather.register_fake
def _(tensor: Tensor, splits: Sequence[int], rank: int, group: str) -> Tensor:
    return _rows(tensor, sum(splits))


@reduce_scatter.register_fake
def _(tensor: Tensor, splits: Sequence[int], op: str, factor: float | None, rank: int, group: str) -> Tensor:
    return _rows(tensor, splits[rank])


@reduce.register_fake
def _(tensor: Tensor, root: int, op: str, factor: float | None, rank: int, size: int, group: str) -> Tensor:
    return _like(tensor) if rank == root else _nothing(tensor)


@scatter.register_fake
def _(tensor: Tensor, root: int, rank: int, size: int, group: str) -> Tensor:
    return _rows(tensor, tensor.shape[0] // size)


@gather.register_fake
def _(tensor: Tensor, root: int, rank: int, size: int, group: str) -> Tensor:
    return _rows(tensor, tensor.shape[0] * size) if rank == root else _nothing(tensor)


@all_to_all.register_fake
def _(tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], rank: int, group: str) -> Tensor:
    return _rows(tensor, sum(output_splits))
