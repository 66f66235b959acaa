"""The same calls on groups of torch.distributed: gloo, and the unisono backend by group, by name and by default."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.fused.cases import Case, check, same_on_all_ranks
from unisono.group import names as groups

CASES = [
    Case((3, 0, 4), (7, 5, 6), (9, 4, 3), dtype="float16", bias="float16", residual=True, scale=0.5),
    Case((3, 5), (7, 7), (9, 9), split_item=3, dtype="bfloat16", bias="float32", bias_mode="sum", comm_turn=3),
    Case((2, 5), (7, 7), (9, 8), split_item=1, dtype="float32", reduce_op="avg", totals=False),
    Case((2, 6), (7, 9), (8, 8), split_item=2, dtype="float64", reduce_op="max", weights="transposed"),
    Case((6, 4), (7, 9), (8, 3), dtype="float32", verb="reduce_scatter", bias="float32", residual=True),
    Case((6, 4), (7, 9), (8, 3), dtype="float16", verb="reduce_scatter", splits=((5, 1), (0, 4)), weights="prepared"),
    Case((6, 4), (7, 9), (8, 3), dtype="bfloat16", verb="all_gather", splits=((5, 1), (0, 4)), bias="float32"),
    Case((6, 4), (7, 7), (8, 8), split_item=3, dtype="float32", verb="all_gather", splits=((0, 10),)),
]


def on_backend(group, backend, path, how):
    store = dist.FileStore(path, group.size)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=limit)
    try:
        world = dist.group.WORLD
        assert world is not None
        assert (groups.native(world) is not None) == (backend == "unisono")
        given = {"group": world, "name": world.group_name, "default": None}[how]
        digests = [check(given, case, group.rank, group.size) for case in CASES]
        # Gradients too.
        x, w = torch.ones(2, 3, requires_grad=True), torch.full((3, 4), 2.0 + group.rank, requires_grad=True)
        unisono.matmul_all_reduce(x, w, given).sum().backward()
        assert x.grad.tolist() == [[8.0 * (2 + group.rank)] * 3] * 2 and w.grad.tolist() == [[4.0] * 4] * 3
        # The tree order only where sums follow it.
        x, w = torch.ones(2, 128, requires_grad=True), torch.ones(128, 128)
        if backend == "gloo":
            for call in (unisono.matmul_all_reduce, unisono.matmul_reduce_scatter):
                with pytest.raises(ValueError, match="order 'tree' needs a group of unisono"):
                    call(x, w, given, order="tree")
            y = unisono.all_gather_matmul(x, w, given, order="tree")
            with pytest.raises(ValueError, match="order 'tree' needs a group of unisono"):
                y.sum().backward()
        else:
            assert unisono.matmul_all_reduce(x, w, given, order="tree").tolist() == [[256.0] * 128] * 2
        return digests
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "backend, how", [("gloo", "group"), ("unisono", "group"), ("gloo", "name"), ("unisono", "default")]
)
@pytest.mark.parametrize("size", [2])
def test_backends(pool, size, backend, how, tmp_path):
    same_on_all_ranks(pool.run(on_backend, backend, str(tmp_path / "store"), how), CASES)


def outside(group, path):
    store = dist.FileStore(path, group.size)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    group.barrier()  # gloo's connections are not there on all ranks when one of them has its own
    try:
        first = dist.new_group([0])
        if group.rank == 0:
            return unisono.matmul_all_reduce(torch.ones(1, 2), torch.ones(2, 1), first).item()
        try:
            unisono.matmul_all_reduce(torch.ones(1, 2), torch.ones(2, 1), first)
        except ValueError as error:
            return str(error)
        raise AssertionError("expected an error")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [2])
def test_a_rank_outside_of_the_group(pool, size, tmp_path):
    said = "For a fused matmul, this process must be in the group, and it is not"
    assert pool.run(outside, str(tmp_path / "store")) == [2.0, said]


def compiled_on_backend(group, path):
    torch._dynamo.reset()
    dist.init_process_group("unisono", store=dist.FileStore(path, group.size), rank=group.rank, world_size=group.size)
    try:
        fast = torch.compile(
            lambda x, w: unisono.matmul_all_reduce(x, w, dist.group.WORLD), fullgraph=True, backend="aot_eager"
        )
        x = torch.ones(2, 3, requires_grad=True)
        y = fast(x, torch.ones(3, 4))
        y.sum().backward()
        return y.tolist(), x.grad.tolist()
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


@pytest.mark.parametrize("size", [2])
def test_compile_with_a_process_group(pool, size, tmp_path):
    assert pool.run(compiled_on_backend, str(tmp_path / "store")) == [([[6.0] * 4] * 2, [[8.0] * 3] * 2)] * 2
