"""The end of a group with calls under way that cannot complete: destroyed, dropped, or at the end of a script."""

import gc
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.faults.scenarios import CLOSE_S
from unisono.testing import run_ranks


def _destroyed(group, path):
    """Rank 1 never comes to what rank 0 has begun; only then does rank 0 destroy its groups, and ends all of it."""
    dist.init_process_group("unisono", store=dist.FileStore(path, 2), rank=group.rank, world_size=2)
    other = dist.new_group([0, 1])
    group.barrier()
    took, told = 0.0, []
    if group.rank == 0:
        works = [dist.all_reduce(torch.ones(n), group=g, async_op=True) for g in (None, other) for n in (3, 1_000_000)]
        works.append(dist.irecv(torch.empty(3), 1))
        began = time.monotonic()
        dist.destroy_process_group()
        took = time.monotonic() - began
        for work in works:
            try:
                work.wait()
                told.append("fine")
            except unisono.UnisonoError as error:
                told.append(type(error).__name__)
    group.barrier()  # rank 1 stays until then
    if group.rank == 1:
        dist.destroy_process_group()
    return took, told


def test_destroy_process_group_with_works_under_way(tmp_path):
    (took, told), _ = run_ranks(2, _destroyed, str(tmp_path / "store"))
    assert told == ["ClosedError"] * 5
    assert took < CLOSE_S


def _dropped(group):
    """Nobody holds the group and its handles any more: it closes, and the others are told."""
    child = group.split([0, 1])
    group.barrier()
    if group.rank == 1:
        group.barrier()  # rank 0 has dropped it
        with pytest.raises(unisono.PeerLostError, match="rank 0 left"):
            child.all_reduce(torch.ones(1_000_000), timeout_s=30.0)
        return None
    handles = [child.all_reduce(torch.ones(1_000_000), async_op=True), child.recv(torch.empty(3), 1, async_op=True)]
    began = time.monotonic()
    del child, handles
    gc.collect()
    took = time.monotonic() - began
    group.barrier()
    return took


def test_a_group_that_is_dropped_with_calls_under_way():
    took, _ = run_ranks(2, _dropped)
    assert took < CLOSE_S


@pytest.mark.parametrize("destroys", [False, True])
def test_a_script_on_torch_ends_with_works_under_way(destroys, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
        import sys, torch, torch.distributed as dist, unisono
        rank, path, destroys = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
        dist.init_process_group("unisono", store=dist.FileStore(path, 2), rank=rank, world_size=2)
        if rank == 0:
            works = [dist.all_reduce(torch.ones(100_000), async_op=True), dist.irecv(torch.empty(3), 1)]
            if destroys:
                dist.destroy_process_group()
            print("end of script", flush=True)
        else:
            sys.stdin.read()
        """)
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), str(destroys)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        out, err = ranks[0].communicate(timeout=60)
        assert out == "end of script\n" and ranks[0].returncode == 0, (ranks[0].returncode, err)
        assert "Traceback" not in err and "terminate" not in err, err
        assert ranks[1].poll() is None, "the other rank ended too"
        _, err = ranks[1].communicate("", timeout=60)
        assert ranks[1].returncode == 0, err
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
