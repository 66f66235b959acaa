"""Messages between hosts when the rank that leads a host has closed the group: they still do not wait for the dead.

Leaders tell one another of ranks that left or died; ranks whose leader is gone have to learn it by themselves.
"""

import os
import signal
import threading
import time

import pytest
import torch

import unisono
from tests.multihost.pretended import LAYOUTS, over_hosts
from unisono.testing import run_ranks

BOUND_S = 10.0  # of 40, at which the messages would time out; a loaded machine must not fail a test
LITTLE, LARGE = 4, 100_000  # floats: a large message waits for its receiver


def last_message(group, leavers, fate, verb, n):
    """Ranks 1 and 3 lead no host. Some have left when rank 1 waits for rank 3, which then meets its fate."""
    with over_hosts(group, LAYOUTS["2+2"], 40.0, together=False) as over:
        over.all_reduce(torch.ones(3))
        if over.rank in leavers:
            over.close()
        if over.rank in (0, 2):
            group.recv(torch.zeros(1), 1)  # stays until rank 1 is through
            return "fine"
        if over.rank == 3:
            time.sleep(0.7)
            if fate == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fate == "leaves":
                over.close()
            else:
                over.send(torch.full((n,), 7.0), 1)
            return "fine"
        began, got = time.monotonic(), torch.zeros(n)
        try:
            getattr(over, verb)(got, 3)
            said = got[0].item()
        except unisono.UnisonoError as error:
            said = type(error).__name__, error.peers, str(error)
        took = time.monotonic() - began
        for r in (0, 2):
            group.send(torch.zeros(1), r)
        return said, took


CASES = [
    ([], "leaves", "recv", LITTLE),
    ([0], "sends", "recv", LARGE),
    ([0], "leaves", "recv", LARGE),
    ([0], "dies", "recv", LITTLE),
    ([2], "dies", "recv", LITTLE),
    ([0, 2], "sends", "recv", LITTLE),
    ([0, 2], "leaves", "recv", LITTLE),
    ([0, 2], "leaves", "send", LARGE),
    ([0, 2], "dies", "send", LARGE),
]


@pytest.mark.parametrize(("leavers", "fate", "verb", "n"), CASES)
def test_last_message(leavers, fate, verb, n):
    said = run_ranks(4, last_message, leavers, fate, verb, n, check=False, timeout_s=60)
    assert (said[3].signal == signal.SIGKILL) if fate == "dies" else said[3] == "fine", said
    outcome, took = said[1]
    print(f"{took:.2f} s: {outcome}")
    if fate == "sends":
        assert outcome == 7.0
    else:
        kind, peers, text = outcome
        assert kind == "PeerLostError" and peers == (3,) and "rank 3 on host 1" in text, text
    assert took < BOUND_S
    assert said[0] == said[2] == "fine", said  # and their processes ended well


def part_closes_first(group):
    """A part of a group in which a receive was made is closed, by one rank first: the whole is not disturbed."""
    with over_hosts(group, LAYOUTS["2+2"], 40.0) as over:
        for first in range(4):
            part = over.split([0, 1, 2, 3])
            other = (part.rank + 2) % 4
            sent = part.send(torch.ones(4), other, async_op=True)
            part.recv(torch.zeros(4), other)
            sent.wait()
            if over.rank == first:
                part.close()
            group.barrier()
            part.close()
            over.all_reduce(torch.ones(100_000))
            mine = over.send(torch.full((100_000,), float(over.rank)), other, async_op=True)
            got = torch.zeros(100_000)
            over.recv(got, other)
            mine.wait()
            assert got[0] == other
    end = time.monotonic() + 10.0
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.02)
    return [thread.name for thread in threading.enumerate()]


def test_a_part_that_closes_disturbs_nobody():
    """Neither connections nor the end: no thread is left in gloo."""
    assert run_ranks(4, part_closes_first, timeout_s=100) == [["MainThread"]] * 4
