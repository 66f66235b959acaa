"""An all-gather of shards of different sizes: with padding, as gloo needs it, and without; the same result, both timed.

    torchrun --nproc-per-node=2 examples/uneven_all_gather.py
    torchrun --nproc-per-node=2 examples/uneven_all_gather.py --backend gloo

Rank r has r + 1 times as many rows as rank 0. The second way works on any backend, gloo's groups too.
"""

import argparse
import time

import torch
import torch.distributed as dist

import unisono


def padded(mine, splits):
    """What one writes with equal shards only: pad, gather, cut the padding out again."""
    longest = max(splits)
    given = torch.zeros(longest, mine.shape[1])
    given[: len(mine)] = mine
    gathered = torch.empty(len(splits) * longest, mine.shape[1])
    dist.all_gather_single(gathered, given)
    return torch.cat([gathered[r * longest : r * longest + rows] for r, rows in enumerate(splits)])


def uneven(mine, splits):
    whole = unisono.empty(sum(splits), mine.shape[1])
    unisono.all_gather_into_tensor_uneven(whole, mine, splits)
    return whole


def milliseconds(call, repeats=20):
    """The best of several, of the slowest rank."""
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        took = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        best = min(best, took.item() * 1e3)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--rows", type=int, default=1000, help="of rank 0")
    parser.add_argument("--columns", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    splits = [options.rows * (r + 1) for r in range(size)]

    mine = unisono.empty(splits[rank], options.columns).normal_()
    assert torch.equal(padded(mine, splits), uneven(mine, splits))
    times = {"padded": milliseconds(lambda: padded(mine, splits)), "uneven": milliseconds(lambda: uneven(mine, splits))}
    if rank == 0:
        print(f"{size} ranks on {options.backend}, rows {splits} of {options.columns}: the same {sum(splits)} rows")
        for name, ms in times.items():
            print(f"  {name}  {ms:8.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
