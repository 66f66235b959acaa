"""The functional collectives as torch operators ``unisono::…``: for autograd, torch.compile and fake tensors.

Eager calls without gradients do not come here. An operator names its group by a word that is looked up when it runs.
Everything that a shape or a gradient depends on is an argument (rows of the result, counts, root, rank, size): compiled
graphs are cached and shared between processes, so what is not in the arguments must not be in the graph.

Gradients (``gradients.py``) are those of the whole program: of the sum of all ranks' losses. Each backward is made of
these operators, so it can be differentiated again. All ranks must take part in a backward as in the forward.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.library import custom_op

from ..base.handle import Finished, Handle
from ..transport.find import find
from ..transport.outputs import are_shapes, rows_of
from ..transport.protocol import Counts, Factor, Seconds, Transport
from . import inductor


class _AsyncRequest(threading.local):
    """Whether the operator that this thread is about to run is to be asynchronous, and then its handle."""

    async_op = False
    handle: Handle | None = None


_asked = _AsyncRequest()


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


def _factor(op: str, factor: Factor) -> Factor:
    """The factor as a transport takes it: with a premul_sum only."""
    return factor if op == "premul_sum" else None


def _new(made: Any) -> Tensor:
    """The new tensor of a verb; its handle, if it has one, is for :meth:`Operators._start`."""
    if isinstance(made, Handle):
        _asked.handle, made = made, made.outputs
    return made  # type: ignore[no-any-return]


# -- the operators


@custom_op("unisono::all_reduce", mutates_args=())
def all_reduce(tensor: Tensor, op: str, factor: float | None, rank: int, size: int, group: str) -> Tensor:
    """Every rank: the ranks' tensors combined."""
    where = _transport(group, rank, size, tensor)
    return _new(where.all_reduce(tensor, -1, op, _factor(op, factor), None, _asked.async_op))


@custom_op("unisono::reduce", mutates_args=())
def reduce(tensor: Tensor, root: int, op: str, factor: float | None, rank: int, size: int, group: str) -> Tensor:
    """Root: the ranks' tensors combined; others: a 0."""
    where = _transport(group, rank, size, tensor)
    return _new(where.reduce(tensor, root, -1, op, _factor(op, factor), None, False))


@custom_op("unisono::broadcast", mutates_args=())
def broadcast(tensor: Tensor, root: int, rank: int, size: int, group: str) -> Tensor:
    """Every rank: the root's tensor."""
    return _new(_transport(group, rank, size, tensor).broadcast(tensor, root, -1, None, False))


@custom_op("unisono::all_gather", mutates_args=())
def all_gather(tensor: Tensor, rows: int, counts: Sequence[int] | None, rank: int, size: int, group: str) -> Tensor:
    """Every rank: the ranks' rows behind one another; counts[r] elements of rank r."""
    return _new(_transport(group, rank, size, tensor).all_gather(rows, tensor, counts, None, _asked.async_op))


@custom_op("unisono::reduce_scatter", mutates_args=())
def reduce_scatter(
    tensor: Tensor, rows: int, counts: Sequence[int] | None, op: str, factor: float | None, rank: int, size: int,
    group: str,
) -> Tensor:  # fmt: skip
    """Rank r: its counts[r] elements of the ranks' tensors combined."""
    where = _transport(group, rank, size, tensor)
    return _new(where.reduce_scatter(rows, tensor, counts, op, _factor(op, factor), None, _asked.async_op))


@custom_op("unisono::scatter", mutates_args=())
def scatter(tensor: Tensor, rows: int, root: int, rank: int, size: int, group: str) -> Tensor:
    """Rank r: the r-th of equal shares of the root's rows."""
    return _new(_transport(group, rank, size, tensor).scatter(rows, tensor, root, None, None, False))


@custom_op("unisono::gather", mutates_args=())
def gather(tensor: Tensor, rows: int, root: int, rank: int, size: int, group: str) -> Tensor:
    """Root: the ranks' rows behind one another; others: a 0."""
    return _new(_transport(group, rank, size, tensor).gather(rows, tensor, root, None, None, False))


@custom_op("unisono::all_to_all", mutates_args=())
def all_to_all(
    tensor: Tensor, rows: int, output_counts: Sequence[int] | None, input_counts: Sequence[int] | None, rank: int,
    size: int, group: str,
) -> Tensor:  # fmt: skip
    """Rank r: what the others have for it, in their order."""
    where = _transport(group, rank, size, tensor)
    return _new(where.all_to_all(rows, tensor, output_counts, input_counts, None, _asked.async_op))


_OPERATORS = (all_reduce, reduce, broadcast, all_gather, reduce_scatter, scatter, gather, all_to_all)

# Ranks must make the same calls in the same order. To a compiler these operators look like arithmetic, which it may
# move, or leave out where a result is empty or unused; the effect tells it not to.
for _operator in _OPERATORS:
    _operator.register_effect(EffectType.ORDERED)


