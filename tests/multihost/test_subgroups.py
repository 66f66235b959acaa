"""Subgroups over hosts: their numbers, what comes when there are no more, and ranks that fail to join."""

import time

import pytest
import torch

import unisono
from tests.multihost.pretended import LAYOUTS, over_hosts
from unisono.testing import run_ranks
from unisono.transport.hosts import joining
from unisono.transport.hosts.links import MOST_CONTEXTS

SOON_S = 10.0  # of 60, at which calls would end


def numbers(group):
    with over_hosts(group, LAYOUTS["2+2"]) as over:
        engine = over.transport.links.engine
        for _ in range(5):
            over.split([0, 1] if over.rank < 2 else [2, 3]).close()
        inside = engine.contexts
        across = over.split([over.rank % 2, over.rank % 2 + 2])
        group.barrier()
        across.close()
        return inside, engine.contexts


@pytest.mark.parametrize("size", [4])
def test_subgroups_inside_a_host_take_no_number(pool, size):
    assert pool.run(numbers) == [(0, 1)] * size


def beyond(group):
    """More subgroups than there are numbers, one after the other, two at a time, and of one another."""
    totals = []
    with over_hosts(group, LAYOUTS["2+2"]) as over:
        engine = over.transport.links.engine
        engine.contexts = MOST_CONTEXTS - 4
        for i in range(8):
            members = [[0, 1, 2, 3], [3, 1, 0]][i % 2]
            child = over.split(members if over.rank in members else None)
            if child is not None:
                tensor = torch.full((200_000,), over.rank + 1.0)
                child.all_reduce(tensor)
                assert tensor[0].item() == sum(r + 1.0 for r in members)
                totals.append(child.transport.links.engine is engine)
                if i % 2 == 0:  # it has numbers of its own
                    grandchild = child.split([child.rank % 2, child.rank % 2 + 2])
                    tensor = torch.ones(4)
                    grandchild.all_reduce(tensor)
                    assert tensor[0].item() == 2.0
                    grandchild.close()
                child.close()
        near = over.split([0, 1] if over.rank < 2 else [2, 3])
        tensor = torch.ones(4)
        near.all_reduce(tensor)
        over.all_reduce(tensor)  # nobody was disturbed
        near.close()
        assert engine.contexts < MOST_CONTEXTS
        return totals[:2], totals[-2:], tensor[0].item()


def test_more_subgroups_than_numbers():
    for first, last, total in run_ranks(4, beyond, timeout_s=120):
        assert first[0] and last == [False, False] and total == 8.0


def without_listeners(group):
    """An engine that ends all ranks when one dies has no listeners, and nobody could meet."""
    with over_hosts(group, LAYOUTS["2+2"]) as over:
        over.transport.links.engine.contexts = MOST_CONTEXTS - 1
        survival, over.transport.survival = over.transport.survival, None
        with pytest.raises(RuntimeError, match="Keep subgroups instead") as caught:
            over.split([0, 1, 2, 3])
        with pytest.raises(ValueError, match="cannot shrink"):
            over._survival = None
            over.shrink()
        survival.close()
        tensor = torch.ones(4)
        over.all_reduce(tensor)
        return str(MOST_CONTEXTS - 1) in str(caught.value), tensor[0].item()


@pytest.mark.parametrize("size", [4])
def test_no_numbers_and_no_listeners(pool, size):
    assert pool.run(without_listeners) == [(True, 4.0)] * size


class Full:
    """A communicator that has no memory for another."""

    def __init__(self, comm):
        self._comm = comm

    def make_block(self, size):
        raise MemoryError("nothing left")

    def __getattr__(self, name):
        return getattr(self._comm, name)


def one_fails(group, hosts, failing):
    """A rank cannot join a subgroup: the others learn it at once, on every host, also those that had joined."""
    with over_hosts(group, hosts) as over:
        began = time.monotonic()
        if over.rank == failing:
            inside = joining._split_inside
            joining._split_inside = lambda comm, *arguments: inside(Full(comm), *arguments)
            with pytest.raises(MemoryError):
                over.split([0, 1, 2, 3], name="child")
            joining._split_inside = inside
            said = ""
        else:
            with pytest.raises(unisono.UnisonoError) as caught:
                child = over.split([0, 1, 2, 3], name="child")
                try:
                    child.all_reduce(torch.ones(4))
                finally:
                    child.close()
            said = str(caught.value)
        took_s = time.monotonic() - began
        tensor = torch.ones(4)
        over.all_reduce(tensor)  # the group it was split from goes on
        return said, took_s, tensor[0].item()


@pytest.mark.parametrize("layout", ["2+2", "1+3", "3 hosts"])
@pytest.mark.parametrize("failing", [0, 2, 3])
def test_a_rank_that_fails_to_join(layout, failing):
    for rank, (said, took_s, total) in enumerate(run_ranks(4, one_fails, LAYOUTS[layout], failing)):
        assert total == 4.0 and took_s < SOON_S, (rank, said, took_s)
        if rank != failing:
            assert "could not join the split" in said, (rank, said)
