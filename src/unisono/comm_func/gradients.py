"""The backward of every operator in operators.py.

    all_reduce sum    ->  all_reduce sum          broadcast  <->  reduce sum
    all_gather       <->  reduce_scatter sum      scatter    <->  gather
    all_to_all        ->  all_to_all, counts exchanged

Where only the root receives something, the others' gradients are of the [1]-shaped 0 they got instead. Their values do
not count, but they stay in the graph, stretched to the shape that is needed: so every rank takes part in the backward,
and in the backward of the backward.

The reductions that are not linear give their gradient
    min, max    to the ranks whose element is the result, in equal shares if there are several (as torch.amax does);
    prod        times the product of the other ranks' elements, gathered for this, so that zeros are no exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import operators as ops

_LINEAR = ("sum", "avg", "premul_sum")


def _register(operator: Any, backward: Callable[..., Tensor], op_at: int | None = None) -> None:
    """``backward`` takes the gradient and all that the operator took after its tensor. ``ctx`` has the tensor's shape
    and, of a reduction that is not linear, the tensor and the result; ``op_at`` says where the reduction's name is."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tensor, *ctx.arguments = inputs
        ctx.shape = tensor.shape
        if op_at is not None and ctx.arguments[op_at] not in _LINEAR:
            ctx.save_for_backward(tensor, output)

    def run(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return backward(ctx, grad, *ctx.arguments), *[None] * len(ctx.arguments)

    operator.register_autograd(run, setup_context=setup)


def _through_reduction(
    ctx: Any, grad: Tensor, op: str, factor: float | None, spread: Callable[[Tensor], Tensor], *here: Any
) -> Tensor:
    """From the gradient of a whole reduction, summed over the ranks that received it, to that of this rank's part;
    ``spread`` brings a result to all ranks."""
    rank, size, _ = here
    if op == "sum":
        return grad
    if op == "avg":
        return grad / size  # type: ignore[no-any-return]
    if op == "premul_sum":
        return grad * factor  # type: ignore[operator]
    tensor: Tensor
    tensor, result = ctx.saved_tensors
    if op == "prod":
        everyone = ops.all_gather(tensor.reshape(1, -1), size, None, *here)
        others = torch.cat([everyone[:rank], everyone[rank + 1 :]]).prod(0)
        return grad * others.conj().reshape(tensor.shape)
    chosen = ((tensor == spread(result)) | (tensor != tensor)).to(grad.dtype)  # a NaN is chosen, and equals nothing
    ties: Tensor = ops.all_reduce(chosen, "sum", None, *here).clamp(min=1)
    return grad * chosen / ties


def _on_root(tensor: Tensor, shape: Sequence[int], root: int, rank: int) -> Tensor:
    """What the root has; on other ranks their [1]-shaped 0 in the shape of that."""
    return tensor if rank == root else tensor.reshape(()).expand(shape)


def _all_reduce(ctx: Any, grad: Tensor, op: str, factor: float | None, *here: Any) -> Tensor:
    whole = ops.all_reduce(grad, "sum", None, *here)
    return _through_reduction(ctx, whole, op, factor, lambda result: result, *here)


def _reduce(ctx: Any, grad: Tensor, root: int, op: str, factor: float | None, *here: Any) -> Tensor:
    def spread(part: Tensor) -> Tensor:
        return ops.broadcast(_on_root(part, ctx.shape, root, here[0]), root, *here)  # type: ignore[no-any-return]

    return _through_reduction(ctx, spread(grad), op, factor, spread, *here)


def _reduce_scatter(
    ctx: Any, grad: Tensor, rows: int, counts: Any, op: str, factor: float | None, *here: Any
) -> Tensor:
    def spread(part: Tensor) -> Tensor:
        return ops.all_gather(part, ctx.shape[0], counts, *here)  # type: ignore[no-any-return]

    return _through_reduction(ctx, spread(grad), op, factor, spread, *here)


def _all_gather(ctx: Any, grad: Tensor, rows: int, counts: Any, *here: Any) -> Tensor:
    return ops.reduce_scatter(grad, ctx.shape[0], counts, "sum", None, *here)  # type: ignore[no-any-return]


def _broadcast(ctx: Any, grad: Tensor, root: int, *here: Any) -> Tensor:
    return _on_root(ops.reduce(grad, root, "sum", None, *here), ctx.shape, root, here[0])


def _scatter(ctx: Any, grad: Tensor, rows: int, root: int, *here: Any) -> Tensor:
    return _on_root(ops.gather(grad, ctx.shape[0], root, *here), ctx.shape, root, here[0])


def _gather(ctx: Any, grad: Tensor, rows: int, root: int, *here: Any) -> Tensor:
    whole = _on_root(grad, (rows, *ctx.shape[1:]), root, here[0])
    return ops.scatter(whole, ctx.shape[0], root, *here)  # type: ignore[no-any-return]


def _all_to_all(ctx: Any, grad: Tensor, rows: int, output_counts: Any, input_counts: Any, *here: Any) -> Tensor:
    return ops.all_to_all(grad, ctx.shape[0], input_counts, output_counts, *here)  # type: ignore[no-any-return]


_register(ops.all_reduce, _all_reduce, op_at=0)
_register(ops.reduce, _reduce, op_at=1)
_register(ops.reduce_scatter, _reduce_scatter, op_at=2)
_register(ops.all_gather, _all_gather)
_register(ops.broadcast, _broadcast)
_register(ops.scatter, _scatter)
_register(ops.gather, _gather)
_register(ops.all_to_all, _all_to_all)
