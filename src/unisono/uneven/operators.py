"""The uneven collectives as operators of torch's dispatcher, for torch.compile, fake tensors and other tracing.

They take the group by its name (empty: the default group) and write into their first argument. Checks happen when an
operator runs; tracing needs none, since nothing is returned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import collectives as uneven


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
