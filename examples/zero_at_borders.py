"""A ZeRO-style optimizer whose parameters are cut at tensor borders instead of padded to equal shards.

    torchrun --nproc-per-node=2 examples/zero_at_borders.py
    torchrun --nproc-per-node=4 examples/zero_at_borders.py --backend gloo

All parameters live in one flat buffer, their gradients in another. Each rank owns some whole tensors that lie next to
each other: it gets the average of their gradients, keeps optimizer state for them alone, and hands the new values to
the others. Whole tensors can have optimizers that need whole tensors (Muon, Shampoo, Adafactor), and nothing is cut in
the middle. Tensors have the sizes they have, so ranks own different amounts:

    rank 0  [embedding          ]                       reduce_scatter_tensor_uneven: gradients of what I own
    rank 1  [layer 1, layer 2, head]                    all_gather_into_tensor_uneven: everybody's new values

With collectives of equal shards every shard would have to be padded to the largest one, which this program does too,
to compare memory and time, and to check that both train to the same bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import unisono


def model_of(width: int) -> nn.Module:
    """An embedding far larger than the layers after it."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(6)]
    return nn.Sequential(nn.Embedding(16 * width, width), *layers, nn.Linear(width, 10))


def cut_at_borders(sizes: list[int], ranks: int) -> list[int]:
    """How many of the tensors each rank owns, so that the largest total is as small as it can be."""

    def owners(limit: int) -> list[int]:
        counts, room = [0], limit
        for size in sizes:
            if size > room:
                counts.append(0)
                room = limit
            counts[-1] += 1
            room -= size
        return counts

    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(owners(middle)) <= ranks else (middle + 1, high)
    counts = owners(low)
    return counts + [0] * (ranks - len(counts))


class Sharded:
    """A model whose optimizer is spread over the ranks. `slots` is how many elements each rank's shard takes."""

    def __init__(self, model: nn.Module, padded: bool) -> None:
        self.model = model
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        tensors = list(model.parameters())
        owned = cut_at_borders([t.numel() for t in tensors], self.ranks)
        starts = [sum(owned[:r]) for r in range(self.ranks + 1)]
        shards = [tensors[starts[r] : starts[r + 1]] for r in range(self.ranks)]
        self.sizes = [sum(t.numel() for t in shard) for shard in shards]
        self.slots = [max(self.sizes)] * self.ranks if padded else self.sizes
        self.padded = padded
        self.values, self.gradients = (unisono.zeros(sum(self.slots)) for _ in range(2))
        for r, shard in enumerate(shards):
            at = sum(self.slots[:r])
            for t in shard:  # parameters and gradients become views of the flat buffers
                self.values[at : at + t.numel()] = t.detach().view(-1)
                t.data = self.values[at : at + t.numel()].view_as(t)
                t.grad = self.gradients[at : at + t.numel()].view_as(t)
                at += t.numel()
        start = sum(self.slots[: self.rank])
        self.mine = slice(start, start + self.slots[self.rank])
        self.gradient = unisono.zeros(self.slots[self.rank])
        self.owned = [nn.Parameter(t.detach()) for t in shards[self.rank]]
        at = 0
        for t in self.owned:
            t.grad = self.gradient[at : at + t.numel()].view_as(t)
            at += t.numel()
        self.optimizer = torch.optim.Adam(self.owned, lr=1e-3) if self.owned else None

    def communicate(self, update: Callable[[], None]) -> None:
        """Gradients to their owners, `update`, values to everybody."""
        op = dist.ReduceOp.AVG
        if self.padded:
            dist.reduce_scatter_single(self.gradient, self.gradients, op)
            update()
            dist.all_gather_single(self.values, self.values[self.mine])
        else:
            unisono.reduce_scatter_tensor_uneven(self.gradient, self.gradients, self.slots, op)
            update()
            unisono.all_gather_into_tensor_uneven(self.values, self.values[self.mine], self.slots)

    def step(self, words: torch.Tensor, labels: torch.Tensor) -> float:
        self.gradients.zero_()
        loss = nn.functional.cross_entropy(self.model(words), labels)
        loss.backward()
        self.communicate(lambda: None if self.optimizer is None else self.optimizer.step())
        return loss.item()

    @property
    def bytes(self) -> int:
        return self.values.nbytes + self.gradients.nbytes + self.gradient.nbytes


def timed(call: Callable[[], None], repeats: int) -> float:
    """Milliseconds of the slowest rank, best of several."""
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        took = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        best = min(best, took.item())
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    exact = Sharded(model_of(options.width), padded=False)
    padded = Sharded(model_of(options.width), padded=True)
    chance = torch.Generator().manual_seed(rank)
    for _ in range(options.steps):
        words = torch.randint(16 * options.width, (32,), generator=chance)
        labels = words % 10
        losses = exact.step(words, labels), padded.step(words, labels)
    pairs = zip(exact.model.parameters(), padded.model.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    assert same or options.backend != "unisono", "both must train to the same bits"
    others = unisono.empty_like(exact.values).copy_(exact.values)
    dist.broadcast(others, 0)
    assert torch.equal(others, exact.values), "all ranks must hold the same values"

    nothing: Callable[[], None] = lambda: None  # noqa: E731
    exact_ms = timed(lambda: exact.communicate(nothing), options.repeats)
    padded_ms = timed(lambda: padded.communicate(nothing), options.repeats)
    if rank == 0:
        print(f"{ranks} ranks on {options.backend}, loss {losses[0]:.4f}, shards of {exact.sizes} parameters")
        for name, sharded, ms in (("at borders", exact, exact_ms), ("padded", padded, padded_ms)):
            print(f"  {name:10s}  {sharded.bytes / 2**20:8.1f} MiB on rank 0   {ms:8.2f} ms of communication per step")
        saved = 1 - exact.bytes / padded.bytes, 1 - exact_ms / padded_ms
        print(f"  saved       {saved[0]:8.0%} of the memory     {saved[1]:8.0%} of the time")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
