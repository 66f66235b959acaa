"""A ZeRO-style optimizer whose parameters are cut at tensor borders instead of padded to equal shards.

    torchrun --nproc-per-node=2 examples/zero_at_borders.py                 # or --backend gloo

All parameters live in one flat buffer, their gradients in another. Each rank owns some whole tensors that lie next to
each other: it gets the average of their gradients, has the optimizer's state for them alone, and hands the new values
to the others. Whole tensors can have optimizers that need whole tensors (Muon, Shampoo). Ranks own different amounts:

    rank 0  [embedding          ]                       reduce_scatter_tensor_uneven: gradients of what I own
    rank 1  [layer 1, layer 2, head]                    all_gather_into_tensor_uneven: everybody's new values

It is checked against plain Adam on one process.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import unisono


def model_of(width):
    """An embedding far larger than the layers after it."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(6)]
    return nn.Sequential(nn.Embedding(16 * width, width), *layers, nn.Linear(width, 10))


def deal(tensors, ranks):
    """Whole tensors for each rank, in order: a rank takes until it has its part of what is left."""
    shards, left = [[] for _ in range(ranks)], sum(t.numel() for t in tensors)
    rank, share = 0, left / ranks
    for t in tensors:
        if rank + 1 < ranks and sum(s.numel() for s in shards[rank]) >= share:
            rank, share = rank + 1, left / (ranks - rank - 1)
        shards[rank].append(t)
        left -= t.numel()
    return shards


class Sharded:
    """A model whose optimizer is spread over the ranks; `sizes` is how many elements each rank owns."""

    def __init__(self, model):
        self.model = model
        shards = deal(list(model.parameters()), dist.get_world_size())
        self.sizes = [sum(t.numel() for t in shard) for shard in shards]
        self.values, self.gradients = unisono.empty(sum(self.sizes)), unisono.zeros(sum(self.sizes))
        places = (flat.split([t.numel() for t in model.parameters()]) for flat in (self.values, self.gradients))
        for t, value, gradient in zip(model.parameters(), *places, strict=True):
            value.copy_(t.detach().view(-1))  # parameters and gradients become views of the flat buffers
            t.data, t.grad = value.view_as(t), gradient.view_as(t)
        rank = dist.get_rank()
        self.mine = self.values.split(self.sizes)[rank]
        self.gradient = unisono.zeros(self.sizes[rank])
        self.owned = [nn.Parameter(t.detach()) for t in shards[rank]]
        for t, part in zip(self.owned, self.gradient.split([t.numel() for t in self.owned]), strict=True):
            t.grad = part.view_as(t)
        self.optimizer = torch.optim.Adam(self.owned, lr=1e-3) if self.owned else None

    def step(self, words):
        self.gradients.zero_()
        nn.functional.cross_entropy(self.model(words), words % 10).backward()
        unisono.reduce_scatter_tensor_uneven(self.gradient, self.gradients, self.sizes, dist.ReduceOp.AVG)
        if self.optimizer:
            self.optimizer.step()
        unisono.all_gather_into_tensor_uneven(self.values, self.mine, self.sizes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--backend", "unisono"), ("--width", 384), ("--steps", 10)):
        parser.add_argument(name, type=type(default), default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    sharded, alone = Sharded(model_of(options.width)), model_of(options.width)
    plain = torch.optim.Adam(alone.parameters(), lr=1e-3)
    for step in range(options.steps):
        batch = torch.randint(16 * options.width, (ranks, 32), generator=torch.Generator().manual_seed(step))
        sharded.step(batch[rank])
        plain.zero_grad()
        nn.functional.cross_entropy(alone(batch.view(-1)), batch.view(-1) % 10).backward()
        plain.step()
    for a, b in zip(sharded.model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    if rank == 0:
        whole, padded = sum(sharded.sizes), ranks * max(sharded.sizes)
        print(f"{ranks} ranks on {options.backend} own {sharded.sizes} parameters, trained as plain Adam does")
        print(f"  padding every shard to the largest one would take {padded / whole - 1:.0%} of the memory more")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
