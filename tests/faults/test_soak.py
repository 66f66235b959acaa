"""`make soak` notices a leak: the same run with one planted fails, and names it. A seed replays it; errors are kept."""

import random
import subprocess
import sys
import time

import pytest
from torch.distributed import HashStore

import unisono
from tests import soak


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", soak.LEAKS)
def test_a_planted_leak_is_found(what):
    command = [sys.executable, "-m", "tests.soak", "--seconds", "800", "--seed", "7", "--leak", what]
    run = subprocess.run(command, capture_output=True, text=True, timeout=850)
    said = run.stdout[-2000:] + run.stderr[-2000:]
    assert run.returncode == 1, said
    assert "rank 2 grew: " in said and f"{what}: " in said.rpartition("grew: ")[2], said


def test_flat_is_not_grown():
    flat = dict.fromkeys(soak.SLACK, 100.0)
    spikes = [{**flat, "fds": 100.0 + 50 * (i % 3 == 0)} for i in range(40)]
    assert soak.grown(spikes) == []
    leaking = [{**flat, "fds": 100.0 + i // 4} for i in range(40)]
    assert soak.grown(leaking) and soak.grown(leaking)[0].startswith("fds: ")


def test_shared_memory_is_compared_with_the_heaps():
    ranks = [{"MiB shared": seen, "MiB resident of the heap": 2.0} for seen in (3.0, 6.0, 9.0)]
    soak.compare_with_heaps(ranks)
    assert [rank["MiB shared beyond the heaps"] for rank in ranks] == [0.0, 0.0, 3.0]


def test_the_seed_also_decides_which_memory_is_used(monkeypatch):
    def memories(noise):
        random.seed(noise)  # whatever else draws from Python's own dice
        used = []
        numbers = soak.numbers
        with monkeypatch.context() as patch:
            patch.setattr(soak, "numbers", lambda *args: used.append(args[-1]) or numbers(*args))
            patch.setattr(soak.Calls, "expect", lambda *args: None)  # its own tensors are not the rank's
            with unisono.Group.from_store(HashStore(), 0, 1) as group:
                soak.Calls(group, 5).run(30)
        return used

    first = memories(1)
    assert first == memories(2) and {True, False} == set(first)


@pytest.mark.parametrize("where", ["this thread", "a child's thread"])
def test_a_death_hides_no_wrong_result(monkeypatch, where):
    """One thread is told of a death at once, another finds a wrong result later."""

    class Failing:
        def __init__(self, group, seed):
            self.is_ours = seed == 100

        def run(self, calls):
            if self.is_ours == (where == "this thread"):
                time.sleep(0.2)
                raise AssertionError("a wrong result")
            raise unisono.PeerLostError("rank 1 died")

    monkeypatch.setattr(soak, "Calls", Failing)
    with unisono.Group.from_store(HashStore(), 0, 1) as group, pytest.raises(AssertionError, match="a wrong result"):
        soak.program(group, 0)
