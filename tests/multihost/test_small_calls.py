"""Small calls are one message from each host to each other, whatever their ranks; coalesced calls over hosts."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.multihost.pretended import LAYOUTS, over_hosts, pretending
from tests.torch_stack.worlds import world
from unisono.transport import find
from unisono.transport.hosts.links import Links
from unisono.transport.hosts.transport import HostsTransport

CALLS = {
    "all_reduce": lambda g, n: g.all_reduce(torch.ones(n)),
    "reduce": lambda g, n: g.reduce(torch.ones(n), 2),
    "reduce_scatter": lambda g, n: g.reduce_scatter(torch.ones(n), torch.ones(n * g.size)),
    "broadcast": lambda g, n: g.broadcast(torch.ones(n), 1),
    "all_gather": lambda g, n: g.all_gather(torch.ones(n * g.size), torch.ones(n)),
    "gather": lambda g, n: g.gather(torch.ones(n * g.size) if g.rank == 3 else None, torch.ones(n), 3),
    "scatter": lambda g, n: g.scatter(torch.ones(n), torch.ones(n * g.size) if g.rank == 3 else None, 3),
    "all_to_all": lambda g, n: g.all_to_all(torch.ones(n * g.size), torch.ones(n * g.size)),
    "barrier": lambda g, n: g.barrier(),
}


def sent(group, hosts, n, names):
    """By call: how many messages this rank has sent to each other; ``n`` floats for each rank."""
    found = {}
    send = Links.send

    def counted(self, tensor, peer, tag):
        counts[peer] += 1
        return send(self, tensor, peer, tag)

    Links.send = counted
    try:
        with over_hosts(group, hosts) as over:
            for name in names:
                group.barrier()
                counts = Counter()
                CALLS[name](over, n)
                found[name] = dict(counts)
                group.barrier()
    finally:
        Links.send = send
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [4])
def test_one_message_for_two_hosts(pool, size, layout):
    places = [int(h) for h in LAYOUTS[layout].split(",")]
    leaders = {h: places.index(h) for h in set(places)}
    # Two hosts exchange more than small calls so, but for data that differs from rank to rank.
    alike = [name for name in CALLS if name not in ("gather", "scatter", "all_to_all")]
    for n, names in [(1000, list(CALLS)), (40_000, alike)][: 2 if len(leaders) == 2 else 1]:
        for rank, by_call in enumerate(pool.run(sent, LAYOUTS[layout], n, names)):
            others = {leader: 1 for h, leader in leaders.items() if h != places[rank]}
            wanted = others if rank in leaders.values() else {}
            assert by_call == dict.fromkeys(names, wanted), (rank, n)


@pytest.mark.parametrize("layout", ["3 hosts", "4 hosts"])
@pytest.mark.parametrize("size", [4])
def test_between_more_than_two_hosts(pool, size, layout):
    """What is not much is one message too, unless all of it would go to every host; an all_reduce is two."""
    places = [int(h) for h in LAYOUTS[layout].split(",")]
    leaders = {h: places.index(h) for h in set(places)}
    names = ["all_reduce", "reduce", "reduce_scatter", "all_gather"]
    for rank, by_call in enumerate(pool.run(sent, LAYOUTS[layout], 40_000, names)):
        others = [leader for h, leader in leaders.items() if h != places[rank] and rank in leaders.values()]
        wanted = {name: dict.fromkeys(others, 2 if name == "all_reduce" else 1) for name in names}
        assert by_call == wanted, rank


def coalesced(group, hosts):
    """Calls of a coalescing block, small and large ones, and the functions that take lists."""
    complaints = []
    with pretending(hosts), world(group, "unisono"):
        assert isinstance(find.find(None, torch.ones(1)), HostsTransport)
        rank, size = dist.get_rank(), dist.get_world_size()
        total = sum(range(1, size + 1))
        for n in (3, 100_000):
            for async_op in (False, True):
                tensors = [torch.full((n + i,), float(rank + 1)) for i in range(3)]
                with dist._coalescing_manager(async_ops=async_op) as manager:
                    for t in tensors:
                        dist.all_reduce(t, async_op=async_op)
                if async_op:
                    manager.wait()
                complaints += [f"all_reduce {n}"] if not all(torch.all(t == total) for t in tensors) else []

                whole = [torch.zeros(size * (n + i)) for i in range(3)]
                with dist._coalescing_manager(device=torch.device("cpu"), async_ops=async_op) as manager:
                    for i, t in enumerate(whole):
                        dist.all_gather_into_tensor(t, torch.full((n + i,), float(rank)), async_op=async_op)
                if async_op:
                    manager.wait()
                want = [torch.arange(size).float().repeat_interleave(n + i) for i in range(3)]
                complaints += [f"all_gather {n}"] if not all(map(torch.equal, whole, want)) else []

                parts = [torch.zeros(n + i) for i in range(3)]
                with dist._coalescing_manager(async_ops=async_op) as manager:
                    for i, t in enumerate(parts):
                        source = torch.arange(size).float().repeat_interleave(n + i) + rank
                        dist.reduce_scatter_tensor(t, source, async_op=async_op)
                if async_op:
                    manager.wait()
                right = all(torch.all(t == size * rank + total - size) for t in parts)
                complaints += [f"reduce_scatter {n}"] if not right else []
            tensors = [torch.full((n + i,), float(rank + 1)) for i in range(3)]
            dist.all_reduce_coalesced(tensors)
            complaints += [f"all_reduce_coalesced {n}"] if not all(torch.all(t == total) for t in tensors) else []
            near = rank ^ 1
            got, messages = torch.zeros(n), torch.full((n,), float(rank))
            far = torch.zeros(n)
            across = (rank + 2) % size
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, messages, near),
                    dist.P2POp(dist.irecv, got, near),
                    dist.P2POp(dist.isend, messages, across),
                    dist.P2POp(dist.irecv, far, across),
                ]
            )
            for work in works:
                work.wait()
            complaints += [f"messages {n}"] if not (torch.all(got == near) and torch.all(far == across)) else []
        dist.barrier()
    return complaints


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own words on coalesced functions
@pytest.mark.parametrize("layout", ["2+2", "interleaved", "1+3"])
@pytest.mark.parametrize("size", [4])
def test_coalesced_calls(pool, size, layout):
    assert pool.run(coalesced, LAYOUTS[layout]) == [[]] * size
