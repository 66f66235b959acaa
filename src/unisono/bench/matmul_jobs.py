"""The fused matmul's row: one call against a matmul followed by an all_reduce; the limit is the matmul alone."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import unisono

from .apart.cases import MATMUL_K, MATMUL_N, Case, Lacking
from .apart.turns import Call

if TYPE_CHECKING:
    from unisono.group.group import Group

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class MatmulJob:
    """x[m, k] @ w[k, n] on one rank; the result, of the size the row names, in memory of both kinds."""

    def __init__(self, case: Case, rank: int) -> None:
        dtype = getattr(torch, case.dtype)
        if dtype not in TOLERANCE or case.redop != "sum":
            raise Lacking(f"no matmul of {case.dtype} with {case.redop}")
        self.case, self.dtype = case, dtype
        rows = case.count // MATMUL_N
        self.x, self.w = (_values(shape, rank).to(dtype) for shape in ((rows, MATMUL_K), (MATMUL_K, MATMUL_N)))
        self.heap = unisono.empty(rows, MATMUL_N, dtype=dtype)
        self.ordinary = torch.empty(rows, MATMUL_N, dtype=dtype)

    def fused(self, group: Group) -> Call:
        call = getattr(importlib.import_module("unisono"), "matmul_all_reduce", None)
        if call is None:
            raise Lacking("this unisono has no matmul_all_reduce")
        return partial(call, self.x, self.w, group)

    def in_two_steps(self, out: torch.Tensor, group: Group) -> Call:
        def call() -> torch.Tensor:
            torch.mm(self.x, self.w, out=out)
            group.all_reduce(out)
            return out

        return call

    def on_gloo(self, group: Any) -> Call:
        def call() -> torch.Tensor:
            torch.mm(self.x, self.w, out=self.ordinary)
            dist.all_reduce(self.ordinary, group=group)
            return self.ordinary

        return call

    def alone(self) -> Call:
        return partial(torch.mm, self.x, self.w, out=self.ordinary)

    def count_wrong(self, returned: object) -> int:
        result = returned[0] if isinstance(returned, (tuple, list)) else returned
        assert isinstance(result, torch.Tensor)
        rows = self.x.shape[0]
        expected = torch.zeros(rows, MATMUL_N, dtype=torch.float64)
        for rank in range(self.case.ranks):
            expected += _values((rows, MATMUL_K), rank) @ _values((MATMUL_K, MATMUL_N), rank)
        allowed = TOLERANCE[self.dtype] * expected.abs().clamp(min=1.0)
        return int(((result.double() - expected).abs() > allowed).sum())


def _values(shape: tuple[int, int], rank: int) -> torch.Tensor:
    """Eighths that differ from place to place and from rank to rank; their products are exact in every dtype."""
    numbers = torch.arange(shape[0] * shape[1]) * (rank + 3) % 97 % 5 - 2
    return (numbers.double() / 8).reshape(shape)
