"""Collectives whose ranks hold different amounts: gather, reduce-scatter and exchange with true sizes, never padded.

Names, signatures and error texts are those of ``torch_npu.distributed``. A call is checked here, completely and before
anything moves, and is then one verb of the group's transport.

Words: the *whole* tensor is the one that is cut (the output of a gather, the input of a reduce-scatter), its *splits*
are rows of dimension 0 per rank, its *counts* the same in elements; the *part* is what one rank has of it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ReduceOp

from ..base import ops
from ..calls.exchanges import check_exchange, flat_matrix
from ..calls.groups import result, traced_group
from ..calls.ops import traced_name
from ..calls.splits import SplitsLike, as_list, check_whole_and_part, refuse_splits_of
from ..calls.tensors import expect_tensors
from ..group.names import GroupLike, resolve
from ..transport.find import find
from ..transport.protocol import Transport
from .tracing import is_traced, untraced

_operators = torch.ops.unisono  # made in operators.py

__all__ = ["all_gather_into_tensor_uneven", "all_to_all_vc", "reduce_scatter_tensor_uneven"]


def all_gather_into_tensor_uneven(
    output: Tensor,
    input: Tensor,
    output_split_sizes: SplitsLike = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Any:
    """Puts the inputs of all ranks behind one another into every rank's output; each brings its own number of rows.

        splits [1, 2]   rank 0  [[1, 2]]                  [[1, 2], [3, 4], [5, 6]]
                        rank 1  [[3, 4], [5, 6]]    ->    [[1, 2], [3, 4], [5, 6]]

    Does not take part in autograd; :func:`unisono.comm_func.all_gather_into_tensor_uneven` does.

    Args:
        output: the rows of all ranks
        input: this rank's rows, in any shape; may be its own rows of the output
        output_split_sizes: rows (not elements) of ``output`` that come from each rank; None or empty: all the same
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the ``wait()`` of what is returned

    Returns:
        None, or with ``async_op=True`` a Work (a Handle if ``group`` is a unisono.Group).
    """
    if (is_compiling() or type(output) is not Tensor or type(input) is not Tensor) and is_traced(group, output, input):
        if async_op:
            return untraced(all_gather_into_tensor_uneven, output, input, output_split_sizes, group)
        return _operators.all_gather_into_tensor_uneven_(
            output, input, as_list(output_split_sizes), traced_group(group)
        )
    transport = _transport("all_gather_into_tensor_uneven", group, output, input)
    if transport is None:
        return None
    counts = check_whole_and_part(group, transport.rank, transport.size, output, input, output_split_sizes, True)
    if input.requires_grad:
        input = _without_gradient("all_gather_into_tensor_uneven", input)
    return result(group, transport.all_gather(output, input, counts, None, async_op), output)


def reduce_scatter_tensor_uneven(
    output: Tensor,
    input: Tensor,
    input_split_sizes: SplitsLike = None,
    op: ops.Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Any:
    """Combines the inputs of all ranks and leaves each rank its own rows of the result.

        splits [1, 2]   rank 0  [[1, 2], [3, 4], [5, 6]]                   [[11, 22]]
                        rank 1  [[10, 20], [30, 40], [50, 60]]    ->       [[33, 44], [55, 66]]

    Ranks are combined by a binary tree, 16-bit types in float32 and rounded once at the end, on unisono and on gloo
    groups; on others as their backend does. Does not take part in autograd; the form in ``unisono.comm_func`` does.

    Args:
        output: this rank's rows of the result, in any shape; may be its own rows of the input
        input: this rank's part of the sum, for all rows; stays as it is
        input_split_sizes: rows (not elements) of ``input`` whose result goes to each rank; None or empty: all the same
        op: sum, avg, product, min, max, band, bor, bxor or premul_sum, or a torch ReduceOp
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the ``wait()`` of what is returned

    Returns:
        None, or with ``async_op=True`` a Work (a Handle if ``group`` is a unisono.Group).
    """
    if (is_compiling() or type(output) is not Tensor or type(input) is not Tensor) and is_traced(group, output, input):
        if async_op:
            return untraced(reduce_scatter_tensor_uneven, output, input, input_split_sizes, op, group)
        return _operators.reduce_scatter_tensor_uneven_(
            output, input, as_list(input_split_sizes), traced_name(op), traced_group(group)
        )
    transport = _transport("reduce_scatter_tensor_uneven", group, output, input)
    if transport is None:
        return None
    if type(input_split_sizes) in ops.TORCH_CLASSES:
        refuse_splits_of(input_split_sizes)
    counts = check_whole_and_part(group, transport.rank, transport.size, input, output, input_split_sizes, False)
    if input.requires_grad:
        input = _without_gradient("reduce_scatter_tensor_uneven", input)
    return result(group, transport.reduce_scatter(output, input, counts, op, None, None, async_op), output)


def all_to_all_vc(
    output: Tensor,
    input: Tensor,
    send_count_matrix: Any,
    group: GroupLike = None,
    async_op: bool = False,
) -> Any:
    """Sends each rank its own number of elements; every rank passes the same matrix of who sends how many to whom.

        matrix [[1, 2],    rank 0  [1, 2, 3]         [1]              from 0: 1   from 1: 0
                [0, 1]]    rank 1  [4]         ->    [2, 3, 4]        from 0: 2   from 1: 1

    What a rank sends another is compared with what that one expects.

    Args:
        output: this rank's column of the matrix, in any shape
        input: this rank's row of it, in any shape; must not overlap the output
        send_count_matrix: elements (not rows) that rank i sends to rank j: n lists of n numbers, a flat list of n * n,
            a tensor or a numpy array
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the ``wait()`` of what is returned

    Returns:
        None, or with ``async_op=True`` a Work (a Handle if ``group`` is a unisono.Group).
    """
    if (is_compiling() or type(output) is not Tensor or type(input) is not Tensor) and is_traced(group, output, input):
        if async_op:
            return untraced(all_to_all_vc, output, input, send_count_matrix, group)
        return _operators.all_to_all_vc_(output, input, flat_matrix(send_count_matrix), traced_group(group))
    transport = _transport("all_to_all_vc", group, output, input)
    if transport is None:
        return None
    counts = check_exchange(group, transport.rank, transport.size, output, input, send_count_matrix)
    if input.requires_grad:
        input = _without_gradient("all_to_all_vc", input)
    return result(group, transport.all_to_all(output, input, *counts, None, async_op), output)


def _transport(verb: str, group: GroupLike, output: Tensor, input: Tensor) -> Transport | None:
    """The group's transport; None, with a warning, if this process is not in the group."""
    if not (isinstance(output, Tensor) and isinstance(input, Tensor)) and resolve(group) is not None:
        expect_tensors(output, input)
    found = find(group, output)
    if found is None:
        rank = dist.get_rank() if dist.is_initialized() else -1
        warnings.warn(f"Running {verb} on global rank {rank} which does not belong to the given group.", stacklevel=3)
    return found


def _without_gradient(verb: str, input: Tensor) -> Tensor:
    """The input as the transport shall see it, which would warn in its own words."""
    if torch.is_grad_enabled():
        warnings.warn(
            f"{verb} writes into its output and does not take part in autograd, but its input requires grad.\n"
            f"  unisono.comm_func.{verb} gives gradients; torch.no_grad() around this call says that none are wanted.",
            stacklevel=3,
        )
    return input.detach()
