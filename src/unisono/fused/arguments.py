"""Reading the arguments of the fused matmuls: from what users pass to lists of tensors and numbers, or an error.

The checks of sizes are in plan.py; here are those of types and forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .gemm import PreparedWeight
from .plan import Plan, check_dtypes, planned_groups


def tensor_list(what: Any, argument: str, also: tuple[type, ...] = ()) -> list[Any]:
    """A list of tensors; a tensor alone is a list of one."""
    kinds = (torch.Tensor, *also)
    if isinstance(what, kinds):
        return [what]
    if not isinstance(what, (list, tuple)):
        raise TypeError(f"argument '{argument}' must be a list of tensors, got {type(what).__name__}")
    for i, t in enumerate(what):
        if not isinstance(t, kinds):
            raise TypeError(f"argument '{argument}[{i}]' must be a torch.Tensor, got {type(t).__name__}")
    return list(what)


def number_list(what: Any, argument: str) -> tuple[int, ...]:
    """Whole numbers from a list, a tuple, a torch.Size, an integer tensor or array."""
    if isinstance(what, torch.Tensor) and (what.dim() != 1 or what.dtype.is_floating_point or what.dtype.is_complex):
        raise TypeError(f"argument '{argument}' must be a 1-D tensor of whole numbers, got {what.dtype} {what.dim()}-D")
    if torch.compiler.is_compiling() and isinstance(what, (list, tuple)):
        return tuple(what)  # of numbers that may be symbols
    listed = what.tolist() if hasattr(what, "tolist") else what
    if not isinstance(listed, (list, tuple)):
        raise TypeError(f"argument '{argument}' must be a list of whole numbers, got {type(what).__name__}")
    for n in listed:
        if isinstance(n, (float, bool)) or not hasattr(n, "__index__"):
            raise TypeError(f"argument '{argument}' must be a list of whole numbers, got {n!r}")
    return tuple(n.__index__() for n in listed)


def split_lists(what: Any, one: bool) -> tuple[tuple[int, ...], ...] | None:
    if what is None or (isinstance(what, (list, tuple)) and not what):
        return None
    if one:
        return (number_list(what, "split_sizes"),)
    if isinstance(what, torch.Tensor):
        what = what.tolist()
    if not isinstance(what, (list, tuple)) or not all(hasattr(split, "__len__") for split in what):
        raise TypeError(f"argument 'split_sizes' must be a list of lists, one per tensor, got {what!r}")
    return tuple(number_list(split, f"split_sizes[{i}]") for i, split in enumerate(what))


def bias_list(bias: Any, columns: Sequence[int]) -> list[torch.Tensor]:
    """A bias per group, or none: None, an empty list, and lists of nothing but None or empty tensors all mean none."""
    if bias is None:
        return []
    if isinstance(bias, torch.Tensor):
        bias = [bias]
    if not isinstance(bias, (list, tuple)):
        raise TypeError(f"argument 'bias' must be a list of tensors, got {type(bias).__name__}")
    for i, b in enumerate(bias):
        if b is not None and not isinstance(b, torch.Tensor):
            raise TypeError(f"argument 'bias[{i}]' must be a torch.Tensor, got {type(b).__name__}")
    if all(b is None or b.numel() == 0 for b in bias) and (len(bias) != len(columns) or any(columns)):
        return []
    if len(bias) != len(columns):
        raise ValueError(f"argument 'bias' must have one tensor per weight: expected {len(columns)}, got {len(bias)}")
    for i, (b, n) in enumerate(zip(bias, columns, strict=True)):
        if b is None or b.numel() != n or b.dim() > 2 or (b.dim() and b.shape[-1] != n):
            shape = "None" if b is None else list(b.shape)
            raise ValueError(f"group {i}: argument 'bias[{i}]' must have the {n} columns of weight[{i}], got {shape}")
    return list(bias)


def read_groups(
    what: str, x: Any, weight: Any, bias: Any, group_list: Any, split_item: Any
) -> tuple[list[torch.Tensor], list[Any], list[torch.Tensor], Plan]:
    xs = tensor_list(x, "x")
    if isinstance(weight, torch.Tensor) and weight.dim() == 3:
        weight = list(weight.unbind(0))
    weights = tensor_list(weight, "weight", (PreparedWeight,))
    if isinstance(split_item, bool) or not isinstance(split_item, int):
        raise TypeError(f"argument 'split_item' must be 0, 1, 2 or 3, got {split_item!r}")
    totals = None if group_list is None else number_list(group_list, "group_list")
    plan = planned_groups(what, tuple(tuple(t.shape) for t in xs), tuple(tuple(w.shape) for w in weights), totals,
                          split_item)  # fmt: skip
    biases = bias_list(bias, plan.columns)
    check_dtypes(xs, weights, biases)
    return xs, weights, biases, plan


def read_pair(
    what: str, x: Any, weight: Any, bias: Any
) -> tuple[list[torch.Tensor], list[Any], list[torch.Tensor], Plan]:
    for argument, t in (("x", x), ("weight", weight)):
        if not isinstance(t, torch.Tensor) and not (argument == "weight" and isinstance(t, PreparedWeight)):
            raise TypeError(f"argument '{argument}' must be a torch.Tensor, got {type(t).__name__}")
    return read_groups(what, [x], [weight], bias, None, 0)


def flat_residual(residual: Any, plan: Plan, dtype: torch.dtype) -> torch.Tensor | None:
    if residual is None:
        return None
    tensors = tensor_list(residual, "residual")
    if len(tensors) != len(plan.outputs):
        raise ValueError(
            f"argument 'residual' must have one tensor per output: expected {len(plan.outputs)}, got {len(tensors)}"
        )
    for i, (t, shape) in enumerate(zip(tensors, plan.outputs, strict=True)):
        if tuple(t.shape) != tuple(shape):
            raise ValueError(
                f"argument 'residual[{i}]' must be shaped like the output, {list(shape)}, got {list(t.shape)}"
            )
        if t.dtype != dtype:
            raise TypeError(f"argument 'residual[{i}]' must have the dtype of x, {dtype}, got {t.dtype}")
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])
