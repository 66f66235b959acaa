"""The functional collectives: input left alone, result returned.

A call runs directly on the group's transport where there is nothing to differentiate, trace or fake; else as an
operator of torch (``operators.py``), which does the same when it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..base.handle import Handle
from ..calls.groups import group_rank, outside, place
from ..calls.splits import SplitsLike
from ..group.names import GroupLike
from ..transport.find import find, find_for_barrier
from . import operators, run
from .arguments import OPS, as_rows, equal_parts, no_tensor, reduction, uneven_splits

_modes = torch._C._len_torch_dispatch_stack
_WITHOUT_BEHAVIOUR = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))
_grad_enabled = torch.is_grad_enabled


def is_direct(tensor: Tensor) -> bool:
    """Says whether a call needs no operator: nothing to differentiate, trace or fake."""
    return (
        not is_compiling()
        and type(tensor) in _WITHOUT_BEHAVIOUR
        and not (tensor.requires_grad and _grad_enabled())
        and not _modes()
    )


def all_reduce(
    tensor: Tensor, op: Any = "sum", group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Combines a tensor over all ranks; all of them get the same bits::

        rank 0  [1, 2]        [11, 22]
        rank 1  [10, 20]  ->  [11, 22]

    ``op`` is sum, prod, min, max, avg, or a torch ReduceOp. Differentiable.
    """
    name, factor = (op, None) if type(op) is str and op in OPS else reduction("all_reduce", op)
    if is_direct(tensor):
        return run.all_reduce(find(group, tensor) or outside("all_reduce", group), tensor, name, factor, async_op)
    if not isinstance(tensor, Tensor):
        no_tensor("all_reduce", tensor)
    here = place("all_reduce", group)
    return operators.start(async_op, "all_reduce", operators.all_reduce, tensor, name, factor, *here)


