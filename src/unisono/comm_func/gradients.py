"""The backward of every operator in operators.py.

Where only the root receives something, the others' gradients are of the [1]-shaped 0 they got instead. Their values do
not count, but they stay in the graph, stretched to the shape that is needed: so every rank takes part in the backward,
and in the backward of the backward.

The reductions that are not linear give their gradient
    min, max    to the ranks whose element is the result, in equal shares if there are several (as torch.amax does);
    prod        times the product of the other ranks' elements, gathered for this, so that zeros are no exception.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import operators as ops

_LINEAR = ("sum", "avg", "premul_sum")


def _stretched(nothing: Tensor, shape: Any) -> Tensor:
    return nothing.reshape(()).expand(shape)


def _through_reduction(
    op: str,
    factor: float | None,
    grad: Tensor,
    tensor: Tensor | None,
    result: Tensor | None,
    rank: int,
    size: int,
    group: str,
) -> Tensor:
    """From the gradient of a whole reduction, summed over the ranks that received it, to that of this rank's part."""
    if op == "sum":
        return grad
    if op == "avg":
        return grad / size
    if op == "premul_sum":
        return grad * factor  # type: ignore[operator]
    assert tensor is not None
    if op == "prod":
        everyone = ops.all_gather(tensor.reshape(1, -1), [1] * size, rank, group)
        others = torch.cat([everyone[:rank], everyone[rank + 1 :]]).prod(0)
        return grad * others.conj().reshape(tensor.shape)
    chosen = ((tensor == result) | (tensor != tensor)).to(grad.dtype)  # a NaN is chosen, and equals nothing
    ties: Tensor = ops.all_reduce(chosen, "sum", None, rank, size, group).clamp(min=1)
    return grad * chosen / ties


def _keep(ctx: Any, op: str, tensor: Tensor, result: Tensor) -> None:
    if op not in _LINEAR:
        ctx.save_for_backward(tensor, result)


def _kept(ctx: Any) -> tuple[Tensor | None, Tensor | None]:
    return ctx.saved_tensors if ctx.op not in _LINEAR else (None, None)


# -- all_reduce


def _setup_all_reduce(ctx: Any, inputs: Any, output: Tensor) -> None:
    tensor, ctx.op, ctx.factor, ctx.rank, ctx.size, ctx.group = inputs
    _keep(ctx, ctx.op, tensor, output)


def _all_reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    whole = ops.all_reduce(grad, "sum", None, ctx.rank, ctx.size, ctx.group)
    mine = _through_reduction(ctx.op, ctx.factor, whole, *_kept(ctx), ctx.rank, ctx.size, ctx.group)
    return mine, None, None, None, None, None


ops.all_reduce.register_autograd(_all_reduce, setup_context=_setup_all_reduce)


# -- all_gather and reduce_scatter


def _setup_all_gather(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.splits, ctx.rank, ctx.group = inputs


def _all_gather(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return ops.reduce_scatter(grad, ctx.splits, "sum", None, ctx.rank, ctx.group), None, None, None


ops.all_gather.register_autograd(_all_gather, setup_context=_setup_all_gather)


def _setup_reduce_scatter(ctx: Any, inputs: Any, output: Tensor) -> None:
    tensor, ctx.splits, ctx.op, ctx.factor, ctx.rank, ctx.group = inputs
    _keep(ctx, ctx.op, tensor, output)


def _reduce_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    whole = ops.all_gather(grad, ctx.splits, ctx.rank, ctx.group)
    tensor, result = _kept(ctx)
    if result is not None and ctx.op != "prod":
        result = ops.all_gather(result, ctx.splits, ctx.rank, ctx.group)
    size = len(ctx.splits)
    mine = _through_reduction(ctx.op, ctx.factor, whole, tensor, result, ctx.rank, size, ctx.group)
    return mine, None, None, None, None, None


ops.reduce_scatter.register_autograd(_reduce_scatter, setup_context=_setup_reduce_scatter)


# -- reduce and broadcast


def _setup_reduce(ctx: Any, inputs: Any, output: Tensor) -> None:
    tensor, ctx.root, ctx.op, ctx.factor, ctx.rank, ctx.size, ctx.group = inputs
    ctx.shape = tensor.shape
    _keep(ctx, ctx.op, tensor, output)


def _reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    here = (ctx.rank, ctx.size, ctx.group)
    tensor, result = _kept(ctx)
    if ctx.rank != ctx.root:
        grad = _stretched(grad, ctx.shape)
        result = None if result is None else _stretched(result, ctx.shape)
    whole = ops.broadcast(grad, ctx.root, *here)
    if result is not None and ctx.op != "prod":
        result = ops.broadcast(result, ctx.root, *here)
    return _through_reduction(ctx.op, ctx.factor, whole, tensor, result, *here), None, None, None, None, None, None


ops.reduce.register_autograd(_reduce, setup_context=_setup_reduce)


def _setup_rooted(ctx: Any, inputs: Any, output: Tensor) -> None:
    tensor, ctx.root, ctx.rank, ctx.size, ctx.group = inputs
    ctx.shape = tensor.shape


def _broadcast(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    total = ops.reduce(grad, ctx.root, "sum", None, ctx.rank, ctx.size, ctx.group)
    return (total if ctx.rank == ctx.root else _stretched(total, ctx.shape)), None, None, None, None


ops.broadcast.register_autograd(_broadcast, setup_context=_setup_rooted)


# -- scatter and gather


def _scatter(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    whole = ops.gather(grad, ctx.root, ctx.rank, ctx.size, ctx.group)
    return (whole if ctx.rank == ctx.root else _stretched(whole, ctx.shape)), None, None, None, None


ops.scatter.register_autograd(_scatter, setup_context=_setup_rooted)


def _gather(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.rank != ctx.root:
        grad = _stretched(grad, (ctx.size * ctx.shape[0], *ctx.shape[1:]))
    return ops.scatter(grad, ctx.root, ctx.rank, ctx.size, ctx.group), None, None, None, None


ops.gather.register_autograd(_gather, setup_context=_setup_rooted)


# -- all_to_all


def _setup_all_to_all(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.output_splits, ctx.input_splits, ctx.rank, ctx.group = inputs


def _all_to_all(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return ops.all_to_all(grad, ctx.input_splits, ctx.output_splits, ctx.rank, ctx.group), None, None, None, None


ops.all_to_all.register_autograd(_all_to_all, setup_context=_setup_all_to_all)
