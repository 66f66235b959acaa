"""torch.compile(fullgraph=True) of functions with collectives, against the same functions uncompiled and on gloo.

`aot_eager` shows that the graph is captured and right; two cases go through inductor, which needs a C++ compiler.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.torch_stack.worlds import detached, differences, randn


def mine(*shape: int) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 7 + dist.get_rank() * 3) % 11 - 5.0).reshape(shape)


def functional(x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    y = fc.all_reduce(x * 2, "sum", group) + fc.all_reduce(x, "max", group)
    gathered = fc.all_gather_single(y[:2], 0, group)
    scattered = fc.reduce_scatter_single(gathered, "sum", 0, group)
    swapped = fc.all_to_all_single(x, None, None, group)
    a, b = fc.all_reduce_coalesced([x, swapped], "sum", group)
    return scattered.sum() + a + b + fc.broadcast(x, 1, group)


def rewritten(x: torch.Tensor) -> torch.Tensor:
    """The functions of torch.distributed themselves, which dynamo rewrites."""
    x = x.clone()
    dist.all_reduce(x)
    gathered = x.new_empty(16, 3)
    dist.all_gather_into_tensor(gathered, x)
    scattered = torch.empty(4, 3)
    dist.reduce_scatter_tensor(scattered, gathered)
    swapped = torch.empty_like(x)
    dist.all_to_all_single(swapped, x)
    listed = [torch.empty_like(x) for _ in range(4)]
    dist.all_gather(listed, swapped + scattered)
    return torch.stack(listed).sum(0) * 2


def on_a_subgroup(x: torch.Tensor) -> torch.Tensor:
    group = subgroups[dist.get_rank() // 2]
    y = fc.all_reduce(x, "sum", group)
    dist.all_reduce(y, op=dist.ReduceOp.MAX, group=group)
    return y + 1


subgroups: list = []


def messages(x: torch.Tensor) -> torch.Tensor:
    rank = dist.get_rank()
    got = torch.zeros_like(x)
    ops = [dist.P2POp(dist.isend, x * 2, (rank + 1) % 4), dist.P2POp(dist.irecv, got, (rank - 1) % 4)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got + 1


FUNCTIONS = {f.__name__: f for f in (functional, rewritten, on_a_subgroup, messages)}


def compiled(name: str, backend: str) -> list:
    torch._dynamo.reset()
    function, x = FUNCTIONS[name], mine(4, 3)
    if name == "on_a_subgroup":
        subgroups[:] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    on = torch._dynamo.config.patch(enable_p2p_compilation=True) if name == "messages" else contextlib.nullcontext()
    with on:
        made = torch.compile(function, backend=backend, fullgraph=True)
        results = [made(x), made(x + 1)]
    assert not differences(detached(results), detached([function(x), function(x + 1)]))
    return results


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs(stack, name):
    stack.compare(compiled, name, "aot_eager")


@pytest.mark.skipif(" " in torch.__file__, reason="torch's inductor does not quote its own path for the linker")
@pytest.mark.parametrize("name", [pytest.param("rewritten", marks=pytest.mark.slow), "functional"])
def test_inductor(stack, name):
    stack.compare(compiled, name, "inductor")


def gradient() -> list:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathered = fc.all_gather_single_autograd(x @ w, 0, dist.group.WORLD)
        return fc.reduce_scatter_single_autograd(gathered.relu(), "sum", 0, dist.group.WORLD).square().sum()

    w = torch.arange(6.0).reshape(3, 2).requires_grad_()
    loss(mine(4, 3), w).backward()
    return [w.grad]


def test_gradients(stack):
    stack.compare(gradient)


def trained(compiler: str | None) -> dict:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 1)), bucket_cap_mb=1
    )  # dynamo cuts the graph where a bucket of at least 1 MiB is full
    made = torch.compile(model, backend=compiler) if compiler else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        made(randn(5, 16, by=(dist.get_rank(), step))).square().mean().backward()
        optimizer.step()
    return detached(model.state_dict())


def test_compiled_ddp(stack):
    stack.compare(trained, "aot_eager", tolerance=1e-5)


def in_place_of_out() -> list:
    """The `_out` operators inside of a graph."""
    torch._dynamo.reset()
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name

    @torch.compile(backend="aot_eager", fullgraph=True)
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gathered, scattered = x.new_zeros(16, 3), x.new_zeros(1, 3)
        ops.wait_tensor(ops.all_gather_into_tensor_out(x, 4, name, out=gathered))
        ops.wait_tensor(ops.reduce_scatter_tensor_out(x, "max", 4, name, out=scattered))
        return gathered + 1, scattered + 1

    return list(both(mine(4, 3)))


def test_operators_with_out(stack):
    stack.compare(in_place_of_out)
