"""The fused matmuls as operators of torch: for gradients and for torch.compile.

Three operators on flat tensors, each the other's gradient: ``matmul_reduce`` (products, reduced over the ranks),
``reduce_values`` and ``gather_values``. Groups travel by name, since graphs hold no objects; rank and size are
arguments beside it, since ranks may share the cache of compiled graphs and shapes depend on them. Gradients are
products too, so they take the same way: float32 sums, one rounding, never torch's 16-bit matmul. Without gradients and
outside of torch.compile, matmul.py calls what is behind the operators directly; that saves about 30 µs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op

from ..calls.groups import transport
from ..transport.protocol import Transport
from . import run as fused_run
from .gemm import plain_weight, wide
from .plan import Plan


def _transport(name: str, tensor: torch.Tensor) -> Transport | None:
    """The transport of the group behind a name; the empty name is this rank alone."""
    return transport("a fused matmul", name, tensor) if name else None


def _plan(what: str, x: list[torch.Tensor], rows: list[int], columns: list[int], counts: list[int]) -> Plan:
    one_x = len(x) == 1
    inner = tuple(t.shape[1] for t in x) if not one_x else (x[0].shape[1],) * len(rows)
    return Plan(what, tuple(rows), inner, tuple(columns), (), one_x, tuple(counts))


# -- matmul_reduce


@custom_op("unisono::matmul_reduce", mutates_args=())
def matmul_reduce(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor],
    residual: torch.Tensor | None,
    what: str,
    group: str,
    rows: list[int],
    columns: list[int],
    counts: list[int],
    reduce_op: str,
    scale: float,
    bias_share: float,
    pieces: int,
    backward: str,
    rank: int,
    size: int,
) -> torch.Tensor:
    plan = _plan(what, x, rows, columns, counts)
    return fused_run.run(_transport(group, x[0]), plan, x, weight, bias, bias_share, residual, reduce_op, scale, pieces)


@matmul_reduce.register_fake
def _(x, weight, bias, residual, what, group, rows, columns, counts, *rest):  # type: ignore[no-untyped-def]
    rank, size = rest[-2:]
    count = sum(counts[rank::size]) if counts else sum(m * n for m, n in zip(rows, columns, strict=True))
    return x[0].new_empty(count)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, residual, *ctx.rest = inputs
    ctx.lengths = len(x), len(weight)
    ctx.has_residual = residual is not None
    ctx.bias_forms = [(b.dtype, b.shape) for b in bias]
    ctx.save_for_backward(*x, *weight, *(bias if ctx.rest[5] in ("max", "min") else ()))


def _products_gradient(ctx: Any, grad: torch.Tensor, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    """What the flat gradient of the result is for this rank's products."""
    what, group, rows, columns, counts, reduce_op, scale, bias_share, _, backward, *seat = ctx.rest
    grad = grad.to(wide(grad.dtype)).contiguous()
    if counts:
        grad = gather_values(grad, group, counts, *seat)
    elif group and backward == "all_reduce":
        grad = reduce_values(grad, group, [], "sum", *seat)
    if scale != 1:
        grad = grad * scale
    if reduce_op == "avg":
        return grad / int(seat[1])
    if reduce_op in ("max", "min"):
        # To the ranks whose product it was; ranks that tie share it.
        x = [t.to(grad.dtype) for t in x]
        alone: list[Any] = ["", rows, columns, [], "sum", 1.0, bias_share, 0, "", 0, 1]
        products = matmul_reduce(x, weight, bias, None, what, *alone)
        chosen: torch.Tensor = (products == reduce_values(products, group, [], reduce_op, *seat)).to(grad.dtype)
        ties: torch.Tensor = reduce_values(chosen, group, [], "sum", *seat)
        return grad * chosen / ties
    return grad


def _wanted(flags: Any) -> bool:
    return any(flags) if isinstance(flags, (list, tuple)) else bool(flags)


