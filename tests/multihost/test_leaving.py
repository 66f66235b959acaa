"""Groups that some ranks have closed: what others still send to them, or still expect, disturbs nobody."""

import gc
import time

import pytest
import torch

import unisono
from tests.multihost.pretended import LAYOUTS, over_hosts
from unisono.testing import run_ranks
from unisono.transport.hosts.links import Bulk

LARGE = 400_000  # floats
SOON_S = 10.0  # of 30, at which calls that hang would end


def one_more_call(group):
    """Rank 0 is in a call on a part of the group, waiting for rank 1 of its host, when the other host leaves the part.

    Of two leaders the lower one sends first: so it sends to a rank that has left.
    """
    with over_hosts(group, LAYOUTS["2+2"], 30.0) as over:
        part = over.split([0, 1, 2, 3])
        part.all_reduce(torch.ones(4))
        group.barrier()
        said = ""
        if over.rank > 1:
            time.sleep(0.3)
            part.close()
            del part
            gc.collect()
            group.send(torch.ones(1), 1)
        else:
            if over.rank == 1:
                for source in (2, 3):
                    group.recv(torch.ones(1), source)
            try:
                part.all_reduce(torch.ones(4))
            except unisono.PeerLostError as error:
                said = error.peers
            part.close()
        group.barrier()
        began = time.monotonic()
        for _ in range(10):  # as many as receives were posted
            tensor = torch.ones(LARGE)
            over.all_reduce(tensor)
            assert torch.all(tensor == 4)
        return said, time.monotonic() - began < SOON_S


def test_a_call_on_a_part_that_was_left():
    said = run_ranks(4, one_more_call, timeout_s=60)
    assert said == [((2,), True)] * 2 + [("", True)] * 2


def last_call(group, verb, of_part):
    """Ranks 0 and 1 only receive, and leave at once; rank 3 asks late whether they have read what it sent."""
    acknowledgement = Bulk.acknowledgement

    def late(self, peer, index):
        time.sleep(0.7)
        return acknowledgement(self, peer, index)

    with over_hosts(group, LAYOUTS["2+2"], 30.0, together=of_part) as over:
        used = over.split([0, 1, 2, 3]) if of_part else over
        used.barrier()
        began, got = time.monotonic(), torch.zeros(LARGE)
        if over.rank > 1:
            Bulk.acknowledgement = late
        try:
            if verb == "scatter":
                parts = [torch.full((LARGE,), float(r)) for r in range(4)] if over.rank == 3 else None
                used.scatter(got, parts, 3)
                right = got[-1] == over.rank
            else:
                counts = [0, 0, 0, LARGE]
                used.all_gather(got, torch.full((counts[over.rank],), 7.0), counts)
                right = got[-1] == 7
        finally:
            Bulk.acknowledgement = acknowledgement
        used.close()
        del used
        if not of_part:
            del over
        gc.collect()
        return bool(right), time.monotonic() - began < SOON_S


@pytest.mark.parametrize("of_part", [True, False], ids=["part", "world"])
@pytest.mark.parametrize("verb", ["scatter", "all_gather"])
def test_who_only_receives_may_leave(verb, of_part):
    """The acknowledgement still comes; or the connection is closed, which says as much."""
    assert run_ranks(4, last_call, verb, of_part, timeout_s=60) == [(True, True)] * 4


def left_and_gone(group):
    """As above, but no acknowledgement was sent, as if it were lost with the process; rank 3 already waits for it."""
    with over_hosts(group, LAYOUTS["2+2"], 30.0, together=False) as over:
        if over.rank < 2:
            Bulk.acknowledge = lambda self, peer, index: None
        began, got = time.monotonic(), torch.zeros(LARGE)
        over.scatter(got, [torch.full((LARGE,), float(r)) for r in range(4)] if over.rank == 3 else None, 3)
        over.close()
        del over
        gc.collect()
        return got[-1].item(), time.monotonic() - began < SOON_S


def test_who_only_receives_may_end():
    assert run_ranks(4, left_and_gone, timeout_s=60) == [(float(r), True) for r in range(4)]
