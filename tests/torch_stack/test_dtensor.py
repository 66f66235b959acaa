"""DTensor on unisono against gloo: redistribution between all placements, also uneven, on one and two mesh dimensions.

Values are whole numbers, so that sums have the same bits in any order.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.torch_stack.worlds import randn

PLACEMENTS = [Replicate(), Shard(0), Shard(1), Partial(), Partial("max")]
TARGETS = [Replicate(), Shard(0), Shard(1), Partial()]
SHAPES = [(8, 4), (5, 7), (3, 1), (1, 9)]  # the last ones leave ranks without rows


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 23 - 11.0).reshape(shape)


def as_dtensor(tensor: torch.Tensor, mesh, placements) -> DTensor:
    """A DTensor with these placements; what is Partial holds other numbers on every rank."""
    shards = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(tensor, mesh, shards).to_local()
    if any(p.is_partial() for p in placements):
        local = local * (dist.get_rank() + 1) - dist.get_rank()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def redistributed(dims: int) -> list:
    mesh = init_device_mesh("cpu", (4,) if dims == 1 else (2, 2))
    results = []
    for shape in SHAPES if dims == 1 else SHAPES[:2]:
        for source in itertools.product(PLACEMENTS, repeat=dims):
            if len({p for p in source if p.is_partial()}) > 1:
                continue  # torch has no order for different reductions
            for target in itertools.product(TARGETS, repeat=dims):
                if any(t.is_partial() and s != t for s, t in zip(source, target, strict=True)):
                    continue  # torch cannot make partial sums of anything else
                moved = as_dtensor(whole(shape), mesh, source).redistribute(mesh, target)
                results.append([str(source), str(target), moved.to_local()])
    assert len(results) > 40
    return results


@pytest.mark.parametrize("dims", [1, 2])
def test_redistribute(stack, dims):
    stack.compare(redistributed, dims)


def gradients() -> list:
    """Backward of redistribute and of to_local: the collectives' transposes."""
    mesh = init_device_mesh("cpu", (4,))
    results = []
    for source, target in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
        x = as_dtensor(whole((5, 7)), mesh, [source]).requires_grad_()
        y = x.redistribute(mesh, [target]).to_local()
        (y * torch.arange(y.numel(), dtype=torch.float32).reshape(y.shape)).sum().backward()
        results.append([str(source), str(target), x.grad.to_local()])
    return results


def test_gradients_of_redistribute(stack):
    stack.compare(gradients)


def operators() -> list:
    """Operators that make DTensor communicate by itself."""
    mesh = init_device_mesh("cpu", (4,))
    a = distribute_tensor(whole((7, 5)), mesh, [Shard(0)])
    b = distribute_tensor(whole((5, 9)), mesh, [Shard(0)])
    c = distribute_tensor(whole((7, 5)), mesh, [Shard(1)])
    return [
        (a @ b).full_tensor(),
        (c @ b).full_tensor(),
        (a + c).full_tensor(),
        a.sum(0).full_tensor(),
        a.max().full_tensor(),
        a.mean().full_tensor(),
        torch.cat([a, c]).full_tensor(),
        (a > c).full_tensor(),
        distribute_tensor(whole((3,)), mesh, [Shard(0)]).full_tensor(),
        a.to(torch.bfloat16).full_tensor(),
        a.long().full_tensor(),
    ]


def test_operators(stack):
    stack.compare(operators)


def source_rank() -> list:
    """distribute_tensor scatters or broadcasts rank 0's data, whatever the others have; also from another rank."""
    mesh = init_device_mesh("cpu", (4,))
    mine = whole((6, 3)) * (dist.get_rank() + 1)
    results = [distribute_tensor(mine, mesh, [p]).to_local() for p in (Shard(0), Shard(1), Replicate())]
    results.append(distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=2).to_local())
    module = nn.Linear(3, 3)
    nn.init.constant_(module.weight, dist.get_rank() + 1)
    nn.init.constant_(module.bias, dist.get_rank() + 1)
    results += [p.to_local() for p in distribute_module(module, mesh).parameters()]
    return results


def test_distribution_from_one_rank(stack):
    stack.compare(source_rank)


# --- tensor parallel ----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def tensor_parallel(sequence: bool) -> dict:
    torch.manual_seed(0)
    block, mesh = Block(), init_device_mesh("cpu", (4,))
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan |= {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
    parallelize_module(block, mesh, plan)
    x = randn(2, 8, 8, by=(1,))
    if sequence:
        x = x.chunk(4, dim=1)[dist.get_rank()]
    with loss_parallel():
        out = block(x)
        loss = nn.functional.cross_entropy(out.flatten(0, 1), torch.arange(16) % 10)
        loss.backward()
    grads = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in block.named_parameters()
    }
    return {"loss": loss.full_tensor() if isinstance(loss, DTensor) else loss, **grads}


def one_process() -> dict:
    torch.manual_seed(0)
    block = Block()
    loss = nn.functional.cross_entropy(block(randn(2, 8, 8, by=(1,))).flatten(0, 1), torch.arange(16) % 10)
    loss.backward()
    return {"loss": loss, **{name: p.grad for name, p in block.named_parameters()}}


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel(stack, sequence):
    stack.compare(tensor_parallel, sequence, tolerance=1e-5)


def two_dimensions() -> list:
    """FSDP2 over one dimension of the mesh, tensor parallel over the other."""
    from torch.distributed.fsdp import fully_shard

    from tests.torch_stack.worlds import detached, differences

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    block = Block()
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
    loss = nn.functional.cross_entropy(block(randn(2, 8, 8, by=(1,))).flatten(0, 1), torch.arange(16) % 10)
    loss.backward()
    got = {"loss": loss, **{name: p.grad.full_tensor() for name, p in block.named_parameters()}}
    return differences(detached(got), detached(one_process()), 1e-5)


def test_tensor_parallel_and_fsdp(stack):
    assert stack.run(two_dimensions) == [[]] * 4
