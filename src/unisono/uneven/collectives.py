"""Collectives whose ranks hold different amounts: gather, reduce-scatter and exchange with true sizes, never padded.

Names, signatures and error texts are those of ``torch_npu.distributed``. On a unisono group a call is one call of the
core; on a group of another backend it is composed of what that backend has (``compositions.py``).

Words: the *whole* tensor is the one that is cut (the output of a gather, the input of a reduce-scatter), its *splits*
are rows of dimension 0 per rank, its *counts* the same in elements; the *part* is what one rank has of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup, ReduceOp

from .. import _core
from ..base.handle import Handle
from ..calls.splits import SplitsLike, check_exchange, check_whole_and_part, refuse_splits_of
from ..group.group import Group
from ..group.names import GroupLike, face, find, native
from ..transport.composed_work import DrivenWork, JoinedWork
from ..transport.compositions import composition_of
from .tracing import flat, group_name, is_traced, numbers, op_name, untraced

_ops = torch.ops.unisono  # made in uneven_ops.py
_REDUCE_OPS = (ReduceOp, ReduceOp.RedOpType)

__all__ = [
    "all_gather_into_tensor_uneven",
    "all_to_all_vc",
    "reduce_scatter_tensor_uneven",
    "run_all_gather",
    "run_all_to_all",
    "run_reduce_scatter",
    "work_of",
]


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

    ``output_split_sizes[r]`` is the number of rows of ``output`` that come from rank r; None or empty means equal. The
    input has as many elements as those rows, in any shape, and may be this rank's own rows of the output. Returns None,
    or with ``async_op=True`` a Work (a Handle if ``group`` is a unisono.Group). Does not take part in autograd; the
    form in ``unisono.comm_func`` does.
    """
    if (is_compiling() or type(output) is not Tensor or type(input) is not Tensor) and is_traced(group, output, input):
        if async_op:
            return untraced(all_gather_into_tensor_uneven, output, input, output_split_sizes, group)
        return _ops.all_gather_into_tensor_uneven_(output, input, numbers(output_split_sizes), group_name(group))
    found, ours = find(group)
    if found is None:
        return _warn_outside("all_gather_into_tensor_uneven")
    counts = check_whole_and_part(found, ours, output, input, output_split_sizes, True)
    if input.requires_grad:
        _warn_no_autograd("all_gather_into_tensor_uneven")
    return run_all_gather(found, ours, output, input, counts, async_op)


