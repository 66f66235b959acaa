"""Ray Train: TorchConfig takes the backend's name; Ray starts the ranks."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from tests.clients.case import Blocks, Case, batch, whole

REQUIREMENTS = ["ray[train]"]
TORCHRUN = False
VARIABLES = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def _loop(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    case = Case(config["backend"], by_name=True)
    case.confirm()
    model = prepare_model(Blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch(dist.get_rank(), len(losses))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    case.time(step, 8)
    values = {"losses": losses, "model": whole(model.state_dict())}
    torch.save((values, case.milliseconds), os.path.join(config["folder"], f"rank{dist.get_rank()}.pt"))


def train(case: Case) -> Any:
    size = int(os.environ["CLIENT_RANKS"])
    ray.init(num_cpus=size + 1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            _loop,
            train_loop_config={"backend": case.backend, "folder": folder},
            torch_config=TorchConfig(backend=case.name),
            scaling_config=ScalingConfig(num_workers=size, use_gpu=False),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        found = [torch.load(os.path.join(folder, f"rank{rank}.pt"), weights_only=False) for rank in range(size)]
    ray.shutdown()
    case.milliseconds = found[0][1]
    return [values for values, _ in found]


CASES = {"TorchTrainer, DDP, training step": train}
