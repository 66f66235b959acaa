"""Mixture of experts: every rank sends each token to the rank of its expert, with true counts, and gets it back.

    torchrun --nproc-per-node=2 examples/moe_tokens.py                      # --backend gloo, --tokens 20000

Experts are popular to different degrees, so ranks send different numbers of tokens to each other. The usual way out is
a capacity: room for as many tokens per pair of ranks as the busiest pair needs, the rest filled with zeros. Here a
matrix of counts goes first, and then exactly the tokens.
"""

import argparse
import time

import torch
import torch.distributed as dist

import unisono

EXPERTS = 8  # on each rank


def route(tokens, experts, seed):
    """An expert for each token; some experts are far more popular than others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(1.0 / torch.arange(1, experts + 1), tokens, replacement=True, generator=generator)


def expert(x, rank):
    """Stands for the experts that live on one rank."""
    return x * (rank + 2) + 1


def exchange(x, owner):
    """Sends tokens to the owners of their experts and back; returns the results, and the matrix of counts."""
    rank, size, width = dist.get_rank(), dist.get_world_size(), x.shape[1]
    order = torch.argsort(owner, stable=True)
    counts = torch.zeros(size, size, dtype=torch.int64)
    dist.all_gather_single(counts.view(-1), torch.bincount(owner, minlength=size))
    matrix = counts * width  # elements
    sent = torch.index_select(x, 0, order, out=unisono.empty(x.shape[0], width))
    arrived = unisono.empty(int(counts[:, rank].sum()), width)
    unisono.all_to_all_vc(arrived, sent, matrix)

    returned = unisono.empty_like(sent)
    unisono.all_to_all_vc(returned, arrived.copy_(expert(arrived, rank)), matrix.T)
    return torch.empty_like(x).index_copy_(0, order, returned), counts


def exchange_padded(x, owner, capacity):
    """The same with room for `capacity` tokens per pair of ranks."""
    rank, size, width = dist.get_rank(), dist.get_world_size(), x.shape[1]
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=size)
    places = owner[order] * capacity + torch.arange(len(order)) - (counts.cumsum(0) - counts)[owner[order]]
    sent, arrived = (unisono.zeros(size * capacity, width) for _ in range(2))
    sent[places] = x[order]
    dist.all_to_all_single(arrived, sent)
    arrived.copy_(expert(arrived, rank))
    dist.all_to_all_single(sent, arrived)
    return torch.empty_like(x).index_copy_(0, order, sent[places])


def timed(call, repeats):
    """Milliseconds, best of several."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--backend", "unisono"), ("--tokens", 8192), ("--width", 512), ("--repeats", 5)):
        parser.add_argument(name, type=type(default), default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(options.tokens, options.width, generator=torch.Generator().manual_seed(rank))
    owner = route(options.tokens, EXPERTS * size, seed=100 + rank) // EXPERTS

    result, counts = exchange(x, owner)
    capacity = int(counts.max())
    assert torch.equal(result, torch.stack([expert(token, int(r)) for token, r in zip(x, owner, strict=True)]))
    assert torch.equal(result, exchange_padded(x, owner, capacity))
    exact_ms = timed(lambda: exchange(x, owner), options.repeats)
    padded_ms = timed(lambda: exchange_padded(x, owner, capacity), options.repeats)
    if rank == 0:
        mib = options.width * x.element_size() / 2**20  # of a token
        print(f"{size} ranks on {options.backend}, {options.tokens} tokens each, sent to ranks as {counts.tolist()}")
        print(f"  true counts  {int(counts.sum()) * mib:8.1f} MiB one way   {exact_ms:8.2f} ms there and back")
        print(f"  padded       {size * size * capacity * mib:8.1f} MiB one way   {padded_ms:8.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
