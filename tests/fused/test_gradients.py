"""Gradients of the fused matmuls: gradcheck in float64, 16-bit gradients against float64, torch.compile.

gradcheck needs a function that gives the same on every rank, of inputs that are the same on every rank. So all ranks
hold all ranks' inputs; `taken` gives a rank its own (its gradient is summed over the ranks), and `shown` makes a result
that all ranks have count once.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import unisono
from tests.fused.cases import numbers
from unisono.fused import operators as fused_ops
from unisono.group import names as groups


class Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole, name, rank):
        ctx.name, ctx.rank, ctx.shape = name, rank, whole.shape
        return whole[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        whole = torch.stack([grad if r == ctx.rank else torch.zeros_like(grad) for r in range(ctx.shape[0])])
        return (
            fused_ops.reduce_values(whole.reshape(-1), ctx.name, [], "sum", ctx.rank, ctx.shape[0]).view(ctx.shape),
            None,
            None,
        )


class Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, size):
        ctx.size = size
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.size, None


def values(*shape, seed):
    return numbers(*shape, dtype=torch.float64, seed=(7, 0, 0, seed)).clone().requires_grad_()


def put_together(y, group, counts):
    """All ranks' results behind one another."""
    return fused_ops.gather_values(y.reshape(-1), groups.name_of(group), counts, group.rank, group.size)


def check_all_reduce(group, reduce_op, backward, split_item):
    name, rank, size = groups.name_of(group), group.rank, group.size
    whole = [
        values(size, 3, 2, seed=1),
        values(size, 2, 2, seed=2),
        values(size, 2, 2, seed=3),
        values(size, 2, seed=4),
    ]
    residual = values(3, 2, seed=5)

    def fused(x, w, v, b, residual):
        x, w, v, b = (Taken.apply(t, name, rank) for t in (x, w, v, b))
        options = {"bias": [b, b], "reduce_op": reduce_op, "scale": 0.5, "backward": backward}
        if split_item == 0:
            y = unisono.grouped_matmul_all_reduce([x, x[:2]], [w, v], group, **options)
        else:
            y = unisono.grouped_matmul_all_reduce(
                [x], [w, v], group, group_list=[1, 2], split_item=3, residual=residual, **options
            )
        y = torch.cat([t.reshape(-1) for t in y])
        return Shown.apply(y, size) if backward == "all_reduce" else y

    inputs = (*whole, residual)
    if split_item == 0:
        return gradcheck(lambda x, w, v, b: fused(x, w, v, b, None), whole)
    # Every rank has the residual, so its gradient must not be divided by Shown: check it with identity only.
    if backward == "all_reduce":
        return gradcheck(lambda x, w, v, b: fused(x, w, v, b, residual.detach()), whole)
    return gradcheck(fused, inputs)


@pytest.mark.parametrize("split_item", [0, 3])
@pytest.mark.parametrize("backward", ["all_reduce", "identity"])
@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max"])
@pytest.mark.parametrize("size", [2])
def test_gradcheck_all_reduce(pool, size, reduce_op, backward, split_item):
    assert pool.run(check_all_reduce, reduce_op, backward, split_item) == [True] * size


def check_reduce_scatter(group, twice):
    name, rank, size = groups.name_of(group), group.rank, group.size
    whole = [values(size, 3, 2, seed=1), values(size, 2, 2, seed=2), values(size, 2, seed=4)]
    splits = {1: (3,), 2: (2, 1), 3: (1, 0, 2)}[size]

    def fused(x, w, b):
        x, w, b = (Taken.apply(t, name, rank) for t in (x, w, b))
        y = unisono.grouped_matmul_reduce_scatter(
            [x, x], [w, w * 2], group, bias=[b, b], split_sizes=[splits, splits[::-1]], scale=2.0
        )
        counts = [2 * (a + b) for a, b in zip(splits, splits[::-1], strict=True)]
        return Shown.apply(put_together(torch.cat(y), group, counts), size)

    return (gradgradcheck if twice else gradcheck)(fused, whole)


@pytest.mark.parametrize("size, twice", [(2, False), (3, False), (1, True)])
def test_gradcheck_reduce_scatter(pool, size, twice):
    assert pool.run(check_reduce_scatter, twice) == [True] * size


def check_all_gather(group):
    name, rank, size = groups.name_of(group), group.rank, group.size
    rows = [2, 0, 1][:size]
    whole = [values(size, 2, 2, seed=1), values(size, 2, 3, seed=2), values(size, 3, seed=4)]

    def fused(x, w, b):
        x, w, b = (Taken.apply(t, name, rank) for t in (x, w, b))
        y = unisono.all_gather_matmul(x[: rows[rank]], w, group, bias=b, split_sizes=rows, scale=0.5)
        z = unisono.all_gather_grouped_matmul([x], [w, w], group, group_list=[1, size * 2 - 1], split_item=3)
        both = torch.cat([y.reshape(-1), z[0].reshape(-1)])
        return Shown.apply(put_together(both, group, [both.numel()] * size), size)

    return gradcheck(fused, whole)


@pytest.mark.parametrize("size", [2, 3])
def test_gradcheck_all_gather(pool, size):
    assert pool.run(check_all_gather) == [True] * size


