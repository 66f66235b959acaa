"""Lightning: the strategies take the backend's name."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.clients.case import Blocks, Case, batch, whole

REQUIREMENTS = ["lightning"]
RANKS = (2, 3)
WIDTH = 61


class Module(lightning.LightningModule):
    def __init__(self, case: Case, shard: bool) -> None:
        super().__init__()
        self.case, self.shard = case, shard
        self.model: Any = None
        self.losses: list[float] = []
        self.begins: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Blocks(WIDTH)
            if self.shard:
                for layer in self.model.layers:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, x: torch.Tensor, number: int) -> torch.Tensor:
        self.begins.append(time.perf_counter())
        loss = self.model(x + self.global_rank).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _fit(case: Case, strategy: Any, shard: bool = False) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    module = Module(case, shard)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=12, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([batch(0, step, WIDTH, 1)[0] for step in range(120)], batch_size=4))
    case.confirm()
    times = torch.tensor(module.begins)[2:].diff()
    case.milliseconds = 1000 * times.median().item()
    shown = float(trainer.callback_metrics["loss"])
    return {"losses": module.losses, "loss of all": shown, "model": whole(module.model.state_dict())}


CASES = {
    "DDPStrategy, training step": lambda case: _fit(case, DDPStrategy(process_group_backend=case.name)),
    "ModelParallelStrategy (FSDP2), training step": lambda case: _fit(
        case, ModelParallelStrategy(process_group_backend=case.name), shard=True
    ),
}
