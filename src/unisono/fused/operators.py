"""The fused matmuls as operators of torch: for gradients and for torch.compile.

Three operators on flat tensors, each the other's gradient: ``matmul_reduce`` (products, reduced over the ranks),
``reduce_values`` and ``gather_values``. Groups travel by name, since graphs hold no objects (empty: the default group,
None: this rank alone); rank and size are arguments beside it, since ranks may share the cache of compiled graphs and
shapes depend on them. Gradients are products too, so they take the same way: float32 sums, one rounding, never torch's
16-bit matmul. Without gradients and outside of torch.compile, matmul.py calls what is behind the operators directly;
that saves about 30 µs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.library import custom_op

from ..calls.groups import transport
from ..transport.protocol import Transport
from . import run as fused_run
from .gemm import plain_weight, wide
from .plan import Plan, own_count


def _transport(name: str | None, tensor: torch.Tensor) -> Transport | None:
    return None if name is None else transport("a fused matmul", name or None, tensor)


# -- matmul_reduce


@custom_op("unisono::matmul_reduce", mutates_args=())
def matmul_reduce(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor],
    residual: torch.Tensor | None,
    what: str,
    group: str | None,
    rows: list[int],
    columns: list[int],
    counts: list[int],
    reduce_op: str,
    scale: float,
    bias_share: float,
    pieces: int,
    backward: str,
    parts: int,
    parts_back: int,
    rank: int,
    size: int,
) -> torch.Tensor:
    depths = tuple(x[i if len(x) == len(rows) else 0].shape[1] for i in range(len(rows))) if parts else ()
    plan = Plan(what, tuple(rows), tuple(columns), (), tuple(counts), depths=depths)
    how = fused_run.How(reduce_op, scale, bias_share, pieces, parts)
    return fused_run.run(_transport(group, x[0]), plan, x, weight, bias, residual, how)


@matmul_reduce.register_fake
def _(x, weight, bias, residual, what, group, rows, columns, counts, *rest):  # type: ignore[no-untyped-def]
    rank, size = rest[-2:]
    return x[0].new_empty(own_count(counts, rank, size, sum(m * n for m, n in zip(rows, columns, strict=True))))


def _multiply(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    rows: Any,
    columns: Any,
    bias: Any = (),
    share: float = 1.0,
    parts: int = 0,
) -> torch.Tensor:
    """This rank's products alone, one behind the other."""
    reduction: tuple[Any, ...] = [], "sum", 1.0, share, 0, "", parts, min(parts, 1)
    product: torch.Tensor = matmul_reduce(a, b, bias, None, "backward", None, rows, columns, *reduction, 0, 1)
    return product


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, residual, *ctx.rest = inputs
    ctx.ends = len(x), len(x) + len(weight)
    ctx.has_residual = residual is not None
    ctx.bias_forms = [(b.dtype, b.shape) for b in bias]
    ctx.save_for_backward(*x, *weight, *(bias if ctx.rest[5] in ("max", "min") else ()))