# -- 16-bit gradients: float32 sums, one rounding


def gradients(group, dtype, weights):
    size = group.size
    x = [numbers(40, 64, dtype=dtype, seed=(3, r, 0, 1)) for r in range(size)]
    w = [numbers(64, 48, dtype=dtype, seed=(3, r, 0, 2)) for r in range(size)]
    g = [numbers(40, 48, dtype=dtype, seed=(3, r, 0, 3)) for r in range(size)]
    mine_x = x[group.rank].clone().requires_grad_()
    mine_w = w[group.rank].clone().requires_grad_(weights == "plain")
    given = mine_w if weights == "plain" else unisono.PreparedWeight(mine_w)
    b = torch.zeros(1, 48, dtype=torch.float32, requires_grad=True)
    y = unisono.matmul_all_reduce(mine_x, given, group, bias=b)
    y.backward(g[group.rank])
    total = sum(t.double() for t in g)
    wanted = {"x": (mine_x, total @ w[group.rank].double().t()), "b": (b, total.sum(0, keepdim=True) / size)}
    if weights == "plain":
        wanted["w"] = (mine_w, x[group.rank].double().t() @ total)
    for name, (tensor, ref) in wanted.items():
        assert tensor.grad.dtype == tensor.dtype
        error = (tensor.grad.double() - ref).abs()
        limit = ref.abs() * torch.finfo(tensor.dtype).eps * 0.51 + 1e-4
        assert bool((error <= limit).all()), f"{name}: {(error / limit).max()}"
    with torch.no_grad():
        assert not unisono.matmul_all_reduce(mine_x, given, group).requires_grad


@pytest.mark.parametrize("weights", ["plain", "prepared"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_rounded_once(pool, size, dtype, weights):
    pool.run(gradients, dtype, weights)


def in_place_after(group):
    x = torch.ones(2, 3, requires_grad=True)
    y = unisono.grouped_matmul_all_reduce([x, x], [torch.ones(3, 2), torch.ones(3, 4)], group)
    y[0].mul_(2)
    (y[0].sum() + y[1].sum()).backward()
    return x.grad.tolist()


@pytest.mark.parametrize("size", [2])
def test_outputs_may_be_changed_in_place(pool, size):
    # Both ranks' losses, so 2 * (2 * 2 + 4).
    assert pool.run(in_place_after) == [[[16.0] * 3] * 2] * 2


# -- torch.compile


def compiled(group, kind, dynamic):
    torch._dynamo.reset()

    def run(x, w, b):
        if kind == "all_reduce":
            y = unisono.grouped_matmul_all_reduce([x, x * 2], [w, w], group, bias=[b, b], scale=0.5)
            return y[0] + y[1]
        if kind == "grouped":
            return unisono.grouped_matmul_all_reduce([x], [w, w, w], group, group_list=[1, 2, 1], split_item=3)[
                0
            ].relu()
        if kind == "reduce_scatter":
            return unisono.matmul_reduce_scatter(x, w, group, bias=b, split_sizes=[1, x.shape[0] - 1]) * 2
        return unisono.all_gather_matmul(x, w, group, bias=b)

    fast = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (4, 4) if kind == "grouped" or not dynamic else (4, 6, 9):
        results = []
        for f in (run, fast):
            x = numbers(rows, 8, dtype=torch.float32, seed=(1, group.rank, 0, 1)).clone().requires_grad_()
            w = numbers(8, 5, dtype=torch.float32, seed=(1, group.rank, 0, 2)).clone().requires_grad_()
            b = numbers(5, dtype=torch.float32, seed=(1, group.rank, 0, 3)).clone().requires_grad_()
            y = f(x, w, b)
            y.square().sum().backward()
            results.append((y, x.grad, w.grad, b.grad))
        for eager, other in zip(*results, strict=True):
            assert (eager is None) == (other is None)
            if eager is not None:
                torch.testing.assert_close(other, eager)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, w, b), y)
    torch._dynamo.reset()


KINDS = ("all_reduce", False), ("all_reduce", True), ("grouped", False), ("reduce_scatter", True), ("all_gather", True)


@pytest.mark.parametrize("kind, dynamic", KINDS)
@pytest.mark.parametrize("size", [2])
def test_compile(pool, size, kind, dynamic):
    pool.run(compiled, kind, dynamic)


def opcheck(group):
    name, seat, ops = groups.name_of(group), (group.rank, group.size), torch.ops.unisono
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    how = [4], [5], [], "sum", 1.0, 0.5, 0, "all_reduce", 0, 0
    product = ([x], [w], [torch.randn(5)], None, "x", name, *how, *seat)
    for op, arguments in (
        (ops.matmul_reduce, product),
        (ops.reduce_values, (torch.randn(12), name, [], "sum", *seat)),
        (ops.gather_values, (torch.randn(group.rank + 1), name, [1, 2], *seat)),
    ):
        # The schema and the fake; the autograd tests of opcheck run ranks apart, so they are not used here.
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("size", [2])
def test_operators_are_what_they_say(pool, size):
    pool.run(opcheck)
