"""all_reduce of sparse tensors, against the sum of dense ones, and against gloo."""

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.reference import difference, make_input, reduced
from tests.torch_backend import world


def _make(shape, sparse_dim, entries, rank, dtype=torch.float64):
    """`entries` random places, some of them twice, some shared with other ranks."""
    chance = torch.Generator().manual_seed(100 * rank + entries)
    indices = torch.stack([torch.randint(0, n, (entries,), generator=chance) for n in shape[:sparse_dim]])
    values = torch.randint(-50, 50, (entries, *shape[sparse_dim:]), generator=chance).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


CASES = [
    ((30,), 1, lambda r: 8),
    ((30,), 1, lambda r: 0),
    ((30,), 1, lambda r: 5 * r),
    ((7, 9), 2, lambda r: 20),
    ((7, 9), 1, lambda r: 3 + r),
    ((5, 4, 3), 2, lambda r: 11),
    ((400, 300), 2, lambda r: 20_000),
]


def _sums(async_op):
    complaints = []
    for shape, sparse_dim, entries in CASES:
        for dtype in (torch.float64, torch.float32, torch.int64):
            for name, members in world.groups.items():
                if members.group is None:
                    continue
                tensors = [_make(shape, sparse_dim, entries(r), r, dtype) for r in members.ranks]
                mine = tensors[members.rank].clone()
                work = dist.all_reduce(mine, group=members.group, async_op=async_op)
                if work is not None:
                    work.wait()
                    (mine,) = work.result()
                want = sum(t.to_dense() for t in tensors)
                if not torch.equal(mine.to_dense(), want) or mine.shape != want.shape or mine.dtype != want.dtype:
                    complaints.append(f"{shape} with {sparse_dim} sparse dimensions, {dtype}, {name}: wrong sum")
    return complaints


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_sums(ranks, size, async_op):
    ranks.check(_sums, async_op)


def _order():
    """Ranks at the same places, with numbers whose sum depends on the order, against the model of the dense call."""
    complaints = []
    for dtype in (torch.float32, torch.bfloat16):
        dense = [make_input(str(dtype).removeprefix("torch."), 500, r, 3) for r in range(dist.get_world_size())]
        mine = dense[dist.get_rank()].to_sparse()
        dist.all_reduce(mine)
        complaints.append(difference(mine.to_dense(), reduced(dense, "sum")))
    return [c for c in complaints if c]


@pytest.mark.parametrize("size", [5])
def test_order(ranks, size):
    ranks.check(_order)


def _as_gloo():
    for shape, sparse_dim, entries in CASES:
        mine = _make(shape, sparse_dim, entries(dist.get_rank()), dist.get_rank())
        ours, theirs = mine.clone(), mine.clone()
        dist.all_reduce(ours)
        dist.all_reduce(theirs, group=world.gloo)
        ours, theirs = ours.coalesce(), theirs.coalesce()
        assert torch.equal(ours.indices(), theirs.indices()) and torch.equal(ours.values(), theirs.values())


@pytest.mark.parametrize("size", [2, 3])
def test_as_gloo(ranks, size):
    ranks.run(_as_gloo)


def _average():
    """DDP and optimizers divide afterwards: the tensor itself must hold the sum."""
    mine = torch.eye(3).to_sparse()
    dist.all_reduce(mine)
    mine /= dist.get_world_size()
    assert torch.equal(mine.to_dense(), torch.eye(3))


@pytest.mark.parametrize("size", [2])
def test_in_place(ranks, size):
    ranks.run(_average)


def _other_shapes():
    rank = dist.get_rank()
    with pytest.raises(unisono.MismatchError, match=r"ranks disagree on shape") as caught:
        dist.all_reduce(torch.eye(4 if rank == 2 else 3).to_sparse())
    marked = [line for line in str(caught.value).splitlines() if "<- differs" in line]
    assert marked == ["  rank 2   sparse [4, 4], 2 sparse dimensions and 0 dense   <- differs"], caught.value
    assert caught.value.peers == ((0, 1) if rank == 2 else (2,)) and caught.value.op == "all_reduce"
    _average()


@pytest.mark.parametrize("size", [3])
def test_other_shapes(ranks, size):
    ranks.run(_other_shapes)
