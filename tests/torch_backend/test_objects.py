"""The object collectives: what arrives is equal, also when every rank's object has another size."""

import pytest
import torch
import torch.distributed as dist

from tests.torch_backend import world


def _thing(rank, i=0):
    """Another type and size for every rank."""
    return [None, {"rank": rank, "many": list(range(1000 * rank))}, "ü" * rank, torch.arange(rank + 3), (1, [2, {3}])][
        (rank + i) % 5
    ]


def _same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def _exchange(group_name):
    members = world.groups[group_name]
    if members.group is None:
        return []
    group, ranks, rank = members.group, members.ranks, dist.get_rank()
    size = len(ranks)
    complaints = []

    def compare(name, got, want):
        if len(got) != len(want) or not all(map(_same, got, want)):
            complaints.append(f"{name} in {group_name}: {got}, want {want}")

    got = ["?"] * size
    dist.all_gather_object(got, _thing(rank), group=group)
    compare("all_gather_object", got, [_thing(r) for r in ranks])
    for root in ranks:
        got = ["?"] * size if rank == root else None
        dist.gather_object(_thing(rank, 1), got, dst=root, group=group)
        if rank == root:
            compare("gather_object", got, [_thing(r, 1) for r in ranks])
        got = [_thing(root, i) for i in range(3)] if rank == root else ["?"] * 3
        dist.broadcast_object_list(got, src=root, group=group)
        compare("broadcast_object_list", got, [_thing(root, i) for i in range(3)])
        got = ["?"]
        things = [_thing(r, root) for r in ranks] if rank == root else None
        dist.scatter_object_list(got, things, src=root, group=group)
        compare("scatter_object_list", got, [_thing(rank, root)])
    if size > 1:
        to, source = ranks[(members.rank + 1) % size], ranks[(members.rank - 1) % size]
        got = ["?", "?"]
        if members.rank == 0:
            dist.send_object_list([_thing(rank), _thing(rank, 2)], dst=to, group=group)
            answer = dist.recv_object_list(got, src=source, group=group)
        else:
            answer = dist.recv_object_list(got, src=source, group=group)
            dist.send_object_list([_thing(rank), _thing(rank, 2)], dst=to, group=group)
        compare("recv_object_list", [answer, *got], [source, _thing(source), _thing(source, 2)])
    return complaints


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_objects(ranks, size):
    for name in world.layouts(size):
        ranks.check(_exchange, name)
