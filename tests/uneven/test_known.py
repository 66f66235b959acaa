"""The cases that the documents of the originals show, with their numbers."""

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.uneven.cases import KINDS, world


def documented(group, kind, path):
    rank = group.rank
    with world(group, kind, path) as of:
        splits = [2, 3]
        source = torch.ones(5, dtype=torch.int32)
        part = torch.zeros(splits[rank], dtype=torch.int32)
        unisono.reduce_scatter_tensor_uneven(part, source, input_split_sizes=splits, group=of, async_op=False)
        parts = [torch.tensor([1, 2], dtype=torch.int32), torch.tensor([4, 5, 6], dtype=torch.int32)]
        whole = torch.zeros(5, dtype=torch.int32)
        unisono.all_gather_into_tensor_uneven(whole, parts[rank], output_split_sizes=splits, group=of, async_op=False)
        source = torch.arange(10, dtype=torch.int32).reshape(5, 2)
        rows = torch.zeros([4, 1][rank], 2, dtype=torch.int32)
        unisono.reduce_scatter_tensor_uneven(rows, source, [4, 1], group=of)
        return part.tolist(), whole.tolist(), rows.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2])
def test_documented_examples(pool, size, kind, tmp_path):
    first, second = pool.run(documented, kind, str(tmp_path / "store"))
    assert first == ([2, 2], [1, 2, 4, 5, 6], [[0, 2], [4, 6], [8, 10], [12, 14]])
    assert second == ([2, 2, 2], [1, 2, 4, 5, 6], [[16, 18]])


def eight(group, kind, path):
    with world(group, kind, path) as of:
        splits = [r + 1 for r in range(8)]
        source = torch.cat([torch.full((r + 1, 2), float(r)) for r in range(8)])
        part = torch.zeros(splits[group.rank], 2)
        unisono.reduce_scatter_tensor_uneven(part, source, splits, group=of)
        return part.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [8])
def test_eight_ranks_with_rising_rows(pool, size, kind, tmp_path):
    results = pool.run(eight, kind, str(tmp_path / "store"))
    assert results == [[[r * 8.0] * 2] * (r + 1) for r in range(8)]


def subgroup(group, kind, path):
    rank = group.rank
    with world(group, kind, path):
        some = dist.new_group([0, 1])
        outcome = None
        if rank < 2:
            whole = torch.zeros(3, dtype=torch.int64)
            mine = torch.full(([1, 2][rank],), rank + 1)
            unisono.all_gather_into_tensor_uneven(whole, mine, [1, 2], some)
            part = torch.zeros([1, 2][rank], dtype=torch.int64)
            unisono.reduce_scatter_tensor_uneven(part, whole, [1, 2], group=some)
            outcome = whole.tolist(), part.tolist()
        dist.barrier()
        return outcome


@pytest.mark.parametrize("kind", ["unisono", "gloo"])
@pytest.mark.parametrize("size", [3])
def test_subgroup(pool, size, kind, tmp_path):
    results = pool.run(subgroup, kind, str(tmp_path / "store"))
    assert results == [([1, 2, 2], [2]), ([1, 2, 2], [4, 4]), None]
