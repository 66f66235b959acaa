"""Plain torch programs on a given process group, for `unisono.bench.share`: one training step or call each.

Nothing in them asks for shared memory: where their tensors lie is decided by how torch allocates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import unisono

Step = Callable[[], torch.Tensor]


class Block(nn.Module):
    """A transformer's feed-forward part, with names that tensor parallelism can point at."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the block's output to its input."""
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def _model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(width), Block(width))


def _training(model: nn.Module, width: int, rank: int, rows: int = 64) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank + 1)
    x = torch.randn(rows, width)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def alone(group: dist.ProcessGroup | None, width: int) -> Step:
    """A training step of one process, without communication."""
    return _training(_model(width), width, 0)


def ddp(group: dist.ProcessGroup, width: int) -> Step:
    """DistributedDataParallel."""
    return _training(DistributedDataParallel(_model(width), process_group=group), width, group.rank())


def fsdp(group: dist.ProcessGroup, width: int) -> Step:
    """FSDP2: parameters are gathered, gradients scattered."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = _model(width)
    for part in [*model, model]:
        fully_shard(part, mesh=mesh)
        part.set_force_sum_reduction_for_comms(True)  # gloo has nothing else
    return _training(model, width, group.rank())


def tensor_parallel(group: dist.ProcessGroup, width: int) -> Step:
    """torch's tensor parallelism by columns and rows, as transformers' plans have it."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = _model(width)
    for part in model:
        parallelize_module(part, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _training(model, width, 0, rows=512)


def fused(group: dist.ProcessGroup, width: int) -> Step:
    """A feed-forward part with the rows split over the ranks, of the fused matmuls on ordinary layers."""
    torch.manual_seed(group.rank())
    part = 4 * width // group.size()
    up, down = nn.Linear(width, part, bias=False), nn.Linear(part, width, bias=False)
    x = torch.randn(512, width)

    def step() -> torch.Tensor:
        with torch.no_grad():
            hidden = nn.functional.gelu(unisono.all_gather_matmul(x, up.weight.t(), group))
            return unisono.matmul_reduce_scatter(hidden, down.weight.t(), group)

    return step


PROGRAMS: dict[str, Callable[[dist.ProcessGroup, int], Step]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "tensor_parallel": tensor_parallel,
    "fused": fused,
}
