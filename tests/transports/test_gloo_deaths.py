"""A rank of a plain gloo group dies in an uneven call: all others learn, also those that wait for one another."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.testing import RankFailure, run_ranks

LIMIT_S = 60.0  # gloo's
SPLITS = [1000, 400_000, 3000]


def _all_gather(rank, async_op):
    return unisono.all_gather_into_tensor_uneven(
        torch.empty(sum(SPLITS)), torch.ones(SPLITS[rank]), SPLITS, async_op=async_op
    )


def _reduce_scatter(rank, async_op):
    return unisono.reduce_scatter_tensor_uneven(
        torch.empty(SPLITS[rank]), torch.ones(sum(SPLITS)), SPLITS, async_op=async_op
    )


CALLS = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}


def _told(call, rank, async_op):
    """Calls until one fails: what was told, and when."""
    began = time.monotonic()
    while time.monotonic() < began + 2 * LIMIT_S:
        try:
            work = call(rank, async_op)
            if async_op:
                work.wait()
        except RuntimeError as error:
            return type(error).__name__, getattr(error, "peers", ()), time.monotonic(), str(error)
    return "nothing", (), time.monotonic(), ""


def _lose(group, path, verb, async_op, how):
    """``how``: rank 2 dies while all call, or while rank 0 waits for rank 1, which comes when rank 2 is gone."""
    rank, call = group.rank, CALLS[verb]
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=dist.FileStore(path, 3), rank=rank, world_size=3, timeout=limit)
    pids = torch.zeros(3, dtype=torch.int64)
    group.all_gather(pids, torch.tensor([os.getpid()]))
    group.barrier()
    if how == "all call":
        if rank == 2:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        return _told(call, rank, async_op)
    if rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    while rank == 1 and _lives(int(pids[2])):
        time.sleep(0.01)
    time.sleep(0.2 * rank)
    return _told(call, rank, async_op)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("how", ["all call", "one comes late"])
@pytest.mark.parametrize(("verb", "async_op"), [("all_gather", False), ("all_gather", True), ("reduce_scatter", False)])
def test_both_survivors_learn(verb, async_op, how, tmp_path):
    began = time.monotonic()
    said = run_ranks(3, _lose, str(tmp_path / "store"), verb, async_op, how, check=False, timeout_s=3 * LIMIT_S)
    assert isinstance(said[2], RankFailure)
    for kind, peers, at, text in said[:2]:
        assert kind == "PeerLostError" and 2 in peers, text
        assert at - began < LIMIT_S / 2, f"only after {at - began} s: {text}"
