"""FSDP2 without its padding on the way: the same bits as plain FSDP2, and padding that nobody has written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

import unisono.fsdp
from tests.torch_stack.worlds import differences, randn

STEPS = 3


class Experts(nn.Module):
    """Experts in one parameter, as transformers has them; 5 on 4 ranks leave room for 3 more."""

    def __init__(self, experts: int = 5, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.randn(experts, width, 7) / 4)
        self.gate = nn.Linear(width, 7)
        self.down = nn.Parameter(torch.randn(experts, 7, width) / 4)
        self.unused = nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.gate(x) * torch.einsum("bw,ewh->bh", self.norm(x), self.up).tanh()
        return x + torch.einsum("bh,ehw->bw", hidden, self.down)


def make_model(case: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts(3), nn.Linear(6, 9))
    for block in model[:2]:
        if case != "no_gradient":  # as long as it is there, the buffers of gradients are smaller than FSDP2's plan
            del block.unused
            block.unused = nn.Identity()
        if case == "frozen":
            block.up.requires_grad_(False)
        if case == "dtypes":
            block.gate.requires_grad_(False).double().register_forward_pre_hook(lambda _, args: (args[0].double(),))
            block.gate.register_forward_hook(lambda _, args, result: result.float())
    return model


def options_of(case: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if case == "hsdp":
        found["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if case == "reshard_to_two":
        found["reshard_after_forward"] = 2
    if case == "bf16":
        found["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case == "offload":
        found["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    return found


def parts_of(model: nn.Module) -> list[FSDPModule]:
    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def trained(case: str, how: str) -> dict[str, torch.Tensor]:
    """Every gradient and the parameters after some steps."""
    model = make_model(case)
    options = options_of(case)
    for block in model[:2]:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if how != "plain":
        unisono.fsdp.use_shared_memory(model)
        used = [type(part._get_fsdp_state()._fsdp_param_group._all_gather_comm) for part in parts_of(model)]
        # Linear(6, 9): 9 rows on 4 ranks. All parts have padding, on two ranks too.
        assert used == [unisono.fsdp.AllGather] * 3, used
    if case == "factor":
        for part in parts_of(model):
            part.set_gradient_divide_factor(3.0)
    if case == "prefetch":
        model.set_modules_to_forward_prefetch([model[0], model[1]])
        model[1].set_modules_to_backward_prefetch([model[0]])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        if case == "prefetch":
            for part in parts_of(model):
                part.unshard(async_op=True)
        if case == "accumulated":
            model.set_requires_gradient_sync(step != 0)
        if case == "thawed" and step == 1:
            model[0].down.requires_grad_(False)
        model(randn(5, 6, by=(dist.get_rank(), step))).square().mean().backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                found[f"{name}.grad {step}"] = p.grad.full_tensor()
        optimizer.step()
    return found | {name: p.full_tensor() for name, p in model.named_parameters()}


def compared(case: str) -> list[str]:
    """Where plain FSDP2 and FSDP2 without padding differ, with every parameter in a call of its own, and with few."""
    want = trained(case, "plain")
    assert len(want) > 20
    found = []
    before = unisono.fsdp.WORTH_A_CALL_BYTES
    try:
        for worth in (1, 28):
            unisono.fsdp.WORTH_A_CALL_BYTES = worth
            found += differences(trained(case, "without"), want, 0.0)
    finally:
        unisono.fsdp.WORTH_A_CALL_BYTES = before
    return found


CASES = ["average", "factor", "bf16", "hsdp", "reshard_to_two", "prefetch", "accumulated", "frozen", "thawed"]
CASES += ["no_gradient", "dtypes", "offload"]


@pytest.mark.parametrize("case", CASES)
def test_same_bits(stack, case):
    assert stack.run(compared, case) == [[]] * 4


def written() -> tuple[list[int], list[int]]:
    """Elements that are NaN after a gather into buffers of NaN, and those of this rank's gradients in such a buffer."""
    made: list[torch.Tensor] = []
    allocate = collectives.ProcessGroupAllocMixin.allocate

    def of_nan(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(allocate(self, *args, **kwargs).fill_(torch.nan))
        return made[-1]

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(1000, 401))  # 101 rows for a rank, 98 for the last: 3 rows of padding
    before, unisono.fsdp.WORTH_A_CALL_BYTES = unisono.fsdp.WORTH_A_CALL_BYTES, 3000
    unisono.fsdp.use_shared_memory(model)
    assert unisono.fsdp.padding_bytes(model) == 4 * 3 * 1001
    unisono.fsdp.WORTH_A_CALL_BYTES = before
    collectives.ProcessGroupAllocMixin.allocate = of_nan
    try:
        model.unshard()
        gathered = [int(tensor.isnan().sum()) for tensor in made]
        made.clear()
        model(torch.ones(2, 1000)).sum().backward()
    finally:
        collectives.ProcessGroupAllocMixin.allocate = allocate
    reduced = [int(tensor.isnan().sum()) for tensor in made]
    assert not any(p.full_tensor().isnan().any() or p.grad.full_tensor().isnan().any() for p in model.parameters())
    return gathered, reduced


def test_padding_is_neither_gathered_nor_reduced(stack):
    for rank, (gathered, reduced) in enumerate(stack.run(written)):
        # The weight's run and the bias's both end before the last rank's padding; its own is zeros from the start.
        assert gathered == [0 if rank == 3 else 3 * 1000 + 3]
        assert reduced == [0, 0]


def _param(rows: int, columns: int = 1, ranks: int = 3) -> Any:
    room = torch.Size([-(-rows // ranks), columns])
    return SimpleNamespace(
        padded_sharded_param_size=room, _orig_size=torch.Size([rows, columns]),
        sharded_param=torch.empty(0), mesh_info=SimpleNamespace(shard_mesh_size=ranks),
    )  # fmt: skip


def test_runs(monkeypatch):
    params = [_param(4), _param(3), _param(2, 10), _param(1)]
    monkeypatch.setattr(unisono.fsdp, "WORTH_A_CALL_BYTES", 1)
    assert unisono.fsdp._runs(params) == [(0, [2, 2, 0]), (2, [11, 11, 1]), (13, [1, 0, 0])]
    monkeypatch.setattr(unisono.fsdp, "WORTH_A_CALL_BYTES", 40)
    assert unisono.fsdp._runs(params) == [(0, [13, 13, 3]), (13, [1, 0, 0])]
    monkeypatch.setattr(unisono.fsdp, "WORTH_A_CALL_BYTES", 1000)
    assert unisono.fsdp._runs(params) == [(0, [14, 13, 3])]
    assert [unisono.fsdp._padding(param) for param in params] == [8, 0, 40, 8]
