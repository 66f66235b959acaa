"""The uneven collectives as operators of torch's dispatcher, for torch.compile, fake tensors and other tracing.

They take the group by its name (empty: the default group) and write into their first argument. Checks happen when an
operator runs; tracing needs none, since nothing is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from . import uneven
from .group import Group
from .groups import GroupLike

__all__ = ["all_gather", "all_to_all", "group_name", "op_name", "reduce_scatter"]

_OPS = tuple(
    (getattr(ReduceOp, name.upper()), name)
    for name in (
        "sum",
        "avg",
        "product",
        "min",
        "max",
        "band",
        "bor",
        "bxor",
    )
)


def op_name(op: Any) -> str:
    """The name of a reduce operation; written for torch.compile to read."""
    if isinstance(op, str):
        return op
    # By identity: of a look-up in a dict torch.compile keeps the first answer for all later ops.
    for known, name in _OPS:
        if op is known:
            return name
    raise ValueError("under torch.compile, 'op' must be a name or a constant such as ReduceOp.SUM")


def group_name(group: GroupLike) -> str:
    """The name by which an operator finds a group; written for torch.compile to read."""
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    if isinstance(group, Group):
        raise TypeError("under torch.compile, 'group' must be a ProcessGroup or its name, got a unisono.Group")
    return group.group_name


@torch.library.custom_op("unisono::all_gather_into_tensor_uneven_", mutates_args=("output",))
def all_gather(output: Tensor, input: Tensor, splits: Sequence[int], group: str) -> None:
    """``unisono.all_gather_into_tensor_uneven`` for tracing; no splits mean equal ones."""
    with torch.no_grad():
        uneven.all_gather_into_tensor_uneven(output, input, splits, group or None)


@torch.library.custom_op("unisono::reduce_scatter_tensor_uneven_", mutates_args=("output",))
def reduce_scatter(output: Tensor, input: Tensor, splits: Sequence[int], op: str, group: str) -> None:
    """``unisono.reduce_scatter_tensor_uneven`` for tracing; no splits mean equal ones."""
    with torch.no_grad():
        uneven.reduce_scatter_tensor_uneven(output, input, splits, op, group or None)


@torch.library.custom_op("unisono::all_to_all_vc_", mutates_args=("output",))
def all_to_all(output: Tensor, input: Tensor, matrix: Sequence[int], group: str) -> None:
    """``unisono.all_to_all_vc`` for tracing, with a flat matrix."""
    with torch.no_grad():
        uneven.all_to_all_vc(output, input, matrix, group or None)


@all_gather.register_fake
@all_to_all.register_fake
def _(output: Tensor, input: Tensor, numbers: Sequence[int], group: str) -> None:
    pass


@reduce_scatter.register_fake
def _(output: Tensor, input: Tensor, splits: Sequence[int], op: str, group: str) -> None:
    pass
