"""torch's pipeline schedules: a stage on each rank, two for the interleaved one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tests.clients.case import Blocks, Case, batch

REQUIREMENTS: list[str] = []
RANKS = (2, 3)
MICROBATCHES = 6


def _run(case: Case, schedule: Callable[..., Any], stages_per_rank: int = 1) -> Any:
    case.begin()
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = Blocks(width=61).layers
    count = size * stages_per_rank
    mine = [rank + i * size for i in range(stages_per_rank)]
    parts = [torch.nn.Sequential(*list(layers)[number::count]) for number in mine]
    stages = [PipelineStage(part, number, count, torch.device("cpu")) for part, number in zip(parts, mine, strict=True)]
    whole = stages if stages_per_rank > 1 else stages[0]
    pipeline = schedule(whole, MICROBATCHES, loss_fn=lambda output, target: (output - target).square().mean())
    x, losses = batch(0, 0, 61, 12), []

    def step() -> None:
        found: list[torch.Tensor] = []
        for part in parts:
            part.zero_grad()
        inputs = (x,) if rank == 0 else ()
        last = {"target": -x, "losses": found} if rank == size - 1 else {}
        pipeline.step(*inputs, **last)
        losses.append([loss.item() for loss in found])

    case.time(step)
    return {"losses": losses, "gradients": [p.grad.clone() for part in parts for p in part.parameters()]}


CASES = {
    "GPipe": lambda case: _run(case, ScheduleGPipe),
    "1F1B": lambda case: _run(case, Schedule1F1B),
    "interleaved 1F1B": lambda case: _run(case, ScheduleInterleaved1F1B, 2),
}
