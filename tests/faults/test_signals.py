"""A signal handler that raises while a torch function waits: its error comes out as it is, from a call made once."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from unisono.testing import run_ranks


def _coalesced():
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(4))


CALLS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "all_reduce with gaps": lambda: dist.all_reduce(torch.ones(6)[::2]),
    "all_reduce of sparse tensors": lambda: dist.all_reduce(torch.eye(3).to_sparse()),
    "all_reduce coalesced": _coalesced,
    "broadcast": lambda: dist.broadcast(torch.ones(3), 1),
    "all_gather": lambda: dist.all_gather([torch.ones(3) for _ in range(2)], torch.ones(3)),
    "recv": lambda: dist.recv(torch.ones(3), 1),
}


def _interrupted(group, name, kind, folder):
    done = os.path.join(folder, "done")
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("unisono", store=store, rank=group.rank, world_size=2)
    group.barrier()  # rank 0 may give the new group up before rank 1 has joined it
    ours = dist.group.WORLD.unisono_group
    if group.rank == 1:
        deadline = time.monotonic() + 60
        while not os.path.exists(done) and time.monotonic() < deadline:  # rank 0 is to wait
            time.sleep(0.01)
        return None

    def handle(*_):
        raise kind("from the handler")

    signal.signal(signal.SIGUSR1, handle)
    begun = ours.calls

    def interrupt():
        # A call that has begun cannot end: rank 1 does not come. A receive is not counted; it has begun soon.
        deadline = time.monotonic() + (1 if name == "recv" else 60)
        while ours.calls == begun and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(kind) as caught:
        CALLS[name]()
    thread.join(60)
    begun = ours.calls - begun
    open(done, "w").close()
    return type(caught.value) is kind, str(caught.value), begun


@pytest.mark.parametrize("kind", [ValueError, TypeError])
@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_a_handler_is_no_refusal(name, kind, tmp_path):
    found, _ = run_ranks(2, _interrupted, name, kind, str(tmp_path))
    assert found == (True, "from the handler", 0 if name == "recv" else 1)
