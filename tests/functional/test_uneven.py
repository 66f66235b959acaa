"""The uneven forms: values, list-like splits of every kind, on every kind of group."""

import numpy as np
import pytest
import torch

import unisono
from tests.functional.worlds import NATIVE, WORLDS, world
from tests.reference import difference, make_input, reduced
from unisono import comm_func

SPLITS = {1: ([3], [0]), 2: ([1, 3], [0, 5], [4, 4], [0, 0]), 3: ([2, 0, 5], [1, 2, 3], [0, 0, 4])}
FORMS = (
    list,
    tuple,
    torch.Size,
    torch.tensor,
    np.array,
    lambda s: torch.tensor(s, dtype=torch.int32),
    lambda s: list(np.array(s)),
    lambda s: list(torch.tensor(s)),
    iter,
)


def _values(group, kind, folder):
    size, rank = group.size, group.rank
    with world(group, kind, folder) as where:
        for seed, splits in enumerate(SPLITS[size]):
            starts = [sum(splits[:r]) for r in range(size + 1)]
            for dtype, tail in (("float32", (3,)), ("int32", ()), ("bfloat16", (2, 2)), ("float64", (0,))):
                row = torch.Size(tail).numel()
                parts = [make_input(dtype, splits[r] * row, r, seed).reshape(splits[r], *tail) for r in range(size)]
                wholes = (
                    [make_input(dtype, sum(splits) * row, r, seed).reshape(-1, *tail) for r in range(size)]
                    if row
                    else [torch.empty(sum(splits), 0, dtype=torch.float64)] * size
                )
                for form in FORMS:
                    for async_op in (False, True):
                        out, handle = comm_func.all_gather_into_tensor_uneven(
                            parts[rank], form(splits), where, async_op
                        )
                        if handle is not None:
                            handle.wait()
                        assert (handle is not None) == async_op
                        assert out.shape == torch.cat(parts).shape
                        assert not difference(out.reshape(-1), torch.cat(parts).reshape(-1)), (kind, splits, dtype)
                        assert kind not in NATIVE or not out.numel() or unisono.is_shared(out)
                for op in ("sum", "max", "avg", "prod"):
                    total = reduced([t.reshape(-1) for t in wholes], "product" if op == "prod" else op)
                    want = total.reshape(wholes[0].shape)[starts[rank] : starts[rank + 1]]
                    for async_op in (False, True):
                        function = comm_func.reduce_scatter_tensor_uneven
                        out, handle = function(wholes[rank], splits, op, where, async_op)
                        if handle is not None:
                            handle.wait()
                        assert out.shape == want.shape
                        assert not difference(out.reshape(-1), want.reshape(-1)), (kind, splits, dtype, op)
        for equal in (None, [], ()):
            out, _ = comm_func.all_gather_into_tensor_uneven(torch.full((2,), float(rank)), equal, where)
            assert out.tolist() == [float(r) for r in range(size) for _ in range(2)]
            out, _ = comm_func.reduce_scatter_tensor_uneven(torch.arange(2.0 * size), equal, group=where)
            assert out.tolist() == [2.0 * rank * size, (2.0 * rank + 1) * size]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", WORLDS)
def test_values(pool, size, kind, tmp_path):
    pool.run(_values, kind, str(tmp_path))


def _each_other(group):
    """Each is the other's backward."""
    splits = [1, 3]
    x = torch.arange(4.0).reshape(4, 1)[: splits[group.rank]].clone().requires_grad_()
    out, _ = comm_func.all_gather_into_tensor_uneven(x, splits, group)
    weight = torch.arange(4.0).reshape(4, 1) * (group.rank + 1)
    (out * weight).sum().backward()
    want, _ = comm_func.reduce_scatter_tensor_uneven(weight, splits, "sum", group)
    assert torch.equal(x.grad, want)
    y = torch.ones(4, 1, requires_grad=True)
    part, _ = comm_func.reduce_scatter_tensor_uneven(y, splits, "sum", group)
    (part * (group.rank + 1)).sum().backward()
    assert y.grad.reshape(-1).tolist() == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("size", [2])
def test_each_is_the_others_backward(pool, size):
    pool.run(_each_other)