# -- their shapes


def _like(tensor: Tensor, *_: Any) -> Tensor:
    inductor.teach(_OPERATORS)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _rows(tensor: Tensor, rows: int, *_: Any) -> Tensor:
    inductor.teach(_OPERATORS)
    return tensor.new_empty((rows, *tensor.shape[1:]))


for _operator in (all_reduce, broadcast):
    _operator.register_fake(_like)
for _operator in (all_gather, reduce_scatter, scatter, all_to_all):
    _operator.register_fake(_rows)


@reduce.register_fake
def _(tensor: Tensor, root: int, op: str, factor: float | None, rank: int, size: int, group: str) -> Tensor:
    return _like(tensor) if rank == root else _rows(tensor.new_empty(0), 1)


@gather.register_fake
def _(tensor: Tensor, rows: int, root: int, rank: int, size: int, group: str) -> Tensor:
    return _rows(tensor, rows) if rank == root else _rows(tensor.new_empty(0), 1)


# -- the operators as the verbs of a transport


class Operators:
    """A group as code sees it that is differentiated, traced or faked; outputs are numbers, as Transport says."""

    def __init__(self, rank: int, size: int, group: str) -> None:
        self.rank = rank
        self.size = size
        self.group = group

    def all_reduce(self, tensor: Tensor, out: int, op: str, factor: Factor, timeout_s: Seconds, async_op: bool) -> Any:
        return self._start(async_op, "all_reduce", all_reduce, tensor, op, factor)

    def reduce(
        self, tensor: Tensor, root: int, out: int, op: str, factor: Factor, timeout_s: Seconds, async_op: bool
    ) -> Any:
        return self._start(async_op, "reduce", reduce, tensor, root, op, factor)

    def broadcast(self, tensor: Tensor, root: int, out: int, timeout_s: Seconds, async_op: bool) -> Any:
        return self._start(async_op, "broadcast", broadcast, tensor, root)

    def all_gather(self, rows: int, tensor: Tensor, counts: Counts, timeout_s: Seconds, async_op: bool) -> Any:
        return self._start(async_op, "all_gather", all_gather, *self._rows("all_gather", rows, tensor), counts)

    def reduce_scatter(
        self, rows: int, tensor: Tensor, counts: Counts, op: str, factor: Factor, timeout_s: Seconds, async_op: bool
    ) -> Any:
        whole = self._rows("reduce_scatter", rows, tensor)
        return self._start(async_op, "reduce_scatter", reduce_scatter, *whole, counts, op, factor)

    def scatter(self, rows: int, tensor: Tensor, root: int, counts: Counts, timeout_s: Seconds, async_op: bool) -> Any:
        return self._start(async_op, "scatter", scatter, *self._rows("scatter", rows, tensor), root)

    def gather(self, rows: int, tensor: Tensor, root: int, counts: Counts, timeout_s: Seconds, async_op: bool) -> Any:
        return self._start(async_op, "gather", gather, *self._rows("gather", rows, tensor), root)

    def all_to_all(
        self, rows: Any, tensor: Any, output_counts: Counts, input_counts: Counts, timeout_s: Seconds, async_op: bool
    ) -> Any:
        if are_shapes(rows):
            return self._exchange_lists(rows, tensor, async_op)
        return self._start(async_op, "all_to_all", all_to_all, _as_rows(tensor), rows, output_counts, input_counts)

    def _exchange_lists(self, shapes: Sequence[Sequence[int]], tensors: Sequence[Tensor], async_op: bool) -> Any:
        """One tensor for each rank, put together for the operator and cut afterwards."""
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        received, sent = [math.prod(shape) for shape in shapes], [tensor.numel() for tensor in tensors]
        made = self._start(async_op, "all_to_all", all_to_all, joined, sum(received), received, sent)
        parts = torch.split(made.outputs if async_op else made, received)
        outputs = tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        return made.of(outputs) if async_op else outputs

    def _rows(self, verb: str, rows: int, tensor: Tensor) -> tuple[Tensor, int]:
        """The input with at least one dimension, and the rows of the result."""
        return _as_rows(tensor), rows_of(verb, tensor, self.size) if rows < 0 else rows

    def _start(self, async_op: bool, name: str, operator: Callable[..., Tensor], *arguments: Any) -> Any:
        """Runs an operator. In a compiled graph it runs to its end there; the handle of such a call is complete."""
        arguments = (*arguments, self.rank, self.size, self.group)
        if not async_op:
            return operator(*arguments)
        if torch.compiler.is_compiling():
            return Handle(Finished(), name, operator(*arguments))
        _asked.async_op, _asked.handle = True, None
        try:
            out = operator(*arguments)
            # The result of a differentiable call is another object than the operator's; a fake tensor's has no handle.
            return _asked.handle.of(out) if _asked.handle else Handle(Finished(), name, out)
        finally:
            _asked.async_op, _asked.handle = False, None


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)
