"""What a program is given: the backend, its group, a stopwatch, and a way to prove which backend served it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Case:
    """One case on one rank."""

    def __init__(self, backend: str, by_name: bool) -> None:
        self.backend = backend
        #: The name to give to the library: "unisono", or "gloo" where unisono is chosen by the environment.
        self.name = backend if by_name else "gloo"
        self.milliseconds: float | None = None
        #: What three and more ranks may differ by: gloo adds in another order then, and AdamW divides by gradients that
        #: are almost nothing.
        self.rounding = 1e-4

    def begin(self) -> None:
        """Makes the default group unless it is there, for libraries that take one."""
        if not dist.is_initialized():
            dist.init_process_group(self.name)
        self.confirm()

    def confirm(self, group: Any = None) -> None:
        """Fails unless the group is served by the backend that is asked for."""
        group = dist.group.WORLD if group is None else group
        served = getattr(group, "unisono_group", None) is not None
        if served is not (self.backend == "unisono"):
            raise AssertionError(f"asked for {self.backend}, got {group!r}")

    def time(self, step: Callable[[], Any], rounds: int = 10) -> None:
        """Measures a step, after one that does not count; the median of the rounds is what the table shows."""
        step()
        taken = []
        for _ in range(rounds):
            dist.barrier()
            begin = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begin)
        self.milliseconds = 1000 * statistics.median(taken)


def whole(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of tensors by name, those of DTensors put together."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor)
    }


class Blocks(torch.nn.Module):
    """A small model with rows that no number of ranks divides: 6 layers, 0.8 million parameters."""

    def __init__(self, width: int = 181, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width + 1), torch.nn.GELU(),
                torch.nn.Linear(2 * width + 1, width),
            )
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch(rank: int, step: int, width: int = 181, rows: int = 8) -> torch.Tensor:
    """The input of a rank and a step, the same in every run."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * step + rank))
