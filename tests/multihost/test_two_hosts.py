"""Calls of up to 1 MiB on two hosts: more than a small call, but their data goes with the requests all the same."""

import itertools
import signal
import time

import pytest
import torch
import torch.distributed as dist

import unisono
from tests import reference
from tests.multihost.pretended import LAYOUTS, over_hosts
from tests.multihost.test_faults import BOUND_S, killed
from unisono.testing import run_ranks
from unisono.testing.hosts import Hosts, run_on_hosts, why_not
from unisono.transport.hosts.agreement import SMALL_BYTES
from unisono.transport.hosts.links import Bulk

TWO_HOSTS = {"1+1": "0,1", **{name: LAYOUTS[name] for name in ("2+2", "interleaved", "1+3")}}
SIZES = [(len(hosts.split(",")), name) for name, hosts in TWO_HOSTS.items()]
ROUNDS = 10  # more than buffers of a leader


def values(group, hosts):
    """One below the limit, at it and one above, each several times in a row; and which were large calls."""
    complaints, large = [], []
    begin = Bulk.__init__

    def counted(self, *arguments):
        large[-1] += 1
        begin(self, *arguments)

    Bulk.__init__ = counted
    try:
        with over_hosts(group, hosts) as over:
            limit, size, rank = over.transport.small_bytes, over.size, over.rank
            assert SMALL_BYTES < limit <= 1 << 20
            for n in (limit // 4 - 1, limit // 4, limit // 4 + 1):
                large.append(0)
                counts = [n // 5, 0, n // 3, 0][:size]
                counts[-1] = n - sum(counts[:-1])
                whole, span = torch.arange(n).remainder(1009).float(), reference.span(counts, rank)
                for i in range(ROUNDS):
                    tensor = whole * (rank + 1) + i
                    over.all_reduce(tensor)
                    if not torch.equal(tensor, whole * (size * (size + 1) // 2) + i * size):
                        complaints.append(f"all_reduce of {n}, round {i}")
                    output = torch.zeros(n)
                    over.all_gather(output, whole[span] + i, counts)
                    if not torch.equal(output, whole + i):
                        complaints.append(f"all_gather of {n}, round {i}")
                    mine = torch.zeros(counts[rank])
                    over.reduce_scatter(mine, whole + rank + i, counts)
                    if not torch.equal(mine, (whole[span] + i) * size + size * (size - 1) // 2):
                        complaints.append(f"reduce_scatter of {n}, round {i}")
                    tensor = whole + i if rank == i % size else torch.zeros(n)
                    over.broadcast(tensor, i % size)
                    if not torch.equal(tensor, whole + i):
                        complaints.append(f"broadcast of {n}, round {i}")
    finally:
        Bulk.__init__ = begin
    return complaints, large


@pytest.mark.parametrize(("size", "layout"), SIZES)
def test_values(pool, size, layout):
    assert pool.run(values, TWO_HOSTS[layout]) == [([], [0, 0, 4 * ROUNDS])] * size


def disagree(group, hosts):
    """Rank 0 asks for another size, a large call or another verb: every rank says so, and the next call goes well."""
    complaints = []
    with over_hosts(group, hosts) as over:
        most = over.transport.small_bytes // 4
        odd = {
            "another size": lambda: over.all_reduce(torch.ones(most - 1)),
            "a small call": lambda: over.all_reduce(torch.ones(3)),
            "a large call": lambda: over.all_reduce(torch.ones(most + 1)),
            "another operation": lambda: over.all_reduce(torch.ones(most), "max"),
            "another verb": over.barrier,
        }
        for what, call in itertools.chain.from_iterable([odd.items()] * 2):
            try:
                call() if over.rank == 0 else over.all_reduce(torch.ones(most))
                complaints.append(f"{what}: nothing was raised")
            except unisono.MismatchError as error:
                if "<- differs" not in str(error) or str(error).count("\n  rank ") != over.size:
                    complaints.append(f"{what}: {error}")
            tensor = torch.ones(most)
            over.all_reduce(tensor)
            if not torch.all(tensor == over.size):
                complaints.append(f"after {what}")
    return complaints


@pytest.mark.parametrize(("size", "layout"), SIZES)
def test_disagreeing_ranks(pool, size, layout):
    assert pool.run(disagree, TWO_HOSTS[layout]) == [[]] * size


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_alone_on_its_host(victim, tmp_path):
    what, path = "streaming in one message", str(tmp_path / "at")
    said = run_ranks(2, killed, TWO_HOSTS["1+1"], what, [victim], True, path, check=False, timeout_s=45)
    assert said[victim].signal == signal.SIGKILL, said
    since, peers, text, again, closing = said[1 - victim]
    print(f"known after {since * 1000:.0f} ms: {text.splitlines()[0]}")
    assert peers == (victim,) and "on host" in text and again == "PeerLostError"
    assert since < BOUND_S and closing < 2.5


def last_call(destroy):
    """Rank 0 comes late, finds what the other has sent, and ends at once: what it sends takes 0.4 s more."""
    dist.init_process_group("unisono")
    tensor = torch.full((250_000,), 1.0 + dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.6)
    began = time.monotonic()
    dist.all_reduce(tensor)
    took_s = time.monotonic() - began
    if destroy:
        dist.destroy_process_group()
    return bool(torch.all(tensor == 3)), took_s


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
@pytest.mark.parametrize("destroy", [True, False], ids=["destroyed", "not destroyed"])
def test_leaving_while_the_data_is_on_its_way(destroy):
    with Hosts(2, rate="20M") as hosts:
        (right, took_s), (also_right, took_longer_s) = run_on_hosts([1, 1], last_call, destroy, hosts=hosts)
    assert right and also_right
    assert took_s < took_longer_s - 0.3  # else nothing was on its way
