"""Uneven collectives over several hosts: the same calls as on one. `examples/two_hosts.sh` starts it.

Every rank has rank + 1 rows. All ranks gather all rows; then the rows are summed over the ranks, and each rank gets its
own part of the sum.
"""

import os

import torch
import torch.distributed as dist

import unisono


def main():
    dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()
    splits = [r + 1 for r in range(size)]

    mine = torch.full((splits[rank], 2), float(rank))
    whole = torch.empty(sum(splits), 2)
    unisono.all_gather_into_tensor_uneven(whole, mine, splits)
    expected = torch.cat([torch.full((rows, 2), float(r)) for r, rows in enumerate(splits)])
    assert torch.equal(whole, expected)

    part = torch.empty(splits[rank], 2)
    unisono.reduce_scatter_tensor_uneven(part, whole, splits)
    assert torch.equal(part, mine * size)

    host = os.environ.get("GROUP_RANK", "?")  # torchrun's number of this host
    # With its end of line in one piece, since all ranks write to the same terminal.
    print(f"host {host}, rank {rank} of {size}: {splits[rank]} rows of {sum(splits)}, all right\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
