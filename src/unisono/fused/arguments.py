"""Reading the arguments of the fused matmuls: from what users pass to lists of tensors and numbers, or an error.

The checks of sizes are in plan.py; here are those of types and forms, and of what must fit a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..calls.ops import check_of_products
from .gemm import DTYPES
from .plan import Plan
from .run import flat_of


class Options(NamedTuple):
    """How products become results; the defaults are those of a call that does not reduce."""

    scale: float
    reduce_op: str = "sum"
    comm_turn: int = 0
    bias_mode: str = "sum"
    backward: str = "all_reduce"
    order: str | None = None


def read_tensors(what: Any, argument: str, one: bool = False, also: type | None = None) -> list[Any]:
    """A list of tensors, or of another type also, from a list or one alone; with ``one``, from one alone only."""
    kinds = (torch.Tensor,) if also is None else (torch.Tensor, also)
    if isinstance(what, (list, tuple)) and not one:
        for i, t in enumerate(what):
            if not isinstance(t, kinds):
                raise TypeError(f"argument '{argument}[{i}]' must be a torch.Tensor, got {type(t).__name__}")
        return list(what)
    if not isinstance(what, kinds):
        wanted = "torch.Tensor" if one else "list of tensors"
        cure = ""
        if one and isinstance(what, (list, tuple)):
            alone = len(what) == 1
            cure = f"\n  pass {argument}[0] itself" if alone else "\n  the grouped form of this function takes lists"
        raise TypeError(f"argument '{argument}' must be a {wanted}, got {type(what).__name__}{cure}")
    return [what]


def check_options(options: Options, bias: bool) -> None:
    scale, reduce_op, comm_turn, bias_mode, backward, order = options
    check_of_products(reduce_op)
    if order not in (None, "tree"):
        raise ValueError(f"argument 'order' must be None or 'tree', got {order!r}")
    if order == "tree" and reduce_op != "sum":
        raise ValueError(f"argument 'order' may be 'tree' for reduce_op 'sum' only, got reduce_op {reduce_op!r}")
    if bias_mode not in ("mean", "sum"):
        raise ValueError(f"argument 'bias_mode' must be 'mean' or 'sum', got {bias_mode!r}")
    if bias and bias_mode == "sum" and reduce_op != "sum":
        raise ValueError(f"argument 'bias_mode' may be 'sum' for reduce_op 'sum' only, got reduce_op {reduce_op!r}")
    if isinstance(comm_turn, bool) or not isinstance(comm_turn, int) or comm_turn < 0:
        raise ValueError(f"argument 'comm_turn' must be a number of pieces, 0 to choose, got {comm_turn!r}")
    if backward not in ("all_reduce", "identity"):
        raise ValueError(f"argument 'backward' must be 'all_reduce' or 'identity', got {backward!r}")
    if not torch.compiler.is_compiling() and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"argument 'scale' must be a finite number, got {scale!r}")


def check_dtypes(x: Sequence[Any], weight: Sequence[Any], bias: Sequence[Any], tree: bool) -> None:
    """One dtype for x and weight, any floating one for bias, all on one device; in the tree order the core's."""
    dtype, device = x[0].dtype, x[0].device
    if tree and (dtype is torch.float64 or device.type != "cpu"):
        raise TypeError(f"order 'tree' takes float32, float16 and bfloat16 on the CPU, got {dtype} on {device}")
    if dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"argument 'x[0]' must have one of the dtypes {names}, got {dtype}")
    for name, tensors in (("x", x), ("weight", weight)):
        for i, t in enumerate(tensors):
            if t.dtype != dtype:
                raise TypeError(f"argument '{name}[{i}]' must have the dtype of x[0], {dtype}, got {t.dtype}")
            if t.device != device:
                raise ValueError(f"argument '{name}[{i}]' must be on the device of x[0], {device}, got {t.device}")
    for i, t in enumerate(bias):
        if t.dtype not in DTYPES:
            raise TypeError(f"argument 'bias[{i}]' must be of a floating-point dtype, got {t.dtype}")


def fit_bias(biases: list[Any], columns: Sequence[int]) -> list[torch.Tensor]:
    """A bias per group, or none: an empty list, and lists of nothing but None or empty tensors all mean none."""
    if all(b is None or b.numel() == 0 for b in biases) and (len(biases) != len(columns) or any(columns)):
        return []
    _check_length(biases, "bias", columns, "weight")
    for i, (b, n) in enumerate(zip(biases, columns, strict=True)):
        if b is None or b.numel() != n or b.dim() > 2 or (b.dim() and b.shape[-1] != n):
            shape = "None" if b is None else list(b.shape)
            raise ValueError(f"group {i}: argument 'bias[{i}]' must have the {n} columns of weight[{i}], got {shape}")
    return biases


def fit_residual(tensors: list[torch.Tensor], plan: Plan, dtype: torch.dtype) -> torch.Tensor:
    """The residuals, one per output and shaped like it, as one flat tensor."""
    _check_length(tensors, "residual", plan.outputs, "output")
    for i, (t, shape) in enumerate(zip(tensors, plan.outputs, strict=True)):
        if t.shape != shape:
            raise ValueError(
                f"argument 'residual[{i}]' must be shaped like the output, {list(shape)}, got {list(t.shape)}"
            )
        if t.dtype != dtype:
            raise TypeError(f"argument 'residual[{i}]' must have the dtype of x, {dtype}, got {t.dtype}")
    return flat_of(tensors)


def _check_length(tensors: Sequence[Any], argument: str, like: Sequence[Any], of: str) -> None:
    if len(tensors) != len(like):
        raise ValueError(
            f"argument '{argument}' must have one tensor per {of}: expected {len(like)}, got {len(tensors)}"
        )
