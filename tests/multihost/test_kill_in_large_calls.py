"""A rank is killed while large calls stream between hosts: every survivor is told who died, by PeerLostError.

The kill comes from a thread at any moment of a call, so survivors meet it in every state: waiting inside their host,
waiting for another, or posting the next piece on a connection that has just been closed.
"""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch

import unisono
from tests.multihost.pretended import LAYOUTS, over_hosts
from unisono.testing import run_ranks
from unisono.testing.hosts import run_on_hosts, why_not
from unisono.transport.hosts.control import Control
from unisono.transport.hosts.links import TRY, Bulk

LARGE = 64 << 20  # bytes
MOMENTS_S = [0.0, 0.03, 0.11, 0.4]
TOLD_LATE_S = [0.25, 1.5]  # within the time that a rank waits for the notice, and beyond it


def calls(group, verb):
    whole = torch.ones(LARGE // 4)
    part = torch.ones(LARGE // 4 // group.size)
    if verb == "all_reduce":
        return lambda: group.all_reduce(whole)
    if verb == "all_gather":
        return lambda: group.all_gather(whole, part)
    if verb == "reduce_scatter":
        return lambda: group.reduce_scatter(part, whole)
    return lambda: group.broadcast(whole, 0)


def until_killed(group, verb, victim, moment_s, folder):
    """What a rank raises: type, the ranks it names, the text."""
    call = calls(group, verb)
    group.barrier()
    if group.rank == victim:
        threading.Timer(moment_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        for _ in range(100_000):
            call()
    except BaseException as error:
        (folder / str(group.rank)).touch()
        end = time.monotonic() + 20.0
        while len(list(folder.iterdir())) < group.size - 1 and time.monotonic() < end:
            time.sleep(0.01)  # others may still be on their way to the error: nobody else leaves meanwhile
        return type(error).__name__, getattr(error, "peers", ()), str(error)
    return "nothing was raised"


def pretended(group, verb, victim, moment_s, folder):
    with over_hosts(group, LAYOUTS["2+2"], 30.0, together=False) as over:
        return until_killed(over, verb, victim, moment_s, folder)


def told_late(group, verb, victim, moment_s, late_s, folder):
    """As on a busy machine: rank 1 posts on the closed connection before the notice says why it is closed."""
    tell, send = Control.tell, Bulk.send

    def slow_tell(self, what, only=None):
        time.sleep(late_s)
        tell(self, what, only)

    def send_when_closed(self, tensor, peer, index):
        end = time.monotonic() + 10.0
        with contextlib.suppress(RuntimeError):
            while peer == victim and time.monotonic() < end:
                self.links.engine.recv(torch.empty(1, dtype=torch.uint8), peer, self.links.message_tag(TRY))
                time.sleep(0.005)
        send(self, tensor, peer, index)

    Control.tell = slow_tell
    if group.rank == 1:
        Bulk.send = send_when_closed
    return pretended(group, verb, victim, moment_s, folder)


def apart(verb, victim, moment_s, folder):
    with unisono.Group.from_env(timeout_s=50.0) as group:
        return until_killed(group, verb, victim, moment_s, folder)


def check(said, victim):
    for rank, outcome in enumerate(said):
        if rank == victim:
            assert outcome.signal == signal.SIGKILL, outcome
            continue
        assert isinstance(outcome, tuple), outcome
        kind, peers, text = outcome
        print(f"rank {rank}: {kind} {peers} {text}")
        assert kind == "PeerLostError" and peers == (victim,), outcome
        assert f"rank {victim} on host {victim // 2}" in text, text


CASES = [
    *[("all_reduce", 3, moment_s) for moment_s in MOMENTS_S],  # leads no host
    *[("all_reduce", 2, moment_s) for moment_s in MOMENTS_S[1:3]],  # leads one
    ("all_gather", 3, 0.05),
    ("reduce_scatter", 1, 0.05),
    ("broadcast", 3, 0.05),
]


@pytest.mark.parametrize(("verb", "victim", "moment_s"), CASES)
def test_killed(verb, victim, moment_s, tmp_path):
    check(run_ranks(4, pretended, verb, victim, moment_s, tmp_path, check=False, timeout_s=60), victim)


@pytest.mark.parametrize("late_s", TOLD_LATE_S)
@pytest.mark.parametrize("verb", ["all_reduce", pytest.param("all_gather", marks=pytest.mark.slow)])
def test_killed_and_told_late(verb, late_s, tmp_path):
    check(run_ranks(4, told_late, verb, 3, 0.5, late_s, tmp_path, check=False, timeout_s=60), 3)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
@pytest.mark.parametrize("moment_s", MOMENTS_S[1:3])
def test_killed_on_another_host(moment_s, tmp_path):
    check(run_on_hosts([2, 2], apart, "all_reduce", 3, moment_s, tmp_path, check=False), 3)
