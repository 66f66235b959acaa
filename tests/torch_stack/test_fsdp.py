"""FSDP2 on unisono against the same training in one process, with dimensions that do not divide by the ranks.

gloo cannot be the reference: it has neither AVG nor PREMUL_SUM.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import unisono.fsdp
from tests.reference import reduced
from tests.torch_stack.worlds import differences, randn
from unisono.group import names as groups

STEPS = 3
ROUNDING = 1e-5


def make_model(width: int = 13) -> nn.Sequential:
    """Rows 13, 6, 3 and 1 on four ranks: with padding, and with ranks that own nothing."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, width),
        nn.Tanh(),
        nn.Sequential(nn.Linear(width, 6), nn.LayerNorm(6)),
        nn.Linear(6, 3),
        nn.Linear(3, 1),
    )


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(randn(5, 7, by=(rank, step))).square().mean()


def alone(model: nn.Module, ranks: int, factor: float, dtype: torch.dtype, steps_per_update: int = 1) -> nn.Module:
    """The training of all ranks in one process; gradients are combined by the tree over ranks, as unisono does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    for step in range(0, STEPS * steps_per_update, steps_per_update):
        for p in params:
            p.grad = torch.zeros_like(p)
        levels: list[list[torch.Tensor]] = [[] for _ in params]
        for rank in range(ranks):
            local = [torch.zeros_like(p) for p in params]
            for i in range(steps_per_update):
                for mine, g in zip(local, torch.autograd.grad(loss(model, rank, step + i), params), strict=True):
                    mine += g
            for level, g in zip(levels, local, strict=True):
                level.append(g.to(dtype).float())
        for p, level in zip(params, levels, strict=True):
            p.grad = (reduced(level, "sum") / factor).to(dtype).float()
        optimizer.step()
    return model


def shard(model: nn.Sequential, **options) -> nn.Sequential:
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def trained(
    case: str,
    factor: float | None = None,
    reduce_dtype: torch.dtype | None = None,
    tolerance: float = ROUNDING,
    accumulate: int = 1,
) -> list[str]:
    """Where the parameters after some steps differ from those of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options: dict = {}
    if case == "keep_unsharded":
        options["reshard_after_forward"] = False
    elif case == "reshard_to_two":
        options["reshard_after_forward"] = 2
    elif case == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    elif case == "shard_dim_1":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() == 2 and p.size(1) % size == 0 else Shard(0)
    if reduce_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    width = 12 if case == "shard_dim_1" else 13
    model = shard(make_model(width), **options)
    if case == "shared":
        unisono.fsdp.use_shared_memory(model)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            if factor is not None:
                part.set_gradient_divide_factor(factor)
            part.set_force_sum_reduction_for_comms(case == "force_sum")
    if case == "prefetch":
        model.set_modules_to_forward_prefetch([model[0], model[2]])
        model[2].set_modules_to_backward_prefetch([model[0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS * accumulate):
        last = (step + 1) % accumulate == 0
        model.set_requires_gradient_sync(last)
        if case == "prefetch":
            model.unshard(async_op=True)
        loss(model, rank, step).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    dtype = reduce_dtype or torch.float32
    want = alone(make_model(width), size, factor or size, dtype, accumulate)
    return differences(full(model), dict(want.named_parameters()), tolerance)


CASES = {
    "average": ("plain",),
    "shared_memory": ("shared",),
    "premul_sum": ("plain", 3.0),
    "premul_sum_shared": ("shared", 3.0),
    "factor_of_size": ("plain", 4.0),
    "force_sum": ("force_sum", 3.0),
    # One rounding to 16 bits more or less, here or there.
    "reduce_bf16": ("plain", None, torch.bfloat16, 2e-3),
    "reduce_fp16": ("plain", None, torch.float16, 3e-4),
    "premul_sum_bf16": ("shared", 3.0, torch.bfloat16, 2e-3),
    "keep_unsharded": ("keep_unsharded",),
    "reshard_to_two": ("reshard_to_two",),
    "prefetch": ("prefetch",),
    "shard_dim_1": ("shard_dim_1",),
    "hsdp": ("hsdp",),
    "hsdp_premul_sum": ("hsdp", 3.0),
    "accumulated": ("plain", None, None, ROUNDING, 2),
    "hsdp_accumulated": ("hsdp", None, None, ROUNDING, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_training(stack, case):
    assert stack.run(trained, *CASES[case]) == [[]] * 4


def staged(how: str, mesh_dims: int) -> int:
    """Bytes that went through the stage in two steps with a model too big for the small path."""
    names = ("replicate", "shard")[-mesh_dims:]
    mesh = init_device_mesh("cpu", (4,) if mesh_dims == 1 else (2, 2), mesh_dim_names=names)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 301), nn.Linear(301, 302))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if how == "one call":
        assert unisono.fsdp.use_shared_memory(model) is model
    elif how == "torch's hook":
        for part in model.modules():
            part.set_allocate_memory_from_process_group_for_comm(True)
    elif how == "there and back":
        unisono.fsdp.use_shared_memory(model)
        unisono.fsdp.use_shared_memory(model, False)
    native = [groups.native(mesh.get_group(dim)) for dim in range(mesh_dims)]
    before = [group.staged_bytes for group in native]
    for _ in range(2):
        model(torch.ones(2, 300) * (dist.get_rank() + 1)).square().mean().backward()
    for p in model.parameters():
        assert (
            unisono.is_shared(p.grad.to_local()) == (how in ("one call", "torch's hook"))
            or not p.grad.to_local().numel()
        )
    return sum(group.staged_bytes for group in native) - sum(before)


@pytest.mark.parametrize("mesh_dims", [1, 2])
@pytest.mark.parametrize("how", ["one call", "torch's hook"])
def test_nothing_is_staged(stack, how, mesh_dims):
    assert stack.run(staged, how, mesh_dims) == [0] * 4


@pytest.mark.parametrize("how", ["default", "there and back"])
def test_without_the_hook_it_is_staged(stack, how):
    assert min(stack.run(staged, how, 1)) > 0


def clipped() -> list[str]:
    """Gradient norms and clipping, which reduce over DTensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, want = shard(make_model()), make_model()
    loss(model, rank, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()
    (sum(loss(want, r, 0) for r in range(size)) / size).backward()
    want_norm = torch.nn.utils.clip_grad_norm_(want.parameters(), 0.01)
    got_grads = [p.grad.full_tensor() for p in model.parameters()]
    return differences([norm, got_grads], [want_norm, [p.grad for p in want.parameters()]], ROUNDING)


def test_clipping(stack):
    assert stack.run(clipped) == [[]] * 4


def refused() -> list[str]:
    texts = []
    for model in (
        nn.Linear(2, 2),
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("x",))),
    ):
        try:
            unisono.fsdp.use_shared_memory(model)
        except ValueError as error:
            texts.append(str(error))
    return texts


def refused_on_gloo(group) -> list[str]:
    from tests.torch_stack.worlds import world

    with world(group, "gloo"):
        return refused()


def test_models_that_cannot_use_it_are_refused(stack_pool, stack):
    assert "fully_shard" in stack.run(refused)[0][0]
    texts = stack_pool.run(refused_on_gloo)[0]
    assert "fully_shard" in texts[0]
    assert texts[1] == "Expected process groups on unisono, got gloo"