def _products_gradient(ctx: Any, grad: torch.Tensor, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    """What the flat gradient of the result is for this rank's products."""
    _, group, rows, columns, counts, reduce_op, scale, bias_share, _, backward, _, _, *seat = ctx.rest
    grad = grad.to(wide(grad.dtype)).contiguous()
    if counts:
        grad = gather_values(grad, group, counts, *seat)
    elif group is not None and backward == "all_reduce":
        grad = reduce_values(grad, group, [], "sum", *seat)
    if scale != 1:
        grad = grad * scale
    if reduce_op == "avg":
        return grad / int(seat[1])
    if reduce_op in ("max", "min"):
        # To the ranks whose product it was; ranks that tie share it.
        products = _multiply([t.to(grad.dtype) for t in x], weight, rows, columns, bias, bias_share)
        best = reduce_values(products, group, [], reduce_op, *seat)
        chosen: torch.Tensor = (products == best).to(grad.dtype)
        ties: torch.Tensor = reduce_values(chosen, group, [], "sum", *seat)
        return grad * chosen / ties
    return grad


def _like(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """A flat gradient as one for each of these tensors."""
    parts = torch.split_with_sizes(flat, [t.numel() for t in tensors])
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]


def _wanted(flags: Any) -> bool:
    return any(flags) if isinstance(flags, (list, tuple)) else bool(flags)


def _matmul_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    _, _, rows, columns, _, _, _, bias_share, _, _, parts, parts_back, *_ = ctx.rest
    whole = min(parts, 1)  # in the tree order: a depth that is not cut over the ranks
    end_x, end_weight = ctx.ends
    saved = ctx.saved_tensors
    x, weight, bias = saved[:end_x], saved[end_x:end_weight], saved[end_weight:]
    flat = _products_gradient(ctx, grad, x, weight, bias)
    blocks = torch.split_with_sizes(flat, [m * n for m, n in zip(rows, columns, strict=True)])
    of_products = [b.view(m, n) for b, m, n in zip(blocks, rows, columns, strict=True)]
    of_x = x if len(x) == len(rows) else torch.split_with_sizes(x[0], rows)
    inner = [t.shape[1] for t in of_x]
    grads_x: list[torch.Tensor | None] = [None] * len(x)
    if _wanted(ctx.needs_input_grad[0]):
        plain = [plain_weight(w, n).t() for w, n in zip(weight, columns, strict=True)]
        grads_x = [*_like(x, _multiply(of_products, plain, rows, inner, parts=parts_back))]
    grads_weight: list[torch.Tensor | None] = [None] * len(weight)
    if _wanted(ctx.needs_input_grad[1]):
        products = _multiply([t.t() for t in of_x], of_products, inner, columns, parts=whole)
        grads_weight = [*_like(weight, products)]
    grads_bias = [
        (_row_sum(g, whole) * bias_share).to(dtype).view(shape)
        for g, (dtype, shape) in zip(of_products, ctx.bias_forms, strict=False)
    ]
    # An empty list counts as one of tensors, so it wants one back.
    rest: list[Any] = [[] if argument == [] else None for argument in ctx.rest]
    return grads_x, grads_weight, grads_bias, grad if ctx.has_residual else None, *rest


def _row_sum(g: torch.Tensor, tree: int) -> torch.Tensor:
    if not tree:
        return g.sum(0)
    return _multiply([g.new_ones(1, g.shape[0])], [g], [1], [g.shape[1]], parts=1)


matmul_reduce.register_autograd(_matmul_backward, setup_context=_save)


# -- reduce_values and gather_values, each the gradient of the other


@custom_op("unisono::reduce_values", mutates_args=())
def reduce_values(
    values: torch.Tensor,
    group: str | None,
    counts: list[int],
    reduce_op: str,
    rank: int,
    size: int,
    label: str = "",
) -> torch.Tensor:
    return fused_run.reduce_values(_transport(group, values), values, counts, reduce_op, label)


@reduce_values.register_fake
def _(values, group, counts, reduce_op, rank, size, label=""):  # type: ignore[no-untyped-def]
    return values.new_empty(own_count(counts, rank, size, values.numel()))


def _save_reduce(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.counts, ctx.reduce_op, *ctx.seat = inputs
    if ctx.reduce_op != "sum":
        ctx.mark_non_differentiable(output)


def _reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    grad = grad.contiguous()
    if ctx.counts:
        back = gather_values(grad, ctx.group, ctx.counts, *ctx.seat)
    else:
        back = reduce_values(grad, ctx.group, [], "sum", *ctx.seat)
    return back, None, None, None, None, None, None


reduce_values.register_autograd(_reduce_backward, setup_context=_save_reduce)


@custom_op("unisono::gather_values", mutates_args=())
def gather_values(
    values: torch.Tensor, group: str | None, counts: list[int], rank: int, size: int, label: str = ""
) -> torch.Tensor:
    """``label``: what the ranks must agree on when the gradient is reduced."""
    return fused_run.gather_values(_transport(group, values), values, counts)


@gather_values.register_fake
def _(values, group, counts, rank, size, label=""):  # type: ignore[no-untyped-def]
    return values.new_empty(sum(counts))


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.counts, *ctx.seat = inputs


def _gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    back = reduce_values(grad.to(wide(grad.dtype)).contiguous(), ctx.group, ctx.counts, "sum", *ctx.seat)
    return back.to(grad.dtype), None, None, None, None, None


gather_values.register_autograd(_gather_backward, setup_context=_save_gather)
