"""Gradients of every function, by torch's gradcheck on the whole program of all ranks.

gradcheck runs in step on every rank, on a function of *all* ranks' inputs that returns *all* ranks' outputs. `Mine`
takes this rank's input out of them and `All` puts the outputs together, each the other's backward, by plain calls of
the group that know nothing of comm_func. So a numeric derivative of rank 1's output by rank 0's input is compared with
what the backward gave to rank 0.
"""

import pytest
import torch
from torch.autograd import Function, forward_ad, gradcheck, gradgradcheck

from tests.functional.worlds import world
from unisono import comm_func


class Mine(Function):
    @staticmethod
    def forward(ctx, group, counts, everything):
        ctx.facts = group, counts
        start = sum(counts[: group.rank])
        return everything[start : start + counts[group.rank]].clone()

    @staticmethod
    def backward(ctx, grad):
        return None, None, All.apply(*ctx.facts, grad)


class All(Function):
    @staticmethod
    def forward(ctx, group, counts, mine):
        ctx.facts = group, counts
        out = torch.empty(sum(counts), dtype=mine.dtype)
        group.all_gather(out, mine.detach().contiguous(), counts)
        return out

    @staticmethod
    def backward(ctx, grad):
        return None, None, Mine.apply(*ctx.facts, grad)


def program(group, shapes, call):
    """A function of all ranks' inputs, flat behind one another, to all ranks' outputs."""
    counts = [torch.Size(shape).numel() for shape in shapes]

    def whole(everything):
        out = call(Mine.apply(group, counts, everything).reshape(shapes[group.rank]))
        sizes = torch.empty(group.size, dtype=torch.int64)
        group.all_gather(sizes, torch.tensor([out.numel()]))
        return All.apply(group, sizes.tolist(), out.reshape(-1))

    return whole, sum(counts)


def inputs_of(count, dtype=torch.float64):
    return torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=dtype).requires_grad_()


LINEAR = {
    "all_reduce sum": lambda x, g: comm_func.all_reduce(x, "sum", g)[0],
    "all_reduce avg": lambda x, g: comm_func.all_reduce(x, "avg", g)[0],
    "all_reduce premul": lambda x, g: comm_func.all_reduce(x, torch.distributed._make_nccl_premul_sum(1.5), g)[0],
    "all_reduce async": lambda x, g: comm_func.all_reduce(x, "sum", g, async_op=True)[1].result(),
    "all_gather": lambda x, g: comm_func.all_gather_into_tensor(x, g)[0],
    "all_gather async": lambda x, g: comm_func.all_gather_into_tensor(x, g, async_op=True)[1].result(),
    "reduce_scatter sum": lambda x, g: comm_func.reduce_scatter_tensor(x, "sum", g)[0],
    "reduce_scatter avg": lambda x, g: comm_func.reduce_scatter_tensor(x, "avg", g)[0],
    "broadcast": lambda x, g: comm_func.broadcast(x, 1, g),
    "reduce sum": lambda x, g: comm_func.reduce(x, 1, "sum", g),
    "reduce avg": lambda x, g: comm_func.reduce(x, 0, "avg", g),
    "scatter": lambda x, g: comm_func.scatter_tensor(x, 1, g),
    "gather": lambda x, g: comm_func.gather_into_tensor(x, 1, g),
    "all_to_all single": lambda x, g: comm_func.all_to_all_single_with_output_shape(x.shape, x, group=g)[0],
    "all_to_all list": lambda x, g: torch.cat(
        [t.reshape(-1) for t in comm_func.all_to_all_with_output_shape([(2, 2), (4,)], [x[:2], x[2:]], g)[0]]
    ),
}
OTHER = {
    f"{function.__name__} {op}": lambda x, g, f=function, op=op: f(x, op, g)[0]
    for function in (comm_func.all_reduce, comm_func.reduce_scatter_tensor)
    for op in ("min", "max", "prod")
} | {f"reduce {op}": lambda x, g, op=op: comm_func.reduce(x, 1, op, g) for op in ("min", "max", "prod")}


def _check(group, kind, folder, names):
    torch.manual_seed(1)
    with world(group, kind, folder) as where:
        for name in names:
            call = {**LINEAR, **OTHER}[name]
            whole, count = program(group, [(4, 2)] * group.size, lambda x, call=call: call(x, where))
            x = inputs_of(count)
            assert whole(x).requires_grad, name
            assert gradcheck(whole, (x,)), name
            if name in LINEAR or name.endswith("prod"):
                assert gradgradcheck(whole, (x,), fast_mode=True), name


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("name", [*LINEAR, *OTHER])
def test_gradcheck(pool, size, name, tmp_path):
    pool.run(_check, "Group", str(tmp_path), [name])


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", ["unisono", "gloo"])
def test_gradcheck_on_process_groups(pool, size, kind, tmp_path):
    pool.run(_check, kind, str(tmp_path), ["all_reduce sum", "reduce_scatter avg", "broadcast", "gather", "reduce max"])


