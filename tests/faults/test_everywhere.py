"""Dead, stopped, slow and left are told apart by every way of calling; each has a group of its own."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono import comm_func
from unisono.testing import RankFailure, run_ranks

WAYS = {
    "group": lambda pg: pg.unisono_group.all_reduce(torch.ones(3)),
    "handle": lambda pg: pg.unisono_group.all_reduce(torch.ones(3), async_op=True).wait(),
    "comm_func": lambda pg: comm_func.all_reduce(torch.ones(3), group=pg),
    "comm_func's handle": lambda pg: comm_func.all_reduce(torch.ones(3), group=pg, async_op=True)[1].wait(),
    "dist": lambda pg: dist.all_reduce(torch.ones(3), group=pg),
    "Work": lambda pg: dist.all_reduce(torch.ones(3), group=pg, async_op=True).wait(),
    "future": lambda pg: dist.all_reduce(torch.ones(3), group=pg, async_op=True).get_future().wait(),
    "uneven": lambda pg: unisono.all_gather_into_tensor_uneven(
        torch.empty(3), torch.ones(1 + dist.get_rank()), [1, 2], group=pg
    ),
    "fused": lambda pg: unisono.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), group=pg),
    "recv": lambda pg: dist.recv(torch.ones(3), 1, group=pg),
}
LIMIT_S = 1.0  # also for making each group
FAULTS = {
    "dies": ("PeerLostError", "rank 1 died (pid "),
    "leaves": ("PeerLostError", "rank 1 left (pid "),
    "stops": ("CollectiveTimeoutError", "rank 1 is stopped"),
    "sleeps": ("CollectiveTimeoutError", "rank 1 is slow ("),
}


def _everywhere(group, path, fault):
    dist.init_process_group("unisono", store=dist.FileStore(path, 2), rank=group.rank, world_size=2)
    made = {way: dist.new_group([0, 1], timeout=timedelta(seconds=LIMIT_S)) for way in WAYS}
    pid = torch.tensor([os.getpid()])
    group.broadcast(pid, 1)
    group.barrier()
    if group.rank == 1:
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "leaves":
            for pg in made.values():
                pg.unisono_group.close()
        while fault == "sleeps" and not os.path.exists(f"{path}.over"):
            time.sleep(0.05)
        group.barrier()
        return None
    if fault == "stops":
        os.kill(int(pid), signal.SIGSTOP)
    said = {}
    for way, call in WAYS.items():
        try:
            call(made[way])
            said[way] = ("fine", "")
        except Exception as error:
            said[way] = (type(error).__name__, str(error))
    open(f"{path}.over", "w").close()
    if fault == "stops":
        os.kill(int(pid), signal.SIGCONT)
    if fault != "dies":
        group.barrier()
    return said


@pytest.mark.parametrize("fault", FAULTS)
def test_every_way_of_calling_tells_it(fault, tmp_path):
    said, other = run_ranks(2, _everywhere, str(tmp_path / "store"), fault, check=False, timeout_s=60)
    assert isinstance(other, RankFailure) == (fault == "dies"), other
    kind, words = FAULTS[fault]
    for way, (got, text) in said.items():
        # torch's future makes a RuntimeError of every error, with its text.
        assert got in (kind, "RuntimeError" if way == "future" else kind), (way, got, text)
        assert words in text, (way, text)
