"""Distributed checkpoints of an FSDP2 model, with async_save on a group of its own while training goes on."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tests.clients.case import Blocks, Case, batch, whole

REQUIREMENTS: list[str] = []
RANKS = (2, 3)


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = Blocks(width=61)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(batch(dist.get_rank(), number, 61)).square().mean().backward()
    optimizer.step()


def _save(case: Case, asynchronous: bool) -> Any:
    case.begin()
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    for_saving = dist.new_group(backend=case.name) if asynchronous else None
    if for_saving is not None:
        case.confirm(for_saving)
    model, optimizer = _model()
    _step(model, optimizer, 0)

    def state() -> dict[str, Any]:
        parts = get_state_dict(model, optimizer)
        return {"model": parts[0], "optimizer": parts[1]}

    def save() -> None:
        if not asynchronous:
            dcp.save(state(), checkpoint_id=folder[0])
            return
        saving = dcp.async_save(state(), checkpoint_id=folder[0], process_group=for_saving)
        _step(*_model(), 5)  # a training step on the other group meanwhile
        saving.result()

    case.time(save, 3)
    saved = whole(model.state_dict())
    _step(model, optimizer, 1)
    loaded = state()
    dcp.load(loaded, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    read = whole(model.state_dict())
    assert all(torch.equal(saved[name], read[name]) for name in saved)
    _step(model, optimizer, 2)
    return {"read": read, "next": whole(model.state_dict())}


CASES = {
    "save and load": lambda case: _save(case, False),
    "async_save beside a training step, and load": lambda case: _save(case, True),
}
