"""``torch_npu.distributed``: the uneven collectives, for npu tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from ..uneven import collectives as uneven
from .crossing import on_host


def reduce_scatter_tensor_uneven(
    output: torch.Tensor,
    input: torch.Tensor,
    input_split_sizes: Any = None,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Combines the inputs of all ranks and leaves each its rows; see ``unisono.reduce_scatter_tensor_uneven``."""
    with torch.no_grad():  # as upstream, it takes no part in autograd and does not mind an input that requires grad
        return _reduce_scatter(output, input, input_split_sizes, op, group, async_op)


def all_gather_into_tensor_uneven(
    output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    """Puts the inputs of all ranks behind one another; see ``unisono.all_gather_into_tensor_uneven``."""
    with torch.no_grad():
        return _all_gather(output, input, output_split_sizes, group, async_op)


def all_to_all_vc(
    output: torch.Tensor, input: torch.Tensor, send_count_matrix: Any, group: Any = None, async_op: bool = False
) -> Any:
    """Sends each rank its own number of elements; see ``unisono.all_to_all_vc``."""
    with torch.no_grad():
        return _all_to_all(output, input, send_count_matrix, group, async_op)


_reduce_scatter = on_host(uneven.reduce_scatter_tensor_uneven)
_all_gather = on_host(uneven.all_gather_into_tensor_uneven)
_all_to_all = on_host(uneven.all_to_all_vc)
