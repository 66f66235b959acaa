"""Ranks of different users on one machine: they must not see each other's memory, so they are two hosts."""

import ctypes
import os

import pytest
import torch

import unisono
from unisono.testing.hosts import run_on_hosts, why_not

NOBODY = 65534
PR_SET_DUMPABLE = 4


def as_user(users):
    user = users[int(os.environ["RANK"])]
    if user:
        os.seteuid(user)
        # As a program that this user has started: the system lets it look at itself.
        assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0
    try:
        with unisono.Group.from_env(timeout_s=50.0) as group:
            tensor = torch.full((100_000,), float(group.rank + 1))
            group.all_reduce(tensor)
            kind = type(group.transport).__name__
            ranks = group.transport.host_ranks if kind == "HostsTransport" else list(range(group.size))
            group.barrier()
            return kind, ranks, tensor[0].item()
    finally:
        os.seteuid(0)


LAYOUTS = {
    "2+2": ([0, 0, NOBODY, NOBODY], [[0, 1], [0, 1], [2, 3], [2, 3]]),
    "interleaved": ([0, NOBODY, 0, NOBODY], [[0, 2], [1, 3], [0, 2], [1, 3]]),
}


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_users(layout):
    users, near = LAYOUTS[layout]
    said = run_on_hosts([4], as_user, users)
    assert said == [("HostsTransport", ranks, 10.0) for ranks in near]


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
def test_another_user():
    """One user for all ranks, whoever it is: they share memory."""
    assert run_on_hosts([2], as_user, [NOBODY, NOBODY]) == [("Communicator", [0, 1], 3.0)] * 2
