"""A small training loop as scripts for Ascend have it, for any backend and device: data-parallel with shards of data of
different sizes, and an optimizer whose state is sharded by uneven collectives."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS = [5, 3]  # samples per step of each rank
STEPS = 6


def _data(rank):
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(ROWS[rank], 6, generator=generator)
    return x, x.sum(-1, keepdim=True).tanh()


def _model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 1))


def train_replicated(rank, device):
    """DDP over shards of different sizes; one rank has a step more, which join() sees through."""
    module = _model().to(device)
    ids = [device.index] if device.type == "npu" else None
    model = DistributedDataParallel(module, device_ids=ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    x, y = (part.to(device, non_blocking=True) for part in _data(rank))
    losses = []
    with model.join():
        for _ in range(STEPS - rank):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, [p.detach().cpu() for p in module.parameters()]


def train_sharded(rank, device, uneven):
    """Every rank steps its own part of the parameters; parts have different sizes and are never padded."""
    module = _model().to(device)
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    splits = [flat.numel() // 3, flat.numel() - flat.numel() // 3]
    mine = flat.split(splits)[rank].clone().requires_grad_()
    optimizer = torch.optim.AdamW([mine], lr=0.05)
    x, y = (part.to(device) for part in _data(rank))
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(module(x), y, reduction="sum") / sum(ROWS)
        grads = torch.autograd.grad(loss, list(module.parameters()))
        mine.grad = torch.empty_like(mine)
        whole = torch.cat([grad.reshape(-1) for grad in grads])
        work = uneven.reduce_scatter_tensor_uneven(mine.grad, whole, splits, async_op=True)
        work.wait()
        optimizer.step()
        uneven.all_gather_into_tensor_uneven(flat, mine.detach(), splits)
        nn.utils.vector_to_parameters(flat, module.parameters())
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, [p.detach().cpu() for p in module.parameters()]
