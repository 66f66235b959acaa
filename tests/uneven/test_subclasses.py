"""Tensors of other classes than torch's own: they are tensors like any, and results not yet there are waited for."""

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import unisono
from tests.functional.worlds import world


class Named(torch.Tensor):
    """What libraries make of tensors: no dispatching of its own."""


def _end(work):
    if work is not None:
        work.wait()


def _subclasses(group, kind, folder, async_op):
    with world(group, kind, folder) as where:
        me = group.rank
        whole, mine = torch.zeros(3), torch.full((me + 1,), float(me))
        for output, input in ((whole, mine.as_subclass(Named)), (whole.as_subclass(Named), mine)):
            _end(unisono.all_gather_into_tensor_uneven(output, input, [1, 2], where, async_op))
            assert whole.tolist() == [0.0, 1.0, 1.0]
            whole.zero_()
        part = torch.zeros(me + 1).as_subclass(Named)
        _end(unisono.reduce_scatter_tensor_uneven(part, torch.ones(3), [1, 2], "sum", where, async_op))
        assert part.tolist() == [2.0] * (me + 1)
        out = torch.zeros(2).as_subclass(Named)
        _end(unisono.all_to_all_vc(out, torch.ones(2).as_subclass(Named), [[1, 1], [1, 1]], where, async_op))
        assert out.tolist() == [1.0, 1.0]
        if kind != "Group":  # what torch's functional collectives give: it waits when it is read
            later = AsyncCollectiveTensor(torch.full((2,), 2.0))
            both = torch.zeros(4)
            _end(unisono.all_gather_into_tensor_uneven(both, later, [2, 2], where, async_op))
            assert both.tolist() == [2.0] * 4


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", ["Group", "unisono", "gloo"])
@pytest.mark.parametrize("async_op", [False, True])
def test_subclasses(pool, size, kind, async_op, tmp_path):
    pool.run(_subclasses, kind, str(tmp_path), async_op)
