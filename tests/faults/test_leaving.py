"""Ranks that leave or come late while others wait for messages or gather into shared memory."""

import gc
import os
import signal
import time

import pytest
import torch

import unisono
from unisono.testing import run_ranks


def _gather_that_fails(group, how):
    """The last rank does not come to the second gather; what the others may do with the object afterwards."""
    gather = unisono.SharedGather(group, [2] * group.size)
    gather.input.fill_(float(group.rank))
    first = gather.gather()
    want = first.clone()
    group.barrier()
    if group.rank == group.size - 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5)
        gather.input.fill_(99.0)  # it does not know yet: its part of the buffer that nobody was given
        with pytest.raises(unisono.CollectiveTimeoutError):
            gather.gather()
    else:
        gather.input.fill_(-1.0)
        kind = unisono.PeerLostError if how == "dies" else unisono.CollectiveTimeoutError
        with pytest.raises(kind):
            gather.gather(timeout_s=0.5)
        with pytest.raises(kind):
            gather.input.fill_(-2.0)
        with pytest.raises(kind):
            gather.gather()
        time.sleep(2.0 if how == "is late" else 0.0)
    gather.close()
    group.close()
    gather = group = None
    gc.collect()  # what was given out is all that holds the memory now
    return torch.equal(first, want)


@pytest.mark.parametrize("how", ["dies", "is late"])
def test_what_a_shared_gather_gave_stays_when_the_next_one_fails(how):
    said = run_ranks(3, _gather_that_fails, how, check=False, timeout_s=60)
    assert said[:2] == [True, True], said
    assert how == "dies" or said[2] is True


def _from_anyone(group):
    """Rank 2 leaves while the others wait for a message from anyone, which rank 1 sends later."""
    late = group.split(range(3))
    group.barrier()
    if group.rank == 2:
        late.close()
    x = torch.zeros(1)
    if group.rank == 0:
        handle = late.recv(x, async_op=True)
        while not handle.is_completed():  # nobody waits in it: the progress thread has to know what is owed
            time.sleep(0.01)
        handle.wait()
    elif group.rank == 1:
        time.sleep(0.3)
        late.send(torch.ones(1), 0)
    group.barrier()
    return float(x)


def test_one_who_left_does_not_end_a_receive_from_anyone():
    assert run_ranks(3, _from_anyone, timeout_s=60)[0] == 1.0


def _leave_after_the_last_byte(group, turns):
    """Both ends leave as soon as they have what they wait for: the other's last bytes are still on their way."""
    x = torch.ones(1 << 19)
    for _ in range(turns):
        pair = group.split(range(2))
        got = torch.zeros(1 << 19)
        received = pair.recv(got, 1 - pair.rank, async_op=True)
        pair.send(x, 1 - pair.rank)
        received.wait()
        pair.close()
        assert got.eq(1).all()
    return "fine"


def test_a_sender_that_leaves_after_its_last_byte_is_not_lost():
    assert run_ranks(2, _leave_after_the_last_byte, 40, timeout_s=120) == ["fine", "fine"]
