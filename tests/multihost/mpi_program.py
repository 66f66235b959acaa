"""A rank that an MPI launcher has started: every kind of call over pretended hosts, with MPI between them.

mpiexec -n 4 python -m tests.multihost.mpi_program PORT
"""

from __future__ import annotations

import os
import sys

import torch
from mpi4py import MPI

import unisono
from unisono.base import settings
from unisono.transport.hosts.mpi import MpiEngine


def main(port: str) -> None:
    world = MPI.COMM_WORLD
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    settings.hosts_engine, settings.pretend_hosts = "mpi", "0,0,1,1"
    with unisono.Group.from_env(timeout_s=30.0) as group:
        assert isinstance(group.transport.links.engine, MpiEngine)
        for n in (4, 400_000):
            tensor = torch.full((n,), float(group.rank + 1))
            group.all_reduce(tensor)
            assert torch.all(tensor == 10)
            gathered = torch.zeros(4 * n)
            group.all_gather(gathered, torch.full((n,), float(group.rank)))
            assert torch.equal(gathered, torch.arange(4.0).repeat_interleave(n))
            part = torch.zeros(n)
            group.reduce_scatter(part, torch.arange(4.0).repeat_interleave(n))
            assert torch.all(part == 4 * group.rank)
            got = torch.zeros(n)
            if group.rank == 0:
                group.send(torch.full((n,), 7.0), 3, 5)
            if group.rank == 3:
                group.recv(got, 0, 5)
                assert torch.all(got == 7)
            group.all_reduce(tensor, async_op=True).wait()
            assert torch.all(tensor == 40)
        try:
            group.all_reduce(torch.ones(3 if group.rank == 3 else 2))
            raise AssertionError("nothing was raised")
        except unisono.MismatchError:
            pass
        group.barrier()
    print(f"rank {world.rank} is fine", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