def _matmul_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    _, _, rows, columns, _, _, _, bias_share, *_ = ctx.rest
    n_x, n_weight = ctx.lengths
    x, weight = ctx.saved_tensors[:n_x], ctx.saved_tensors[n_x : n_x + n_weight]
    flat = _products_gradient(ctx, grad, x, weight, list(ctx.saved_tensors[n_x + n_weight :]))
    blocks = torch.split_with_sizes(flat, [m * n for m, n in zip(rows, columns, strict=True)])
    of_products = [b.view(m, n) for b, m, n in zip(blocks, rows, columns, strict=True)]

    def multiply(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
        heights, widths = [t.shape[0] for t in a], [t.shape[1] for t in b]
        plan: list[Any] = ["backward", "", heights, widths, [], "sum", 1.0, 1.0, 0, "", 0, 1]
        result: torch.Tensor = matmul_reduce(a, b, [], None, *plan)
        return result

    grads_x: list[torch.Tensor | None] = [None] * n_x
    if _wanted(ctx.needs_input_grad[0]):
        plain = [plain_weight(w, n).t() for w, n in zip(weight, columns, strict=True)]
        back = multiply(of_products, plain)
        if n_x == 1:
            grads_x = [back.view(x[0].shape).to(x[0].dtype)]
        else:
            grads_x = [
                g.view(t.shape).to(t.dtype)
                for g, t in zip(torch.split_with_sizes(back, [t.numel() for t in x]), x, strict=True)
            ]
    grads_weight: list[torch.Tensor | None] = [None] * n_weight
    if _wanted(ctx.needs_input_grad[1]):
        of_x = torch.split_with_sizes(x[0], rows) if n_x == 1 else x
        back = multiply([t.t() for t in of_x], of_products)
        parts = torch.split_with_sizes(back, [w.numel() for w in weight])
        grads_weight = [g.view(w.shape).to(w.dtype) for g, w in zip(parts, weight, strict=True)]
    grads_bias = [
        (g.sum(0) * bias_share).to(dtype).view(shape)
        for g, (dtype, shape) in zip(of_products, ctx.bias_forms, strict=False)
    ]
    # An empty list counts as one of tensors, so it wants one back.
    rest: list[Any] = [[] if argument == [] else None for argument in ctx.rest]
    return grads_x, grads_weight, grads_bias, grad if ctx.has_residual else None, *rest


matmul_reduce.register_autograd(_matmul_backward, setup_context=_save)


# -- reduce_values and gather_values, each the gradient of the other


@custom_op("unisono::reduce_values", mutates_args=())
def reduce_values(
    values: torch.Tensor, group: str, counts: list[int], reduce_op: str, rank: int, size: int
) -> torch.Tensor:
    return fused_run.reduce_values(_transport(group, values), values, counts, reduce_op)


@reduce_values.register_fake
def _(values, group, counts, reduce_op, rank, size):  # type: ignore[no-untyped-def]
    return values.new_empty(sum(counts[rank::size]) if counts else values.numel())


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
    return back, None, None, None, None, None


reduce_values.register_autograd(_reduce_backward, setup_context=_save_reduce)


@custom_op("unisono::gather_values", mutates_args=())
def gather_values(values: torch.Tensor, group: str, counts: list[int], rank: int, size: int) -> torch.Tensor:
    return fused_run.gather_values(_transport(group, values), values, counts)


@gather_values.register_fake
def _(values, group, counts, rank, size):  # type: ignore[no-untyped-def]
    return values.new_empty(sum(counts))


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group, ctx.counts, *ctx.seat = inputs


def _gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    back = reduce_values(grad.to(wide(grad.dtype)).contiguous(), ctx.group, ctx.counts, "sum", *ctx.seat)
    return back.to(grad.dtype), None, None, None, None


gather_values.register_autograd(_gather_backward, setup_context=_save_gather)