def _uneven(group, kind, folder, splits):
    torch.manual_seed(2)
    with world(group, kind, folder) as where:

        def gather(x):
            return comm_func.all_gather_into_tensor_uneven(x, splits, where)[0]

        def scatter(x, op):
            return comm_func.reduce_scatter_tensor_uneven(x, splits, op, where)[0]

        def exchange(x):
            sent = [n * (group.rank + 1) for n in splits]
            got = [splits[group.rank] * (r + 1) for r in range(group.size)]
            shape = (sum(got), 2)
            return comm_func.all_to_all_single_with_output_shape(shape, x, got, sent, where)[0]

        total = sum(splits)
        programs = {
            "all_gather": ([(n, 2) for n in splits], gather),
            "all_to_all": ([(total * (r + 1), 2) for r in range(group.size)], exchange),
        }
        for op in ("sum", "avg", "max", "prod") if group.size == 2 else ("sum", "max"):
            programs[f"reduce_scatter {op}"] = [(total, 2)] * group.size, lambda x, op=op: scatter(x, op)
        for name, (shapes, call) in programs.items():
            whole, count = program(group, shapes, call)
            x = inputs_of(count)
            assert gradcheck(whole, (x,), fast_mode=group.size > 2), name
            if "max" not in name and group.size == 2:
                assert gradgradcheck(whole, (x,), fast_mode=True), name


@pytest.mark.parametrize("size, splits", [(2, [1, 3]), (2, [0, 2]), (2, [3, 0]), (3, [0, 2, 1])])
@pytest.mark.parametrize("kind", ["Group", "gloo"])
def test_uneven(pool, size, splits, kind, tmp_path):
    pool.run(_uneven, kind, str(tmp_path), splits)


def _ties(group):
    """Equal elements share the gradient, zeros are no exception to the product, a NaN that is chosen gets all of it."""
    a = torch.tensor([1.0, 2.0, 0.0, 0.0, float("nan"), 5.0])
    b = torch.tensor([1.0, 3.0, 0.0, 4.0, 1.0, 2.0])
    weight = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0])
    grads = {}
    for op in ("max", "min", "prod"):
        x = (a, b)[group.rank].clone().requires_grad_()
        y, _ = comm_func.all_reduce(x, op, group)
        (y * weight * (1 + group.rank)).sum().backward()  # 3 * weight over both ranks
        grads[op] = x.grad.tolist()
    return grads


@pytest.mark.parametrize("size", [2])
def test_ties_zeros_and_nan(pool, size):
    first, second = pool.run(_ties)
    assert first["max"] == [1.5, 0.0, 150.0, 0.0, 30000.0, 300000.0]
    assert second["max"] == [1.5, 30.0, 150.0, 3000.0, 0.0, 0.0]
    assert first["min"] == [1.5, 30.0, 150.0, 3000.0, 30000.0, 0.0]
    assert second["min"] == [1.5, 0.0, 150.0, 0.0, 0.0, 300000.0]
    assert first["prod"][:4] == [3.0, 90.0, 0.0, 12000.0] and first["prod"][5] == 600000.0
    assert second["prod"][:4] == [3.0, 60.0, 0.0, 0.0] and second["prod"][5] == 1500000.0


def _complex(group):
    torch.manual_seed(3)
    for call in (LINEAR["all_reduce sum"], LINEAR["reduce_scatter avg"], OTHER["all_reduce prod"], LINEAR["gather"]):
        whole, count = program(group, [(4, 1)] * group.size, lambda x, call=call: call(x, group))
        assert gradcheck(whole, (inputs_of(count, dtype=torch.complex128),))


@pytest.mark.parametrize("size", [2])
def test_complex(pool, size):
    pool.run(_complex)


def _no_graph(group):
    """No graph where none is asked for; a result without gradient can be written to."""
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        y, _ = comm_func.all_reduce(x, group=group)
    assert not y.requires_grad and y.grad_fn is None
    y.add_(1)
    assert x.tolist() == [1.0] * 4
    z, _ = comm_func.all_reduce(x.detach(), group=group)
    assert not z.requires_grad
    integers, _ = comm_func.all_reduce(torch.arange(3), group=group)
    assert integers.tolist() == [0, group.size, 2 * group.size]


@pytest.mark.parametrize("size", [2])
def test_without_gradient(pool, size):
    pool.run(_no_graph)


def _step(group, steps):
    """A data-parallel training step in a few lines: the same parameters on every rank as with all data on one."""
    torch.manual_seed(0)
    data = torch.randn(8, 3, dtype=torch.float64)
    want = data @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def train(rows, mean):
        w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        for _ in range(steps):
            loss = mean(((data[rows] @ w - want[rows]) ** 2).mean())
            (grad,) = torch.autograd.grad(loss, w)
            with torch.no_grad():
                w -= 0.1 * grad
        return w

    share = slice(group.rank * 8 // group.size, (group.rank + 1) * 8 // group.size)
    # The gradient of the mean of all ranks' losses, each by its own copy of w: this rank's part of it.
    apart = train(share, lambda loss: loss)
    alone = train(slice(None), lambda loss: loss)
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        same, _ = comm_func.all_reduce(w, "avg", group)  # backward: the average of the ranks' gradients
        loss = ((data[share] @ same - want[share]) ** 2).mean()
        (grad,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w -= 0.1 * grad
    assert torch.allclose(w, alone) and not torch.allclose(w, apart)


@pytest.mark.parametrize("size", [2])
def test_training(pool, size):
    pool.run(_step, 5)


def _tangents(group):
    tensor, told = torch.ones(2), []
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensor, tensor)
        calls = (
            lambda t: comm_func.all_reduce(t, group=group),
            lambda t: comm_func.broadcast(t, group=group),
            lambda t: comm_func.all_to_all_with_output_shape([[2], [2]], [tensor, t], group),
        )
        for call in calls:
            call(tensor)  # none there: as ever
            try:
                call(dual)
            except NotImplementedError as error:
                told.append(str(error))
    return told


@pytest.mark.parametrize("size", [2])
def test_tangents_are_refused(pool, size):
    for told in pool.run(_tangents):
        assert len(told) == 3 and all("forward-mode" in words for words in told)
