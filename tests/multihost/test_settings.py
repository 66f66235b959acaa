"""Settings of groups over hosts: those that must be equal are compared at joining; any number of interfaces works."""

import logging
import os

import pytest
import torch

import unisono
from tests.multihost.pretended import LAYOUTS, over_hosts
from unisono.base import settings
from unisono.testing import run_ranks
from unisono.transport.hosts import engine


def with_setting(group, name, values):
    """Each host has its own value; what joining says, or else the sum of a 16-bit call."""
    setattr(settings, name, values[group.rank // 2])
    try:
        with over_hosts(group, LAYOUTS["2+2"], 20.0, together=False) as over:
            tensor = torch.full((1000,), 1.0 + over.rank / 128, dtype=torch.bfloat16)
            over.all_reduce(tensor)
            return tensor[0].item()
    except unisono.MismatchError as error:
        return error.op, error.peers, str(error)


def test_ranks_that_differ_on_fp32():
    """Their partial sums have other widths: one host would read the other's bits as numbers of another type."""
    said = run_ranks(4, with_setting, "hosts_fp32", [False, True], timeout_s=60)
    for rank, outcome in enumerate(said):
        assert isinstance(outcome, tuple), outcome
        op, peers, text = outcome
        assert op == "join" and peers == ((2, 3) if rank < 2 else (0, 1))
        assert "rank 0   UNISONO_HOSTS_FP32 0\n" in text and "UNISONO_HOSTS_FP32 1   <- differs" in text, text


def test_ranks_that_differ_on_the_engine():
    said = run_ranks(4, with_setting, "hosts_engine", ["gloo", "other"], timeout_s=60)
    assert all("UNISONO_HOSTS_ENGINE other" in text for _, _, text in said)


@pytest.mark.parametrize("wide", [False, True])
def test_ranks_that_agree(wide):
    said = run_ranks(4, with_setting, "hosts_fp32", [wide, wide], timeout_s=60)
    assert len(set(said)) == 1 and isinstance(said[0], float), said


def changed_later(group):
    """The setting is read once, at joining: no rank changes the width of its sums while others do not."""
    with over_hosts(group, LAYOUTS["2+2"]) as over:
        settings.hosts_fp32 = over.rank < 2
        try:
            part = over.split([0, 1, 2, 3])
            tensors = [torch.full((n,), 1.0 + over.rank / 128, dtype=torch.bfloat16) for n in (1000, 100_000)]
            for tensor in tensors:
                over.all_reduce(tensor)
                part.all_reduce(tensor)
            part.close()
        finally:
            settings.hosts_fp32 = False
        return [tensor[0].item() for tensor in tensors]


@pytest.mark.parametrize("size", [4])
def test_a_setting_that_is_changed_later(pool, size):
    said = pool.run(changed_later)
    assert all(values == said[0] for values in said) and said[0][0] == said[0][1], said


def over_interfaces(group, names, rounds):
    """Large data whose every element changes from round to round: what is read too early is seen."""
    lines, wrong = [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("unisono")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    os.environ["GLOO_SOCKET_IFNAME"] = names
    n = 400_000
    with over_hosts(group, LAYOUTS["2+2"]) as over:
        output = torch.zeros(4 * n)
        for i in range(rounds):
            over.all_gather(output, torch.full((n,), float(10 * i + over.rank)))
            want = torch.arange(4).float().repeat_interleave(n) + 10 * i
            wrong += [] if torch.equal(output, want) else [f"all_gather {i}"]
            other = (over.rank + 2) % 4
            got = torch.zeros(n)
            sent = over.send(torch.full((n,), float(10 * i + over.rank)), other, async_op=True)
            over.recv(got, other)
            sent.wait()
            wrong += [] if torch.all(got == 10 * i + other) else [f"message {i}"]
    return wrong, [line for line in lines if line.startswith("between hosts")]


@pytest.mark.parametrize("names", ["lo", "lo,lo", "lo,lo,lo", "lo, lo,lo,lo,lo"])
def test_several_interfaces(names):
    for wrong, said in run_ranks(4, over_interfaces, names, 12, timeout_s=100):
        assert not wrong
        assert len(said) == 1 and ", ".join(["lo"] * (names.count(",") + 1)) in said[0], said


def test_two_ranks_keep_to_one_connection():
    """The same on both ends, whatever the tag; and the lanes of two hosts have each their own."""
    used = []

    class Group:
        def __init__(self, number):
            self.number = number

        def send(self, tensors, peer, tag):
            used.append(self.number)

        recv = send

    for count in (1, 2, 3):
        ends = [engine.BackendEngine(rank, lambda n=count: [Group(i) for i in range(n)]) for rank in range(4)]
        by_pair = {}
        for a in range(4):
            for b in range(4):
                used.clear()
                for tag in range(20):
                    ends[a].send(None, b, tag)
                    ends[b].recv(None, a, tag)
                assert len(set(used)) == 1
                by_pair[a, b] = used[0]
        assert count == 1 or by_pair[0, 2] != by_pair[1, 3]
