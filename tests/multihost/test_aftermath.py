"""What a group over hosts goes on with: after errors that it survives, after messages nobody asked for, at its end."""

import threading
import time

import pytest
import torch

import unisono
from tests.multihost.pretended import LAYOUTS, over_hosts
from unisono.testing import run_ranks

BIG = 100_000  # elements: more than travels with a message's head
SOON_S = 10.0  # long before the time limit of a call, which these would wait for


def refused_messages(group, hosts):
    """Large messages of another size or dtype than expected, and the next one between the same ranks."""
    complaints = []
    with over_hosts(group, hosts) as over:
        for turn in range(3):
            if over.rank == 0:
                handle = over.send(torch.full((BIG,), float(turn)), 2, async_op=True)
                try:
                    handle.wait()
                    complaints.append("the sender was not told")
                except unisono.MismatchError:
                    pass
                over.send(torch.full((BIG,), float(turn)), 2)
            if over.rank == 2:
                wrong = torch.zeros(BIG + 1) if turn % 2 else torch.zeros(BIG, dtype=torch.int32)
                try:
                    over.recv(wrong, 0)
                    complaints.append("the receiver was not told")
                except unisono.MismatchError:
                    pass
                if wrong.any():
                    complaints.append("a refused message was written")
                right = torch.zeros(BIG)
                over.recv(right, 0)
                if not torch.all(right == turn):
                    complaints.append(f"{right} in turn {turn}")
            over.barrier()
    return complaints


@pytest.mark.parametrize("size", [4])
def test_refused_messages(pool, size):
    assert pool.run(refused_messages, LAYOUTS["2+2"]) == [[]] * size


def mismatches(group, hosts, first):
    """Many disagreements in a row, after some calls that went well."""
    raised = 0
    with over_hosts(group, hosts) as over:
        for _ in range(first):
            over.barrier()
        for _ in range(12):
            try:
                over.all_reduce(torch.ones(3 if over.rank == 0 else 4))
            except unisono.MismatchError:
                raised += 1
        t = torch.ones(5)
        over.all_reduce(t)
    return raised, t.tolist()


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("layout", ["2+2", "3 hosts"])
@pytest.mark.parametrize("size", [4])
def test_mismatches_in_a_row(pool, size, layout, first):
    assert pool.run(mismatches, LAYOUTS[layout], first) == [(12, [float(size)] * 5)] * size


def from_anyone(group, hosts):
    """A message inside the host that waits behind many which nobody has asked for yet."""
    with over_hosts(group, hosts) as over:
        if over.rank == 1:
            for i in range(40):
                over.send(torch.full((2,), float(i)), 0, 1)
            over.send(torch.full((2,), 99.0), 0, 2)
        got = torch.zeros(2)
        if over.rank == 0:
            over.recv(got, None, 2)
            for i in range(40):
                one = torch.zeros(2)
                over.recv(one, None, 1)
                assert one.tolist() == [i, i]
        over.barrier()
        return got.tolist()


@pytest.mark.parametrize("size", [4])
def test_from_anyone_behind_others(pool, size):
    assert pool.run(from_anyone, LAYOUTS["2+2"])[0] == [99.0, 99.0]


def two_receives(group, hosts, rounds):
    """A receive from a rank of the host and one from anyone, same tag: neither takes the other's message for long."""
    with over_hosts(group, hosts) as over:
        for _ in range(rounds):
            if over.rank == 0:
                tensors = [torch.zeros(2), torch.zeros(2)]
                handles = [over.recv(tensors[0], 1, async_op=True), over.recv(tensors[1], None, async_op=True)]
                for handle in handles:
                    handle.wait()
                assert [t[0].item() for t in tensors] == [1.0, 2.0]
            elif over.rank in (1, 2):
                over.send(torch.full((2,), float(over.rank)), 0)
            over.barrier()


@pytest.mark.parametrize("size", [4])
def test_two_receives(pool, size):
    pool.run(two_receives, LAYOUTS["2+2"], 50)


def closed_together(group, hosts):
    """All ranks close at once, with a receive that nothing comes for and a message that nobody has read."""
    before = threading.active_count()
    for _ in range(5):
        with over_hosts(group, hosts, together=False) as over:
            over.barrier()
            other = (over.rank + 2) % 4
            handle = over.recv(torch.zeros(2), other, 5, async_op=True)
            over.send(torch.zeros(2), other, 6)
            group.barrier()
        assert isinstance(handle._pending.error(), unisono.UnisonoError)
    end = time.monotonic() + SOON_S
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    return threading.active_count() - before


@pytest.mark.parametrize("size", [4])
def test_closed_together(pool, size):
    assert pool.run(closed_together, LAYOUTS["2+2"]) == [0] * size


def long_words(group, hosts):
    with over_hosts(group, hosts, 60.0, together=False) as over:
        group.barrier()
        if over.rank == 3:
            time.sleep(0.2)
            over.abort("数据加载失败" * 100)
        began = time.monotonic()
        try:
            over.all_reduce(torch.ones(4))
        except unisono.AbortedError as error:
            return "数据加载失败" in str(error), time.monotonic() - began < SOON_S
    return "nothing was raised"


def test_long_words_of_another_alphabet():
    assert run_ranks(4, long_words, LAYOUTS["2+2"], timeout_s=45) == [(True, True)] * 4


def parent_of_a_failed_group(group, hosts):
    """A subgroup is aborted in the middle of its data: its parent works, or says soon that it cannot."""
    with over_hosts(group, hosts, 60.0, together=False) as over:
        child = over.split([over.rank % 2, over.rank % 2 + 2])
        if over.rank == 2:
            threading.Timer(0.3, child.abort, ("enough",)).start()
        if over.rank % 2 == 0:
            with pytest.raises(unisono.UnisonoError):
                while True:
                    child.all_reduce(torch.ones(2_000_000))
        group.barrier()
        began = time.monotonic()
        said = ""
        try:
            for _ in range(20):
                t = torch.ones(300_000)
                over.all_reduce(t)
                assert torch.all(t == 4)
                time.sleep(0.05)
        except unisono.UnisonoError as error:
            said = str(error)
        return not said or "was given up" in said, time.monotonic() - began < SOON_S


def test_parent_of_a_failed_group():
    assert run_ranks(4, parent_of_a_failed_group, LAYOUTS["2+2"], timeout_s=60) == [(True, True)] * 4
