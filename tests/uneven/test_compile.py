"""The in-place forms under torch.compile, with fake tensors, and by torch's own checks of operators."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import unisono
from tests.uneven.cases import premul_sum, world

KINDS = ("unisono", "gloo")


def steps(source, splits, group=None, op=dist.ReduceOp.SUM):
    """Gather, reduce and exchange in one graph."""
    source = source * 2
    whole = torch.empty(sum(splits), 2)
    unisono.all_gather_into_tensor_uneven(whole, source, splits, group)
    part = torch.empty_like(source)
    unisono.reduce_scatter_tensor_uneven(part, whole + 1, splits, op, group)
    back = torch.empty_like(part)
    n = dist.get_world_size()
    unisono.all_to_all_vc(
        back.view(-1), part.view(-1), [[2 * splits[i] * (i == j) for j in range(n)] for i in range(n)]
    )
    return back + 1


def in_place(whole, splits, rank):
    start = sum(splits[:rank])
    unisono.all_gather_into_tensor_uneven(whole, whole[start : start + splits[rank]], splits)
    return whole + 1


def in_background(source, splits):
    whole = torch.empty(sum(splits), 2)
    work = unisono.all_gather_into_tensor_uneven(whole, source * 1, splits, async_op=True)
    work.wait()
    return whole * 2


def compiled(group, kind, path):
    rank, complaints = group.rank, []

    def same(what, got, want):
        if not torch.equal(got, want):
            complaints.append(f"{what}: got {got}, want {want}")

    with world(group, kind, path) as pg:
        whole_graph = torch.compile(steps, fullgraph=True, backend="aot_eager")
        for splits in ([1, 2], [2, 2], [0, 3]):
            source = torch.full((splits[rank], 2), 1.0 + rank)
            same(f"{splits}", whole_graph(source, splits), steps(source, splits))
        source = torch.full((1 + rank, 2), 1.0 + rank)
        # The compiler keeps a group object for good, and with it gloo's threads; a closed one of ours is small.
        of = pg if kind == "unisono" else pg.group_name
        for options in ({"group": of, "op": dist.ReduceOp.MAX}, {"group": pg.group_name, "op": "avg"}):
            same(f"{options}", whole_graph(source, [1, 2], **options), steps(source, [1, 2], **options))
        try:
            whole_graph(source, [1, 1, 1])
            complaints.append("wrong splits: nothing was raised")
        except RuntimeError as error:
            if not str(error).startswith("Number of tensor splits not equal to group size"):
                complaints.append(f"wrong splits: {error}")
        torch._dynamo.reset()  # what it has compiled holds the group
    return complaints


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2])
def test_whole_graph(pool, size, kind, tmp_path):
    assert pool.run(compiled, kind, str(tmp_path / "store")) == [[], []]


def other_forms(group, path):
    rank, found = group.rank, {}
    with world(group, "unisono", path):
        whole = torch.zeros(3, 2)
        whole[rank : 2 * rank + 1] = 1.0 + rank
        found["in place"] = torch.compile(in_place, fullgraph=True, backend="aot_eager")(whole, [1, 2], rank).tolist()
        source = torch.full((1 + rank, 2), 1.0 + rank)
        found["async"] = torch.compile(in_background, backend="aot_eager")(source, [1, 2]).tolist()
        for name, wrong in (("op", {"op": premul_sum(2.0)}), ("group", {"group": group})):
            try:
                torch.compile(steps, fullgraph=True, backend="eager")(source, [1, 2], **wrong)
            except Exception as error:
                found[name] = "under torch.compile" in str(error) or str(error)
        torch._dynamo.reset()
    return found


@pytest.mark.parametrize("size", [2])
def test_in_place_and_async(pool, size, tmp_path):
    for found in pool.run(other_forms, str(tmp_path / "store")):
        assert found == {
            "in place": [[2.0] * 2, [3.0] * 2, [3.0] * 2],
            "async": [[2.0] * 2, [4.0] * 2, [4.0] * 2],
            "op": True,
            "group": True,
        }


def checked_by_torch(group, path):
    rank, ops = group.rank, torch.ops.unisono
    with world(group, "unisono", path):
        whole, part = torch.zeros(3, 2), torch.full((1 + rank, 2), 1.0 + rank)
        torch.library.opcheck(ops.all_gather_into_tensor_uneven_.default, (whole, part, [1, 2], ""))
        torch.library.opcheck(ops.reduce_scatter_tensor_uneven_.default, (part, whole, [1, 2], "sum", ""))
        torch.library.opcheck(ops.all_to_all_vc_.default, (torch.zeros(2), torch.zeros(2), [1, 1, 1, 1], ""))
        with FakeTensorMode():
            fake = torch.empty(3, 2)
            returned = unisono.all_gather_into_tensor_uneven(fake, torch.empty(1 + rank, 2), [1, 2])
            work = unisono.reduce_scatter_tensor_uneven(torch.empty(1 + rank, 2), fake, [1, 2], async_op=True)
            return returned is None and work.wait() and work.is_completed() and work.is_success()


@pytest.mark.parametrize("size", [2])
def test_opcheck_and_fake_tensors(pool, size, tmp_path):
    assert pool.run(checked_by_torch, str(tmp_path / "store")) == [True, True]
