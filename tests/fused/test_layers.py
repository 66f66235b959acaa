"""`unisono.tensor_parallel`: which layers are cut and how, values against the whole model, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono
from tests.reference import difference
from unisono.fused.layers import ParallelLinear
from unisono.testing import run_ranks


class Feed(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(24, 512, bias=bias), nn.Linear(512, 24, bias=bias)
        self.head = nn.Linear(24, 5, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down_proj(self.up_proj(x).relu()))


def made(dtype: torch.dtype = torch.float32) -> Feed:
    torch.manual_seed(4)
    return Feed().to(dtype)


def outputs(group, dtype, order):
    x = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = unisono.tensor_parallel(made(dtype), group, order=order)
    layers = [model.up_proj, model.down_proj, model.head]
    kinds = [layer.cut if isinstance(layer, ParallelLinear) else None for layer in layers]
    shapes = [tuple(layer.matrix.shape) for layer in layers if isinstance(layer, ParallelLinear)]
    return kinds, shapes, model(x).detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values(dtype):
    x = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = made(dtype)(x).detach()
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    one = None
    for size in (1, 2, 4):
        for kinds, shapes, y in run_ranks(size, outputs, dtype, "tree"):
            assert kinds == ["outputs", "inputs", ""]
            assert shapes == [(24, 512 // size), (512 // size, 24), (24, 5)]
            torch.testing.assert_close(y, want, **tolerance)
            one = y if one is None else one
            assert not difference(y, one)
        for kinds, shapes, y in run_ranks(size, outputs, dtype, None):
            assert kinds == ["outputs", "inputs", None] and len(shapes) == 2
            torch.testing.assert_close(y, want, **tolerance)


def refused(group):
    lines = []
    for model, options in (
        (nn.Sequential(nn.Linear(3, 3)), {}),
        (made(), {"outputs": ["head"], "inputs": []}),
    ):
        with pytest.raises(ValueError) as caught:
            unisono.tensor_parallel(model, group, order="tree", **options)
        lines.append(str(caught.value))
    return lines


@pytest.mark.parametrize("size", [2])
def test_refused(pool, size):
    for none, uneven in pool.run(refused):
        assert none.startswith("no layer to cut: expected one of q_proj, ")
        assert uneven == "layer 'head': 5 outputs do not divide equally between 2 ranks"


def _model(group):
    """A layer that cannot be cut leaves the others whole."""
    model = nn.ModuleDict({"up_proj": nn.Linear(4, 6), "down_proj": nn.Linear(7, 4)})
    with pytest.raises(ValueError, match="down_proj"):
        unisono.tensor_parallel(model, group)
    with pytest.raises(ValueError, match="no layer to cut"):
        unisono.tensor_parallel(model, group, order="tree", outputs=["a"], inputs=["b"])
    assert all(type(layer) is nn.Linear for layer in model.values())
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got NoneType"):
        unisono.tensor_parallel(None, group)


@pytest.mark.parametrize("size", [2])
def test_a_model_that_cannot_be_cut(pool, size):
    pool.run(_model)
