"""The training step's row: forward, backward and DDP's reduction of the gradients, whose bytes are the row's size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .apart.cases import DDP_LAYER, Case, Lacking

WIDTH = math.isqrt(DDP_LAYER)
BATCH = 32
TOLERANCE = 1e-4


class DdpJob:
    """A stack of square layers on one rank; every rank has the same weights and other inputs."""

    def __init__(self, case: Case, rank: int) -> None:
        if case.dtype != "float32" or case.redop != "sum":
            raise Lacking(f"no training step of {case.dtype} with {case.redop}")
        self.case, self.rank = case, rank

    def step(self, process_group: Any) -> Callable[[], torch.Tensor]:
        """One step; without a process group, of this rank alone."""
        model: torch.nn.Module = _model(self.case)
        x = _input(self.rank)
        if process_group is not None:
            model = DistributedDataParallel(model, process_group=process_group)

        def call() -> torch.Tensor:
            model.zero_grad()
            model(x).square().mean().backward()
            return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])

        return call

    def count_wrong(self, returned: object) -> int:
        """Gradients that are not the mean over the ranks."""
        assert isinstance(returned, torch.Tensor)
        expected = torch.zeros_like(returned)
        for rank in range(self.case.ranks):
            expected += DdpJob(self.case, rank).step(None)() / self.case.ranks
        allowed = TOLERANCE * expected.abs().clamp(min=1e-3)
        return int(((returned - expected).abs() > allowed).sum())


def _model(case: Case) -> torch.nn.Module:
    layers = case.count // DDP_LAYER
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def _input(rank: int) -> torch.Tensor:
    torch.manual_seed(rank + 1)
    return torch.randn(BATCH, WIDTH)
