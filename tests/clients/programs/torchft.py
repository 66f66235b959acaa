"""torchft: a reconfigurable process group on unisono, in the way of torchft's own ProcessGroupGloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft.process_group as ft
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

import unisono
from tests.clients.case import Case

REQUIREMENTS = ["torchft"]
RANKS = (2, 3)


class ProcessGroupOnUnisono(ft.ProcessGroupWrapper):
    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        group = unisono.Group.from_store(store, rank, world_size, timeout_s=self._timeout.total_seconds())
        return unisono.ProcessGroupUnisono(group, store)

    def getBackendName(self) -> str:
        return "torchft-unisono"


def reconfigure(case: Case) -> Any:
    """Configure with all, abort, configure again with all but the last rank, and once more with all."""
    case.begin()
    rank, size = dist.get_rank(), dist.get_world_size()
    stores = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    told = [f"127.0.0.1:{stores.port}" if stores else ""]
    dist.broadcast_object_list(told)
    kind = ft.ProcessGroupGloo if case.backend == "gloo" else ProcessGroupOnUnisono
    group = kind(timeout=timedelta(seconds=30))
    found = []

    def quorum(number: int, members: int) -> None:
        dist.barrier()
        if rank >= members:
            return
        group.configure(f"{told[0]}/quorum{number}", f"replica{rank}", rank, members, number)
        case.confirm(group._pg)
        found.append(_calls(group, members))

    quorum(0, size)
    dist.barrier()  # an abort ends the calls that others have not finished
    group.abort()
    quorum(1, max(size - 1, 1))
    quorum(2, size)
    tensor = torch.ones(4096)
    case.time(lambda: group.allreduce([tensor], AllreduceOptions()).wait(), 30)
    dist.barrier()
    return {"found": found}


def _calls(group: Any, members: int) -> list[torch.Tensor]:
    mine = torch.arange(5.0) + group.rank() + 1
    total = mine.clone()
    group.allreduce([total], AllreduceOptions()).wait()
    first = mine.clone()
    group.broadcast([first], BroadcastOptions()).wait()
    gathered = [torch.empty(5) for _ in range(members)]
    group.allgather([gathered], [mine], AllgatherOptions()).wait()
    return [total, first, *gathered]


CASES = {"configure, abort, reconfigure; all_reduce of 16 KiB": reconfigure}
