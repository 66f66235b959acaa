"""accelerate: the group is made first, since Accelerator refuses names it does not know."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.case import Blocks, Case, batch, whole

REQUIREMENTS = ["accelerate"]
RANKS = (2, 3)


def _accelerator(case: Case, **options: Any) -> Accelerator:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    case.begin()
    return Accelerator(cpu=True, **options)


def _train(case: Case, **options: Any) -> Any:
    accelerator = _accelerator(case, **options)
    if options.get("mixed_precision") == "bf16":
        case.rounding = 2**-8  # one step of bf16
    model = Blocks()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    losses: list[float] = []

    def step() -> None:
        with accelerator.accumulate(model):
            loss = model(batch(accelerator.process_index, len(losses))).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    case.time(step, 8)
    return {"losses": losses, "model": whole(model.state_dict())}


def metrics(case: Case) -> Any:
    """37 samples in batches of 4: the last ones are uneven over the ranks, and none may count twice."""
    accelerator = _accelerator(case)
    samples = torch.arange(37)
    loader = accelerator.prepare(DataLoader(TensorDataset(samples), batch_size=4))
    seen: list[torch.Tensor] = []

    def epoch() -> None:
        seen.clear()
        for (part,) in loader:
            seen.append(accelerator.gather_for_metrics(part * 2))

    case.time(epoch, 5)
    assert sorted(torch.cat(seen).tolist()) == (samples * 2).tolist()
    ragged = torch.full((3 + dist.get_rank(), 2), float(dist.get_rank()))
    padded = accelerator.gather(accelerator.pad_across_processes(ragged, dim=0))
    objects = accelerator.gather_for_metrics([f"rank {dist.get_rank()}"] * (1 + dist.get_rank()), True)
    return {"seen": list(seen), "padded": padded, "objects": objects}


CASES = {
    "DDP, training step": _train,
    "DDP, bf16, 2 steps accumulated": lambda case: _train(case, mixed_precision="bf16", gradient_accumulation_steps=2),
    "gather_for_metrics, 37 uneven samples": metrics,
}
