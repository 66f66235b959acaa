"""How npu tensors reach unisono's own functions, which take CPU tensors, and results come back: as the same bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..base.handle import Handle
from .memory import as_cpu, as_npu

Tensor = torch.Tensor
Function = TypeVar("Function", bound=Callable[..., Any])


class _ToCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, npu: Tensor) -> Tensor:
        ctx.index = npu.device.index
        return as_cpu(npu)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return as_npu(grad, ctx.index)


class _ToNpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cpu: Tensor, index: int) -> Tensor:
        return as_npu(cpu, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return as_cpu(grad), None


def to_cpu(npu: Tensor) -> Tensor:
    """The CPU tensor with the same bytes, through which gradients flow back."""
    if npu.requires_grad and torch.is_grad_enabled():
        return _ToCpu.apply(npu)  # type: ignore[no-any-return]
    return as_cpu(npu)


def to_npu(cpu: Tensor, index: int) -> Tensor:
    """The tensor on ``npu:index`` with the same bytes, through which gradients flow back."""
    if cpu.requires_grad and torch.is_grad_enabled():
        return _ToNpu.apply(cpu, index)  # type: ignore[no-any-return]
    return as_npu(cpu, index)


def on_host(function: Function) -> Function:
    """The function for npu tensors too: arguments go over as the same bytes, and so do the tensors it returns.

    With CPU tensors only, the call is as if this were not there. What it writes into its arguments is seen in them.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        met: dict[int, Tensor] = {}  # the npu tensor of each CPU tensor, by its id
        lower = functools.partial(_lower, met)
        cpu_args, cpu_kwargs = [lower(a) for a in args], {name: lower(a) for name, a in kwargs.items()}
        if not met:
            return function(*args, **kwargs)
        indices = {tensor.device.index for tensor in met.values()}
        if len(indices) > 1:
            found = " and ".join(f"npu:{index}" for index in sorted(indices))
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {found}!"
            )
        result = function(*cpu_args, **cpu_kwargs)  # alive until the end, so no other tensor takes an id in it
        return _raise_up(met, indices.pop(), result)

    return call  # type: ignore[return-value]


def _lower(met: dict[int, Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.device.type != "npu":
            return value
        cpu = to_cpu(value)
        met[id(cpu)] = value
        return cpu
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_lower(met, part) for part in value)
    return value


def _raise_up(met: dict[int, Tensor], index: int, value: Any) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in met:
            met[id(value)] = to_npu(value, index)
        return met[id(value)]
    if isinstance(value, (Handle, torch.distributed.Work)):
        outputs = getattr(value, "_outputs", None)
        if outputs is not None:
            value._outputs = _raise_up(met, index, outputs)  # type: ignore[union-attr]
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_raise_up(met, index, part) for part in value)
    return value
