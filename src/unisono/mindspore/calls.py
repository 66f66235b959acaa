"""A function of :mod:`unisono.comm_func` on MindSpore's tensors, with gradients where MindSpore records them.

torch's tensors are views of MindSpore's memory, so nothing is copied on the way in, and results lie in shared memory.
A gradient is torch's own: the forward keeps the little graph of the one call, and the backward runs through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mindspore
import torch
from mindspore.common._grad_function import _Function
from mindspore.common.api import _pynative_executor

from .tensors import from_torch, replaced, returned, to_torch


def lifted(function: Callable[..., Any], differentiable: bool = True) -> Callable[..., Any]:
    """The function with MindSpore's tensors in the place of torch's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (args, tuple(kwargs.values()))
        tensors: list[Any] = []
        replaced(given, mindspore.Tensor, tensors.append)
        replaced(given, torch.Tensor, _refuse)
        views = [to_torch(tensor) for tensor in tensors]

        def run(inputs: list[torch.Tensor]) -> Any:
            rest = iter(inputs)
            positional, named = replaced(given, mindspore.Tensor, lambda _: next(rest))
            return function(*positional, **dict(zip(kwargs, named, strict=True)))

        wanted = differentiable and _pynative_executor.grad_flag()
        if not (wanted and any(view.is_floating_point() or view.is_complex() for view in views)):
            return returned(run(views))
        return _with_gradient(run, views, tensors)

    return call


def _with_gradient(run: Callable[[list[torch.Tensor]], Any], views: list[torch.Tensor], tensors: list[Any]) -> Any:
    """Runs a call whose tensors MindSpore may differentiate; the others of its results pass it by."""
    results: list[Any] = []

    def forward() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [view.requires_grad_() if view.is_floating_point() or view.is_complex() else view for view in views]
        with torch.enable_grad():
            results.append(run(leaves))
        outputs: list[torch.Tensor] = []
        replaced(results[0], torch.Tensor, outputs.append)
        return leaves, outputs

    made = _Call.apply(forward, *tensors)
    rest = iter(made if isinstance(made, tuple) else (made,))
    return returned(replaced(results[0], torch.Tensor, lambda _: next(rest)))


class _Call(_Function):  # type: ignore[misc]
    """One call for MindSpore's autograd."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]], *tensors: Any) -> Any:
        ctx.leaves, ctx.outputs = call()
        made = tuple(from_torch(output) for output in ctx.outputs)
        return made if len(made) != 1 else made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        pairs = [
            (output, to_torch(gradient.contiguous()))
            for output, gradient in zip(ctx.outputs, gradients, strict=True)
            if output.requires_grad
        ]
        leaves = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        outputs, given = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        found = iter(torch.autograd.grad(outputs, leaves, given, allow_unused=True))
        made = [next(found) if leaf.requires_grad else None for leaf in ctx.leaves]
        return (None, *[None if gradient is None else from_torch(gradient) for gradient in made])


def _refuse(tensor: torch.Tensor) -> None:
    raise TypeError("Expected mindspore.Tensor, got torch.Tensor; unisono.comm_func takes torch's")
