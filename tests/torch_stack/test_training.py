"""ZeroRedundancyOptimizer, distributed checkpoints and pipelines on unisono, against gloo or one process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.torch_stack.worlds import detached, differences, randn

ROUNDING = 1e-5


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 3))


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(randn(4, 6, by=(rank, step))).square().mean()


# --- ZeroRedundancyOptimizer --------------------------------------------------------------------------------


def zero(bucket_view: bool) -> dict:
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=bucket_view)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, parameters_as_bucket_view=bucket_view, lr=0.01
    )
    for step in range(4):
        optimizer.zero_grad()
        loss(model, dist.get_rank(), step).backward()
        optimizer.step()
    result = detached(model.state_dict())
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        state = optimizer.state_dict()["state"]
        result["state"] = [detached(state[i]["exp_avg"]) for i in sorted(state)]
        assert len(state) == 6
    return result


@pytest.mark.parametrize("bucket_view", [False, True])
def test_zero_redundancy_optimizer(stack, bucket_view):
    stack.compare(zero, bucket_view, tolerance=ROUNDING)


def zero_in_backward() -> list[list[str]]:
    """The optimizer's steps inside of DDP's hook, which torch refuses on gloo, against plain DDP.

    Its first steps do nothing, so all steps have the same data, and there are some more of them.
    """
    rank, steps = dist.get_rank(), 4
    plain = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(plain, rank, 0).backward()
        optimizer.step()
    model = DistributedDataParallel(make_model(), static_graph=True)
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, overlap_with_ddp=True, lr=0.01
    )
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, sharded, shard_buckets=True))
    found = []
    for _ in range(steps + 4):
        sharded.zero_grad()
        loss(model, rank, 0).backward()
        sharded.step()
        found.append(differences(detached(model.state_dict()), detached(plain.state_dict()), ROUNDING))
    return found


def test_zero_redundancy_optimizer_in_backward(stack):
    for found in stack.run(zero_in_backward):
        assert [] in found, found[-1]


# --- checkpoints --------------------------------------------------------------------------------------------


def saved_and_loaded(folder: str, asynchronous: bool) -> list[str]:
    """Saves a sharded model with its optimizer, loads it into another that is cut differently."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = fully_shard(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    table = distribute_tensor(torch.arange(35.0).reshape(7, 5), init_device_mesh("cpu", (size,)), [Shard(0)])

    def everything(model: nn.Module, optimizer: torch.optim.Optimizer, table: DTensor) -> dict:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "table": table, "step": torch.tensor(2)}

    saved = everything(model, optimizer, table)
    if asynchronous:
        gloo = dist.new_group(backend="gloo")  # torch asks for a CPU group of its own for the background thread
        dcp.async_save(saved, checkpoint_id=folder, process_group=gloo).result()
        dist.barrier()
    else:
        dcp.save(saved, checkpoint_id=folder)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    other = fully_shard(make_model(), mesh=mesh)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    other_table = distribute_tensor(torch.zeros(7, 5), mesh, [Replicate(), Shard(1)])
    state = everything(other, other_optimizer, other_table)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
        tensors = [p.full_tensor() for p in model.parameters()]
        for p in model.parameters():
            tensors += [optimizer.state[p][key].full_tensor() for key in ("exp_avg", "exp_avg_sq")]
        return detached(tensors)

    wrong = differences(whole(other, other_optimizer), whole(model, optimizer))
    return (
        wrong
        + differences(state["table"].full_tensor(), table.full_tensor())
        + differences(state["step"], torch.tensor(2))
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints(stack, asynchronous):
    with tempfile.TemporaryDirectory() as folder:
        assert stack.run(saved_and_loaded, folder, asynchronous) == [[]] * 4
        assert len(list(Path(folder).glob("*.distcp"))) >= 4


# --- pipelines ----------------------------------------------------------------------------------------------


def pipeline(kind: str, stages: int) -> list[str]:
    """A model cut into stages against the whole of it; four ranks make two pipelines of two, or one of four."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // stages, stages), mesh_dim_names=("dp", "pp"))
    group, place = mesh.get_group("pp"), mesh.get_local_rank("pp")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    inputs, targets = randn(8, 8, by=(rank - place, 1)), randn(8, 8, by=(rank - place, 2))
    mse = nn.MSELoss()
    chunks = 2 if kind == "interleaved" else 1
    per_stage = 8 // (stages * chunks)
    mine = [place + c * stages for c in range(chunks)]
    parts = [nn.Sequential(*layers[i * per_stage : (i + 1) * per_stage]) for i in mine]
    made = [
        PipelineStage(part, i, stages * chunks, torch.device("cpu"), group=group)
        for i, part in zip(mine, parts, strict=True)
    ]
    if kind == "interleaved":
        schedule = ScheduleInterleaved1F1B(made, 4, loss_fn=mse)
    else:
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](made[0], 4, loss_fn=mse)
    losses: list[torch.Tensor] = []
    first, last = place == 0, place == stages - 1
    out = schedule.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}))

    torch.manual_seed(0)
    alone = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)])
    want = alone(inputs)
    want_losses = [mse(alone(x), y) for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True)]
    (sum(want_losses) / 4).backward()
    got_grads, want_grads = [], []
    for i, part in zip(mine, parts, strict=True):
        got_grads += [p.grad for p in part.parameters()]
        want_grads += [p.grad for p in alone[i * per_stage : (i + 1) * per_stage].parameters()]
    wrong = differences(got_grads, want_grads, ROUNDING)
    if last:
        wrong += differences([detached(out), losses], [detached(want), want_losses], ROUNDING)
    return wrong


@pytest.mark.parametrize(("kind", "stages"), [("gpipe", 2), ("1f1b", 2), ("1f1b", 4), ("interleaved", 2)])
def test_pipelines(stack, kind, stages):
    assert stack.run(pipeline, kind, stages) == [[]] * 4


def averaged() -> dict:
    """Model averaging and the optimizer after it, which reduce over flat parameters."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, dist.get_rank(), step).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return detached(model.state_dict())


def test_model_averaging(stack):
    stack.compare(averaged, tolerance=ROUNDING)
