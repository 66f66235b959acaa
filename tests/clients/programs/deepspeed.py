"""DeepSpeed: init_distributed takes the backend's name."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.clients.case import Blocks, Case, batch

REQUIREMENTS = ["deepspeed"]
RANKS = (2, 3)
VARIABLES = {"DS_ACCELERATOR": "cpu"}
TOLERANCE = 1e-6
WIDTH = 61


def _begin(case: Case) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Not DeepSpeed's own operator for shared memory, which it would compile now: that would pass every backend by.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=case.name, verbose=False)
    case.confirm()


def _engine(config: dict[str, Any]) -> Any:
    model = Blocks(WIDTH)
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    base = {"train_micro_batch_size_per_gpu": 8, "optimizer": adam}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=base | config)[0]


def _step(engine: Any, number: int, dtype: torch.dtype) -> float:
    loss = engine(batch(dist.get_rank(), number, WIDTH).to(dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss)


def _train(case: Case, stage: int, accumulate: int = 1, bf16: bool = False) -> Any:
    _begin(case)
    dtype = torch.bfloat16 if bf16 else torch.float32
    if bf16:
        case.rounding = 2**-8  # one step of bf16
    config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": accumulate}
    engine = _engine(config | ({"bf16": {"enabled": True}} if bf16 else {}))
    losses: list[float] = []
    case.time(lambda: losses.append(_step(engine, len(losses), dtype)), 7)
    return {"losses": losses}


def checkpoint(case: Case) -> Any:
    """What a new engine reads from the checkpoint of another goes on as if nothing had happened."""
    _begin(case)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    engine = _engine({"zero_optimization": {"stage": 2}})
    _step(engine, 0, torch.float32)
    engine.save_checkpoint(folder[0])
    expected = [_step(engine, number, torch.float32) for number in (1, 2)]
    other = _engine({"zero_optimization": {"stage": 2}})
    other.load_checkpoint(folder[0])
    found = [_step(other, number, torch.float32) for number in (1, 2)]
    assert found == expected, (found, expected)
    return {"losses": found}


def inference(case: Case) -> Any:
    _begin(case)
    tensor = batch(dist.get_rank(), 0, 4096, 4)
    total = tensor.clone()
    deepspeed.comm.inference_all_reduce(total)
    moving = tensor.clone()
    case.time(lambda: deepspeed.comm.inference_all_reduce(moving), 30)
    return {"total": total}


CASES = {
    "ZeRO 1, training step": lambda case: _train(case, 1),
    "ZeRO 2, training step": lambda case: _train(case, 2),
    "ZeRO 2, 2 steps accumulated": lambda case: _train(case, 2, accumulate=2),
    "ZeRO 2, bf16": lambda case: _train(case, 2, bf16=True),
    "ZeRO 3, training step": lambda case: _train(case, 3),
    "ZeRO 2, checkpoint": checkpoint,
    "inference_all_reduce, 64 KiB": inference,
}