def reduce_scatter_tensor_uneven(
    output: Tensor,
    input: Tensor,
    input_split_sizes: SplitsLike = None,
    op: Any = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Any:
    """Combines the inputs of all ranks and leaves each rank its own rows of the result.

        splits [1, 2]   rank 0  [[1, 2], [3, 4], [5, 6]]                   [[11, 22]]
                        rank 1  [[10, 20], [30, 40], [50, 60]]    ->       [[33, 44], [55, 66]]

    ``input_split_sizes[r]`` is the number of rows of ``input`` whose result goes to rank r; None or empty means equal.
    The output has as many elements as those rows, in any shape, and may be this rank's own rows of the input, which
    otherwise stays as it is. ``op`` is a torch ReduceOp or its name: sum, avg, product, min, max, band, bor, bxor,
    premul_sum. Ranks are combined in rank order, 16-bit types in float32 with one rounding at the end, on unisono and
    on gloo groups; on others as their backend does. Returns as :func:`all_gather_into_tensor_uneven`.
    """
    if (is_compiling() or type(output) is not Tensor or type(input) is not Tensor) and is_traced(group, output, input):
        if async_op:
            return untraced(reduce_scatter_tensor_uneven, output, input, input_split_sizes, op, group)
        return _ops.reduce_scatter_tensor_uneven_(
            output, input, numbers(input_split_sizes), op_name(op), group_name(group)
        )
    found, ours = find(group)
    if found is None:
        return _warn_outside("reduce_scatter_tensor_uneven")
    if isinstance(input_split_sizes, _REDUCE_OPS):
        refuse_splits_of(input_split_sizes)
    counts = check_whole_and_part(found, ours, input, output, input_split_sizes, False)
    if input.requires_grad:
        _warn_no_autograd("reduce_scatter_tensor_uneven")
    return run_reduce_scatter(found, ours, output, input, counts, op, async_op)


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

    ``send_count_matrix[i][j]`` is the number of elements that rank i sends to rank j: n lists of n numbers, a flat list
    of n * n, a tensor or a numpy array. The input holds this rank's row of it, the output its column; both may have any
    shape. Input and output must not overlap. Returns as :func:`all_gather_into_tensor_uneven`.
    """
    if (is_compiling() or type(output) is not Tensor or type(input) is not Tensor) and is_traced(group, output, input):
        if async_op:
            return untraced(all_to_all_vc, output, input, send_count_matrix, group)
        return _ops.all_to_all_vc_(output, input, flat(send_count_matrix), group_name(group))
    found, _ = find(group)
    if found is None:
        return _warn_outside("all_to_all_vc")
    rows, rank = check_exchange(found, output, input, send_count_matrix)
    if input.requires_grad:
        _warn_no_autograd("all_to_all_vc")
    return run_all_to_all(found, output, input, rows, rank, async_op)


# -- running what has been checked; comm_func and the operators of torch.compile come in here


def run_all_gather(
    group: ProcessGroup | Group,
    ours: Group | None,
    output: Tensor,
    input: Tensor,
    counts: Sequence[int],
    async_op: bool = False,
) -> Any:
    """All-gather of checked tensors; ``counts`` are elements per rank, ``ours`` is ``native(group)``."""
    if ours is not None:
        handle = ours.all_gather(output, input, counts, async_op=async_op)
        return None if handle is None else work_of(group, handle, output)
    assert not isinstance(group, Group)
    composition = composition_of(group, output.device)
    return _with(output, composition.all_gather(_flat(output), _flat(input), counts, async_op))


def run_reduce_scatter(
    group: ProcessGroup | Group,
    ours: Group | None,
    output: Tensor,
    input: Tensor,
    counts: Sequence[int],
    op: Any = ReduceOp.SUM,
    async_op: bool = False,
) -> Any:
    """Reduce-scatter of checked tensors; ``counts`` are elements per rank, ``ours`` is ``native(group)``."""
    if ours is not None:
        handle = ours.reduce_scatter(output, input, counts, op, async_op=async_op)
        return None if handle is None else work_of(group, handle, output)
    code, factor = _core.read_op(op)
    assert not isinstance(group, Group)
    composition = composition_of(group, output.device)
    return _with(output, composition.reduce_scatter(_flat(output), _flat(input), counts, code, factor, async_op))


def run_all_to_all(
    group: ProcessGroup | Group,
    output: Tensor,
    input: Tensor,
    rows: Sequence[Sequence[int]],
    rank: int,
    async_op: bool = False,
) -> Any:
    """Exchange of checked tensors; ``rows[i][j]`` are the elements that rank i sends to rank j."""
    output_counts = [row[rank] for row in rows]
    ours = native(group)
    if ours is not None:
        handle = ours.all_to_all(output, input, output_counts, rows[rank], async_op=async_op)
        return None if handle is None else work_of(group, handle, output)
    assert not isinstance(group, Group)
    matrix = [n for row in rows for n in row]
    composition = composition_of(group, output.device)
    work = composition.all_to_all(_flat(output), _flat(input), output_counts, rows[rank], matrix, async_op)
    return _with(output, work)


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def _with(output: Tensor, work: Any) -> Any:
    """The work of a composition, with the output in the caller's shape as its result."""
    if isinstance(work, (DrivenWork, JoinedWork)):
        work.output = output
    return work


def work_of(group: ProcessGroup | Group, handle: Handle, output: Tensor) -> Any:
    """What an asynchronous call on a unisono group returns: a torch Work on a process group, the Handle on a Group."""
    make = getattr(face(group), "work_of", None)
    return handle if make is None else make(handle, output)


def _warn_outside(verb: str) -> None:
    rank = dist.get_rank() if dist.is_initialized() else -1
    warnings.warn(f"Running {verb} on global rank {rank} which does not belong to the given group.", stacklevel=3)


def _warn_no_autograd(verb: str) -> None:
    if torch.is_grad_enabled():
        warnings.warn(
            f"{verb} writes into its output and does not take part in autograd, but its input requires grad.\n"
            f"  unisono.comm_func.{verb} gives gradients; torch.no_grad() around this call says that none are wanted.",
            stacklevel=3,
        )
