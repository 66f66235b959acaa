"""torch.compile with one graph, fake tensors, opcheck and dynamic shapes, for every function and both memories."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tests.functional.worlds import world
from unisono import comm_func
from unisono.comm_func import operators
from unisono.testing import run_ranks


@torch.compiler.assume_constant_result
def _rank(g):
    return comm_func.get_rank(g)


def _share(x, g):
    """1 row on rank 0, 3 on rank 1."""
    return x[:1] * 3 if _rank(g) == 0 else x[1:] * 3


# Each takes a tensor of 4 rows and a group, and does something before and after the call.
CALLS = {
    "all_reduce": lambda x, g: comm_func.all_reduce(x * 3, "sum", g)[0] + 1,
    "all_reduce max": lambda x, g: comm_func.all_reduce(x * 3, dist.ReduceOp.MAX, g)[0] + 1,
    "all_gather": lambda x, g: comm_func.all_gather_into_tensor(x * 3, g)[0] + 1,
    "reduce_scatter": lambda x, g: comm_func.reduce_scatter_tensor(x * 3, "avg", g)[0] + 1,
    "all_gather uneven": lambda x, g: comm_func.all_gather_into_tensor_uneven(_share(x, g), [1, 3], g)[0] + 1,
    "reduce_scatter uneven": lambda x, g: (
        comm_func.reduce_scatter_tensor_uneven(x * 3, [0, x.shape[0]], "sum", g)[0] + 1
    ),
    "reduce": lambda x, g: comm_func.reduce(x * 3, 1, "sum", g) + 1,
    "broadcast": lambda x, g: comm_func.broadcast(x * 3, 1, g) + 1,
    "scatter": lambda x, g: comm_func.scatter_tensor(x * 3, 1, g) + 1,
    "gather": lambda x, g: comm_func.gather_into_tensor(x * 3, 1, g) + 1,
    "all_to_all single": lambda x, g: (
        comm_func.all_to_all_single_with_output_shape((4, *x.shape[1:]), x * 3, [2, 2], [2, 2], group=g)[0] + 1
    ),
    "all_to_all list": lambda x, g: comm_func.all_to_all_with_output_shape([x[:2], x[2:]], [x[:2] * 3, x[2:]], g)[0][0],
}


def _async(x, g):
    first, handle = comm_func.all_reduce(x * 2, "sum", g, async_op=True)
    second, other = comm_func.all_gather_into_tensor(x, g, async_op=True)
    handle.wait()
    other.wait()
    return first.sum() + second, handle


def _compiled(group, kind, folder, names, backend):
    with world(group, kind, folder) as where:
        for name in names:
            call = CALLS[name]
            compiled = torch.compile(
                lambda x, call=call: call(x, where), fullgraph=True, backend=backend, dynamic=False
            )
            x = torch.arange(12.0).reshape(4, 3) + group.rank
            assert torch.equal(compiled(x), call(x, where)), f"{kind} {name}"
            grads = []
            for function in (compiled, lambda x, call=call: call(x, where)):
                x = (torch.arange(12.0).reshape(4, 3) + group.rank).requires_grad_()
                (function(x) * (group.rank + 1)).sum().backward()
                grads.append(x.grad)
            assert torch.equal(*grads), f"{kind} {name}: {grads}"
            torch.compiler.reset()


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("name", CALLS)
def test_full_graph(pool, size, name, tmp_path):
    pool.run(_compiled, "Group", str(tmp_path), [name], "aot_eager")


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", ["unisono", "unisono group", "unisono name", "gloo"])
def test_full_graph_on_process_groups(pool, size, kind, tmp_path):
    pool.run(_compiled, kind, str(tmp_path), ["all_reduce", "all_gather uneven", "broadcast"], "aot_eager")


def _by_inductor(function, *arguments):
    """In fresh ranks and with time: inductor compiles C++, in processes that stay unless told."""
    return run_ranks(2, function, *arguments, timeout_s=350, env={"TORCHINDUCTOR_COMPILE_THREADS": "1"})


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter uneven", "all_gather uneven", "gather"])
def test_full_graph_by_inductor(name, tmp_path):
    _by_inductor(_compiled, "Group", str(tmp_path), [name], "inductor")


def _unused(group, backend):
    """Calls whose results are unused or empty, on this rank or on all, are made all the same, and in their order."""

    def call(x):
        comm_func.all_reduce(x, "sum", group)
        none, _ = comm_func.reduce_scatter_tensor_uneven(x, [0, x.shape[0]], "sum", group)
        gathered, _ = comm_func.all_gather_into_tensor(x, group)
        comm_func.broadcast(x, 0, group)
        return none if group.rank == 0 else gathered

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    x = torch.arange(6.0).reshape(2, 3) + group.rank
    before = group.calls
    out = compiled(x)
    made = group.calls - before
    assert torch.equal(out, call(x))
    torch.compiler.reset()
    return made


@pytest.mark.parametrize("size", [2])
def test_unused_results(pool, size):
    assert pool.run(_unused, "aot_eager") == [4, 4]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_unused_results_by_inductor():
    assert _by_inductor(_unused, "inductor") == [4, 4]


def _handles(group):
    compiled = torch.compile(lambda x: _async(x, group), fullgraph=True, backend="aot_eager")
    x = torch.arange(3.0) + group.rank
    out, handle = compiled(x)
    assert torch.equal(out, _async(x, group)[0])
    handle.wait()
    assert handle.is_completed() and handle.exception() is None
    assert torch.equal(handle.result(), comm_func.all_reduce(x * 2, "sum", group)[0])
    torch.compiler.reset()


@pytest.mark.parametrize("size", [2])
def test_async_in_a_graph(pool, size):
    pool.run(_handles)


def _dynamic(group):
    """One graph serves every number of rows."""
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return module

    def call(x):
        gathered, _ = comm_func.all_gather_into_tensor(x, group)
        scattered, _ = comm_func.reduce_scatter_tensor(gathered * 2, "sum", group)
        first, _ = comm_func.all_gather_into_tensor_uneven(scattered, [x.shape[0]] * 2, group)
        return comm_func.all_reduce(first, "max", group)[0].sum() + comm_func.broadcast(x, 0, group)

    compiled = torch.compile(call, fullgraph=True, backend=counting, dynamic=True)
    for rows in (4, 6, 10, 3):
        x = torch.randn(rows, 3)
        assert torch.equal(compiled(x), call(x))
    torch.compiler.reset()
    return len(graphs)


@pytest.mark.parametrize("size", [2])
def test_dynamic_shapes(pool, size):
    assert pool.run(_dynamic) == [1, 1]


def _arguments(group, folder):
    """One compiled function, called with other ops and other groups: no graph answers for another."""
    compiled = torch.compile(lambda x, op, g: comm_func.all_reduce(x, op, g)[0], fullgraph=True, backend="aot_eager")
    alone = group.split([group.rank])
    x = torch.tensor([1.0, 5.0]) if group.rank == 0 else torch.tensor([3.0, 2.0])
    answers = {"sum": [4.0, 7.0], "max": [3.0, 5.0], "min": [1.0, 2.0], "prod": [3.0, 10.0]}
    with world(group, "unisono", folder) as _:
        mine = dist.new_group([group.rank], use_local_synchronization=True)
        for op in ("max", dist.ReduceOp.PRODUCT):
            name = op if isinstance(op, str) else {"PRODUCT": "prod"}.get(op.name, op.name.lower())
            for where in (None, group, dist.group.WORLD, group.key, "world"):
                assert compiled(x, op, where).tolist() == answers[name], (op, where)
            for where in (alone, mine, mine.group_name):
                assert compiled(x, op, where).tolist() == x.tolist(), (op, where)
            torch.compiler.reset()  # or there are more graphs than torch keeps for one function
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, "max"):
            name = op if isinstance(op, str) else {"PRODUCT": "prod"}.get(op.name, op.name.lower())
            assert compiled(x, op, group).tolist() == answers[name], op
        dist.destroy_process_group(mine)
    alone.close()
    torch.compiler.reset()


@pytest.mark.parametrize("size", [2])
def test_other_arguments_are_other_graphs(pool, size, tmp_path):
    pool.run(_arguments, str(tmp_path))


def _regrouped(group, folder):
    """A graph made for the default group runs on whatever is the default group later, of the same size."""
    compiled = torch.compile(lambda x: comm_func.all_reduce(x)[0], fullgraph=True, backend="aot_eager")
    for kind in ("unisono", "gloo", "unisono"):
        with world(group, kind, folder):
            assert compiled(torch.ones(3)).tolist() == [2.0] * 3
    alone = group.split([group.rank])
    with world(alone, "gloo", f"{folder}/{group.rank}"), pytest.raises(RuntimeError, match="compiled for rank"):
        compiled(torch.ones(3))
    alone.close()
    torch.compiler.reset()


@pytest.mark.parametrize("size", [2])
def test_default_group_is_looked_up_when_the_graph_runs(pool, size, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    pool.run(_regrouped, str(tmp_path))


def _samples(group):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(group.rank))
    here = (group.rank, group.size, group.key)
    uneven = [1, 3] if group.size == 2 else [4]
    return [
        (operators.all_reduce, (x, "sum", 1.0, *here)),
        (operators.all_reduce, (x, "max", 1.0, *here)),
        (operators.all_reduce, (x, "prod", 1.0, *here)),
        (operators.all_gather, (x, 4 * group.size, None, *here)),
        (operators.all_gather, (x[: uneven[group.rank]], 4, [3 * n for n in uneven], *here)),
        (operators.reduce_scatter, (x, 2, None, "avg", 1.0, *here)),
        (operators.reduce_scatter, (x, [0, 4][group.rank], [0, 12], "min", 1.0, *here)),
        (operators.reduce, (x, 1, "sum", 1.0, *here)),
        (operators.reduce, (x, 0, "max", 1.0, *here)),
        (operators.broadcast, (x, 1, *here)),
        (operators.scatter, (x, 2, 1, *here)),
        (operators.gather, (x, 8, 1, *here)),
        (operators.all_to_all, (x, 4, None, None, *here)),
        (operators.all_to_all, (x, [6, 2][group.rank], [[9, 9], [3, 3]][group.rank], [9, 3], *here)),
    ]


def _opcheck(group, index):
    for grad in (False, True):
        operator, arguments = _samples(group)[index]
        opcheck(operator, (arguments[0].requires_grad_(grad), *arguments[1:]))


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("index", range(14))
def test_opcheck(pool, size, index):
    pool.run(_opcheck, index)


def _fake(group, kind, folder):
    """Fake tensors give shapes and dtypes and move nothing: only rank 0 makes the calls."""
    with world(group, kind, folder) as where:
        if group.rank == 0:
            with FakeTensorMode() as mode:
                x = mode.from_tensor(torch.ones(4, 3, dtype=torch.bfloat16))
                for function, want in (
                    (lambda: comm_func.all_reduce(x, "max", where)[0], (4, 3)),
                    (lambda: comm_func.all_reduce(x, "max", where, async_op=True)[1].result(), (4, 3)),
                    (lambda: comm_func.all_gather_into_tensor(x, where)[0], (8, 3)),
                    (lambda: comm_func.all_gather_into_tensor_uneven(x, [4, 3], where)[0], (7, 3)),
                    (lambda: comm_func.reduce_scatter_tensor(x, "sum", where)[0], (2, 3)),
                    (lambda: comm_func.reduce_scatter_tensor_uneven(x, [3, 1], "sum", where)[0], (3, 3)),
                    (lambda: comm_func.reduce(x, 0, "sum", where), (4, 3)),
                    (lambda: comm_func.reduce(x, 1, "sum", where), (1,)),
                    (lambda: comm_func.broadcast(x, 0, where), (4, 3)),
                    (lambda: comm_func.scatter_tensor(x, 0, where), (2, 3)),
                    (lambda: comm_func.gather_into_tensor(x, 0, where), (8, 3)),
                    (lambda: comm_func.gather_into_tensor(x, 1, where), (1,)),
                    (lambda: comm_func.all_to_all_single_with_output_shape((6, 2), x, group=where)[0], (6, 2)),
                    (lambda: comm_func.all_to_all_with_output_shape([(2,), (5, 1)], [x, x], where)[0][1], (5, 1)),
                ):
                    out = function()
                    assert tuple(out.shape) == want and out.dtype == torch.bfloat16, (out, want)
        group.barrier()


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", ["Group", "unisono", "gloo"])
def test_fake_tensors(pool, size, kind, tmp_path):
    pool.run(_fake, kind, str(tmp_path))
