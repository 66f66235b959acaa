"""Mixture of experts: every rank sends each token to the rank of its expert, with true counts, and gets it back.

    torchrun --nproc-per-node=2 examples/moe_tokens.py
    torchrun --nproc-per-node=4 examples/moe_tokens.py --backend gloo --tokens 20000

Experts are popular to different degrees, so ranks send different numbers of tokens to each other. The usual way out is
a capacity: room for as many tokens per pair of ranks as the busiest pair needs, the rest filled with zeros. Here a
matrix of counts goes first, and then exactly the tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import unisono


def route(tokens: int, experts: int, seed: int) -> torch.Tensor:
    """An expert for each token; some experts are far more popular than others."""
    generator = torch.Generator().manual_seed(seed)
    popularity = 1.0 / torch.arange(1, experts + 1)
    return torch.multinomial(popularity, tokens, replacement=True, generator=generator)


def expert(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Stands for the experts that live on one rank."""
    return x * (rank + 2) + 1


def exchange(x: torch.Tensor, owner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends tokens to the owners of their experts and back; returns the results, and the matrix of counts."""
    rank, size, width = dist.get_rank(), dist.get_world_size(), x.shape[1]
    order = torch.argsort(owner, stable=True)
    counts = torch.zeros(size, size, dtype=torch.int64)
    dist.all_gather_single(counts.view(-1), torch.bincount(owner, minlength=size))
    matrix = counts * width  # elements

    sent = unisono.empty(x.shape[0], width)
    torch.index_select(x, 0, order, out=sent)
    arrived = unisono.empty(int(counts[:, rank].sum()), width)
    unisono.all_to_all_vc(arrived, sent, matrix)

    done = unisono.empty_like(arrived)
    done.copy_(expert(arrived, rank))
    returned = unisono.empty_like(sent)
    unisono.all_to_all_vc(returned, done, matrix.T)

    result = torch.empty_like(x)
    result[order] = returned
    return result, counts


def exchange_padded(x: torch.Tensor, owner: torch.Tensor, capacity: int) -> torch.Tensor:
    """The same with room for `capacity` tokens per pair of ranks."""
    rank, size, width = dist.get_rank(), dist.get_world_size(), x.shape[1]
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=size)
    starts = counts.cumsum(0) - counts
    places = owner[order] * capacity + torch.arange(len(order)) - starts[owner[order]]
    sent, arrived = (unisono.zeros(size * capacity, width) for _ in range(2))
    sent[places] = x[order]
    dist.all_to_all_single(arrived, sent)
    arrived.copy_(expert(arrived, rank))
    dist.all_to_all_single(sent, arrived)
    result = torch.empty_like(x)
    result[order] = sent[places]
    return result


def timed(call: Callable[[], object], repeats: int) -> float:
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
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--experts", type=int, default=8, help="on each rank")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()

    x = torch.randn(options.tokens, options.width, generator=torch.Generator().manual_seed(rank))
    owner = route(options.tokens, options.experts * size, seed=100 + rank) // options.experts

    result, counts = exchange(x, owner)
    by_hand = torch.stack([expert(token, int(r)) for token, r in zip(x[:64], owner[:64], strict=True)])
    assert torch.equal(result[:64], by_hand)
    capacity = int(counts.max())
    assert torch.equal(result, exchange_padded(x, owner, capacity))

    exact_ms = timed(lambda: exchange(x, owner), options.repeats)
    padded_ms = timed(lambda: exchange_padded(x, owner, capacity), options.repeats)
    if rank == 0:
        row_bytes = options.width * x.element_size()
        print(f"{size} ranks on {options.backend}, {options.tokens} tokens each, sent to ranks as {counts.tolist()}")
        exact, padded = int(counts.sum()) * row_bytes / 2**20, size * size * capacity * row_bytes / 2**20
        print(f"  true counts  {exact:8.1f} MiB one way   {exact_ms:8.2f} ms there and back")
        print(f"  padded       {padded:8.1f} MiB one way   {padded_ms:8.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
