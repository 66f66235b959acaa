"""Ray Train: the workers' group is what TorchConfig says, or gloo, which unisono serves if their environment asks.

Ray starts the workers; each saves what it found, since only rank 0's report comes back.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from tests.clients.case import Blocks, Case, batch, whole

REQUIREMENTS = ["ray[train]"]
RANKS = (2, 3)
TORCHRUN = False
# Ray's workers must not build an environment of their own, and nothing is to leave this machine.
VARIABLES = {
    "RAY_TRAIN_V2_ENABLED": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}  # fmt: skip


def _loop(config: dict[str, Any]) -> None:
    """One worker's training loop, as Ray's users write it."""
    torch.set_num_threads(1)
    case = Case(config["backend"], by_name=config["by_name"])
    case.confirm()
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(Blocks())
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch(rank, len(losses))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    case.time(step, 8)
    found = {"losses": losses, "model": whole(model.state_dict()), "ranks": dist.get_world_size()}
    torch.save({"found": found, "milliseconds": case.milliseconds}, Path(config["folder"]) / f"{rank}.pt")
    ray.train.report({"loss": losses[-1]})


def _train(case: Case, by_name: bool) -> Any:
    size = int(os.environ["CLIENT_RANKS"])
    if not ray.is_initialized():
        # More workers than cores; on loopback only, with 100 MiB for objects.
        ray.init(
            num_cpus=size + 1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )  # fmt: skip
    # Without a name the workers ask for gloo; under `unisono run` they would get unisono by this variable as well.
    served = {"UNISONO_GLOO": "1"} if case.backend == "unisono" and not by_name else {}
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            _loop,
            train_loop_config={"backend": case.backend, "by_name": by_name, "folder": folder},
            torch_config=TorchConfig(backend=case.backend if by_name else None),
            scaling_config=ray.train.ScalingConfig(num_workers=size),
            run_config=ray.train.RunConfig(
                storage_path=folder, worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"} | served}
            ),
        ).fit()
        found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]
    case.milliseconds = found[0]["milliseconds"]
    return [one["found"] for one in found]


CASES = {
    "DDP by TorchConfig(backend=...), training step": lambda case: _train(case, True),
    "DDP as it is, UNISONO_GLOO=1 for the workers, training step": lambda case: _train(case, False),
}