def all_gather_into_tensor(
    tensor: Tensor, group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Puts the ranks' tensors behind one another, along dimension 0, on every rank::

        rank 0  [1, 2]        [1, 2, 10, 20]
        rank 1  [10, 20]  ->  [1, 2, 10, 20]

    Tensors must have the same shape on all ranks; a 0-dim tensor counts as one row. Differentiable.
    """
    if is_direct(tensor):
        return run.all_gather(find(group, tensor) or outside("all_gather_into_tensor", group), tensor, None, async_op)
    if not isinstance(tensor, Tensor):
        no_tensor("all_gather_into_tensor", tensor)
    rank, size, name = place("all_gather_into_tensor", group)
    rows = as_rows(tensor)
    splits = [rows.shape[0]] * size
    return operators.start(async_op, "all_gather", operators.all_gather, rows, splits, rank, name)


def all_gather_into_tensor_uneven(
    tensor: Tensor, output_split_sizes: SplitsLike = None, group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Puts the ranks' tensors behind one another; rank r has ``output_split_sizes[r]`` rows, which may be none::

        splits [1, 2]   rank 0  [1]             [1, 10, 20]
                        rank 1  [10, 20]    ->  [1, 10, 20]

    None, or an empty list: all ranks have as many as this one. Differentiable.
    """
    function = "all_gather_into_tensor_uneven"
    if is_direct(tensor):
        found = find(group, tensor) or outside(function, group)
        return run.all_gather(found, tensor, _gathered(tensor, output_split_sizes, found.rank, found.size), async_op)
    if not isinstance(tensor, Tensor):
        no_tensor("all_gather_into_tensor_uneven", tensor)
    rank, size, name = place(function, group)
    rows = as_rows(tensor)
    splits = _gathered(rows, output_split_sizes, rank, size)
    return operators.start(async_op, "all_gather", operators.all_gather, rows, splits, rank, name)


def _gathered(tensor: Tensor, sizes: SplitsLike, rank: int, size: int) -> list[int]:
    """Rows of every rank, of which this one's must be the tensor's."""
    rows = tensor.shape[0] if tensor.dim() else 1
    splits = uneven_splits(sizes, None, size) or [rows] * size
    if splits[rank] != rows:
        raise ValueError(
            "'tensor' must have as many rows as this rank's split\n"
            f"  expected {splits[rank]} rows on rank {rank}, got {rows}"
        )
    return splits


def reduce_scatter_tensor(
    tensor: Tensor, op: Any = "sum", group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Combines a tensor over all ranks and gives each an equal share of the rows::

        rank 0  [1, 2]         [11]
        rank 1  [10, 20]  ->   [22]

    Dimension 0 must be a multiple of the group's size. Differentiable.
    """
    name, factor = (op, None) if type(op) is str and op in OPS else reduction("reduce_scatter_tensor", op)
    if is_direct(tensor):
        found = find(group, tensor) or outside("reduce_scatter_tensor", group)
        equal_parts(tensor.shape[0] if tensor.dim() else 1, found.size)
        return run.reduce_scatter(found, tensor, None, name, factor, async_op)
    if not isinstance(tensor, Tensor):
        no_tensor("reduce_scatter_tensor", tensor)
    rank, size, where = place("reduce_scatter_tensor", group)
    rows = as_rows(tensor)
    splits = [equal_parts(rows.shape[0], size)] * size
    operator = operators.reduce_scatter
    return operators.start(async_op, "reduce_scatter", operator, rows, splits, name, factor, rank, where)


def reduce_scatter_tensor_uneven(
    tensor: Tensor,
    input_split_sizes: SplitsLike = None,
    op: Any = "sum",
    group: GroupLike = None,
    async_op: bool = False,
) -> tuple[Tensor, Handle | None]:
    """Combines a tensor over all ranks and gives rank r ``input_split_sizes[r]`` of the rows, which may be none::

        splits [1, 2]   rank 0  [1, 2, 3]           [11]
                        rank 1  [10, 20, 30]    ->  [22, 33]

    None, or an empty list: equal shares. Differentiable.
    """
    function = "reduce_scatter_tensor_uneven"
    name, factor = (op, None) if type(op) is str and op in OPS else reduction(function, op)
    if is_direct(tensor):
        found = find(group, tensor) or outside(function, group)
        splits = uneven_splits(input_split_sizes, tensor.shape[0] if tensor.dim() else 1, found.size)
        return run.reduce_scatter(found, tensor, splits, name, factor, async_op)
    if not isinstance(tensor, Tensor):
        no_tensor(function, tensor)
    rank, size, where = place(function, group)
    rows = as_rows(tensor)
    splits = uneven_splits(input_split_sizes, rows.shape[0], size)
    operator = operators.reduce_scatter
    return operators.start(async_op, "reduce_scatter", operator, rows, splits, name, factor, rank, where)


def reduce(tensor: Tensor, dst: int, op: Any = "sum", group: GroupLike = None) -> Tensor:
    """Combines a tensor over all ranks into one rank's result; the others get a 0 of shape [1]::

        dst 0   rank 0  [1, 2]          [11, 22]
                rank 1  [10, 20]    ->  [0]

    ``dst`` is a global rank. Differentiable.
    """
    name, factor = (op, None) if type(op) is str and op in OPS else reduction("reduce", op)
    root = group_rank("reduce", "dst", dst, group)
    if is_direct(tensor):
        return run.reduce(find(group, tensor) or outside("reduce", group), tensor, root, name, factor)
    if not isinstance(tensor, Tensor):
        no_tensor("reduce", tensor)
    return operators.reduce(tensor, root, name, factor, *place("reduce", group))  # type: ignore[no-any-return]


def broadcast(tensor: Tensor, src: int = 0, group: GroupLike = None) -> Tensor:
    """Gives every rank a copy of one rank's tensor; the others' tensors say shape and dtype only::

        src 0   rank 0  [1, 2]          [1, 2]
                rank 1  [10, 20]    ->  [1, 2]

    ``src`` is a global rank. Differentiable.
    """
    root = group_rank("broadcast", "src", src, group)
    if is_direct(tensor):
        return run.broadcast(find(group, tensor) or outside("broadcast", group), tensor, root)
    if not isinstance(tensor, Tensor):
        no_tensor("broadcast", tensor)
    return operators.broadcast(tensor, root, *place("broadcast", group))  # type: ignore[no-any-return]


def scatter_tensor(tensor: Tensor, src: int = 0, group: GroupLike = None) -> Tensor:
    """Gives each rank an equal share of one rank's rows; the others' tensors say shape and dtype only::

        src 0   rank 0  [1, 2]          [1]
                rank 1  [10, 20]    ->  [2]

    ``src`` is a global rank. Differentiable.
    """
    root = group_rank("scatter_tensor", "src", src, group)
    if is_direct(tensor):
        found = find(group, tensor) or outside("scatter_tensor", group)
        equal_parts(tensor.shape[0] if tensor.dim() else 1, found.size)
        return run.scatter(found, tensor, root)
    if not isinstance(tensor, Tensor):
        no_tensor("scatter_tensor", tensor)
    here = place("scatter_tensor", group)
    rows = as_rows(tensor)
    equal_parts(rows.shape[0], here[1])
    return operators.scatter(rows, root, *here)  # type: ignore[no-any-return]


def gather_into_tensor(tensor: Tensor, dst: int = 0, group: GroupLike = None) -> Tensor:
    """Puts the ranks' tensors behind one another on one rank; the others get a 0 of shape [1]::

        dst 0   rank 0  [1, 2]          [1, 2, 10, 20]
                rank 1  [10, 20]    ->  [0]

    ``dst`` is a global rank. Differentiable.
    """
    root = group_rank("gather_into_tensor", "dst", dst, group)
    if is_direct(tensor):
        return run.gather(find(group, tensor) or outside("gather_into_tensor", group), tensor, root)
    if not isinstance(tensor, Tensor):
        no_tensor("gather_into_tensor", tensor)
    return operators.gather(as_rows(tensor), root, *place("gather_into_tensor", group))  # type: ignore[no-any-return]


def barrier(group: GroupLike = None) -> None:
    """Returns when every rank has called it."""
    (find_for_barrier(group) or outside("barrier", group)).barrier(None, False)
