"""FullyShardedDataParallel, the first FSDP, on CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.clients.case import Blocks, Case, batch, whole

REQUIREMENTS: list[str] = []
RANKS = (2, 3)


def _train(case: Case, strategy: ShardingStrategy) -> Any:
    case.begin()
    rank = torch.distributed.get_rank()
    model = FullyShardedDataParallel(
        Blocks(),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Sequential}),
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch(rank, len(losses))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    case.time(step, 5)
    with FullyShardedDataParallel.summon_full_params(model):
        return {"losses": losses, "model": whole(dict(model.named_parameters()))}


def full_shard(case: Case) -> Any:
    return _train(case, ShardingStrategy.FULL_SHARD)


def grad_op(case: Case) -> Any:
    return _train(case, ShardingStrategy.SHARD_GRAD_OP)


CASES = {"training step, FULL_SHARD": full_shard, "training step, SHARD_GRAD_OP": grad_op}
