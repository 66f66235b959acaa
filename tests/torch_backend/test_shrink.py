"""shrink_group on torch's groups: the default one and others, when rank 0, which has the store, is dead."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import unisono
from unisono.testing import RankFailure, run_ranks


def _total():
    t = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(t)
    return t.item()


def _lose(group, victims, port_file):
    """A world whose store is in rank 0's process; the victims kill themselves, the others go on."""
    if group.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(port_file + ".part").write_text(str(store.port))
        os.rename(port_file + ".part", port_file)
    else:
        while not os.path.exists(port_file):
            time.sleep(0.01)
        store = TCPStore("127.0.0.1", int(Path(port_file).read_text()), is_master=False)
    dist.init_process_group(
        "unisono", store=store, rank=group.rank, world_size=group.size, timeout=timedelta(seconds=30)
    )
    other = dist.new_group([0, 1])
    assert _total() == sum(range(1, group.size + 1))
    if group.rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(unisono.PeerLostError):
        while True:
            _total()
    with pytest.raises(ValueError):
        unisono.shrink_group([])
    if len(victims) > 1:
        with pytest.raises(unisono.PeerLostError, match="too") as also:
            unisono.shrink_group(victims[:1])
        assert list(also.value.peers) == victims[1:]
    made = unisono.shrink_group(victims)
    assert made is dist.group.WORLD and isinstance(made, unisono.ProcessGroupUnisono)
    size = group.size - len(victims)
    assert dist.get_world_size() == size and dist.get_process_group_ranks(made) == list(range(size))
    assert other not in dist.distributed_c10d._world.pg_map
    half = unisono.split_group(None, [list(range(size))])
    dist.broadcast(torch.ones(3), 0, group=half)
    result = dist.get_rank(), _total()
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("victims", [[0], [0, 2], [3]], ids=str)
def test_the_default_group_shrinks(victims, tmp_path):
    results = run_ranks(4, _lose, victims, str(tmp_path / "port"), check=False, grace_s=60.0)
    survivors = [r for r in range(4) if r not in victims]
    total = sum(range(1, len(survivors) + 1))
    for number, rank in enumerate(survivors):
        assert results[rank] == (number, float(total)), getattr(results[rank], "traceback", results[rank])
    assert all(isinstance(results[r], RankFailure) for r in victims)


def _leave_out(group, path):
    """Ranks 0 and 2 go on without rank 1, which lives, in a group that is not the default one."""
    dist.init_process_group("unisono", store=dist.FileStore(path, 3), rank=group.rank, world_size=3)
    pair = dist.new_group([2, 1, 0], sort_ranks=False)
    dist.barrier()  # all have made it
    if group.rank == 1:
        dist.barrier()
        dist.destroy_process_group()
        return None
    with pytest.raises(RuntimeError, match="exclusion list"):
        unisono.shrink_group([dist.get_group_rank(pair, group.rank)], pair)
    made = unisono.shrink_group([1], pair)
    assert dist.get_process_group_ranks(made) == [2, 0]
    t = torch.tensor([float(group.rank)])
    dist.broadcast(t, 2, group=made)
    dist.barrier()  # the default group is as it was
    dist.destroy_process_group()
    return t.item()


def test_another_group_shrinks(tmp_path):
    assert run_ranks(3, _leave_out, str(tmp_path / "store")) == [2.0, None, 2.0]


def _by_torchs_name(group, path):
    """torch 2.13 cannot put a backend written in Python into the new group, and has to hear it before anything ends."""
    dist.init_process_group("unisono", store=dist.FileStore(path, 2), rank=group.rank, world_size=2)
    with pytest.raises(TypeError) as refused:
        dist.shrink_group([1 - group.rank])
    total = _total()  # the group is as it was
    dist.destroy_process_group()
    return str(refused.value), total


def test_torchs_own_function_refuses_and_ends_nothing(tmp_path):
    words = "Process group backend for '0' does not support shrinking operations."
    assert run_ranks(2, _by_torchs_name, str(tmp_path / "store")) == [(words, 3.0)] * 2
    assert words in (Path(__file__).parents[2] / "docs" / "survival.md").read_text()
