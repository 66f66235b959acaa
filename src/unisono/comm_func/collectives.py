"""The functional collectives: input left alone, result returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.distributed_c10d import GroupMember

from ..base.handle import Handle
from ..calls.splits import SplitsLike
from ..group.names import GroupLike, native
from . import arguments, launch, operators
from .arguments import OP_CODES, PLAIN, equal_parts, facts, group_rank, member, no_tensor, numbers, reduction, rows_of

_modes = torch._C._len_torch_dispatch_stack


def direct(tensor: Tensor) -> bool:
    """Says whether a call needs no operator: nothing to differentiate, trace or fake."""
    return type(tensor) in PLAIN and not (tensor.requires_grad and torch.is_grad_enabled()) and not _modes()


def here(function: str, group: GroupLike, *inputs: Tensor) -> tuple[launch.Found | None, int, int, str]:
    """The group for a direct call, or None for one by an operator; then rank, size, and the operator's word for it."""
    if is_compiling() or not all(map(direct, inputs)):
        return (None, *facts(function, group))
    found = member(function, group)
    return (found, *numbers(found), "")


def all_reduce(
    tensor: Tensor, op: Any = "sum", group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Combines a tensor over all ranks; all of them get the same bits::

        rank 0  [1, 2]        [11, 22]
        rank 1  [10, 20]  ->  [11, 22]

    ``op`` is sum, prod, min, max, avg, or a torch ReduceOp. Differentiable.
    """
    if (
        type(tensor) is Tensor
        and type(op) is str
        and not (is_compiling() or async_op or tensor.requires_grad or _modes())
    ):
        # All of what follows in one step of the core, for the sake of small tensors.
        own = native(GroupMember.WORLD if group is None else group)
        if own is not None and op in OP_CODES:
            out = own._comm.new_like(tensor)
            if out is not None:
                own._comm.all_reduce(tensor, out, op, None, None, False)
                return out, None
    if not isinstance(tensor, Tensor):
        no_tensor("all_reduce", tensor)
    how = reduction("all_reduce", op)
    found, *place = here("all_reduce", group, tensor)
    if found is not None:
        return launch.all_reduce(found, tensor, *how, async_op)
    return operators.start(async_op, "all_reduce", operators.all_reduce, tensor, *how, *place)


def all_gather_into_tensor(
    tensor: Tensor, group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Puts the ranks' tensors behind one another, along dimension 0, on every rank::

        rank 0  [1, 2]        [1, 2, 10, 20]
        rank 1  [10, 20]  ->  [1, 2, 10, 20]

    Tensors must have the same shape on all ranks; a 0-dim tensor counts as one row. Differentiable.
    """
    if not isinstance(tensor, Tensor):
        no_tensor("all_gather_into_tensor", tensor)
    found, rank, size, key = here("all_gather_into_tensor", group, tensor)
    rows = rows_of(tensor)
    return _all_gather(found, rows, [rows.shape[0]] * size, rank, key, async_op)


def all_gather_into_tensor_uneven(
    tensor: Tensor, output_split_sizes: SplitsLike = None, group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Puts the ranks' tensors behind one another; rank r has ``output_split_sizes[r]`` rows, which may be none::

        splits [1, 2]   rank 0  [1]             [1, 10, 20]
                        rank 1  [10, 20]    ->  [1, 10, 20]

    None, or an empty list: all ranks have as many as this one. Differentiable.
    """
    if not isinstance(tensor, Tensor):
        no_tensor("all_gather_into_tensor_uneven", tensor)
    found, rank, size, key = here("all_gather_into_tensor_uneven", group, tensor)
    rows = rows_of(tensor)
    splits = arguments.splits(output_split_sizes, None, size) or [rows.shape[0]] * size
    if splits[rank] != rows.shape[0]:
        raise ValueError(
            "'tensor' must have as many rows as this rank's split\n"
            f"  expected {splits[rank]} rows on rank {rank}, got {rows.shape[0]}"
        )
    return _all_gather(found, rows, splits, rank, key, async_op)


def _all_gather(
    found: launch.Found | None, rows: Tensor, splits: Sequence[int], rank: int, key: str, async_op: bool
) -> tuple[Tensor, Handle | None]:
    if found is not None:
        return launch.all_gather(found, rows, splits, async_op)
    return operators.start(async_op, "all_gather", operators.all_gather, rows, splits, rank, key)


def reduce_scatter_tensor(
    tensor: Tensor, op: Any = "sum", group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Combines a tensor over all ranks and gives each an equal share of the rows::

        rank 0  [1, 2]         [11]
        rank 1  [10, 20]  ->   [22]

    Dimension 0 must be a multiple of the group's size. Differentiable.
    """
    if not isinstance(tensor, Tensor):
        no_tensor("reduce_scatter_tensor", tensor)
    found, rank, size, key = here("reduce_scatter_tensor", group, tensor)
    rows = rows_of(tensor)
    splits = [equal_parts(rows.shape[0], size)] * size
    return _reduce_scatter("reduce_scatter_tensor", found, rows, splits, op, rank, key, async_op)


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
    if not isinstance(tensor, Tensor):
        no_tensor(function, tensor)
    found, rank, size, key = here(function, group, tensor)
    rows = rows_of(tensor)
    splits = arguments.splits(input_split_sizes, rows.shape[0], size)
    return _reduce_scatter(function, found, rows, splits, op, rank, key, async_op)


def _reduce_scatter(
    function: str,
    found: launch.Found | None,
    rows: Tensor,
    splits: Sequence[int],
    op: Any,
    rank: int,
    key: str,
    async_op: bool,
) -> tuple[Tensor, Handle | None]:
    name, factor = reduction(function, op)
    if found is not None:
        return launch.reduce_scatter(found, rows, splits, name, factor, async_op)
    operator = operators.reduce_scatter
    return operators.start(async_op, "reduce_scatter", operator, rows, splits, name, factor, rank, key)


def reduce(tensor: Tensor, dst: int, op: Any = "sum", group: GroupLike = None) -> Tensor:
    """Combines a tensor over all ranks into one rank's result; the others get a 0 of shape [1]::

        dst 0   rank 0  [1, 2]          [11, 22]
                rank 1  [10, 20]    ->  [0]

    ``dst`` is a global rank. Differentiable.
    """
    if not isinstance(tensor, Tensor):
        no_tensor("reduce", tensor)
    found, *place = here("reduce", group, tensor)
    how = reduction("reduce", op)
    root = group_rank("reduce", "dst", dst, group)
    if found is not None:
        return launch.reduce(found, tensor, root, *how)
    return operators.start(False, "reduce", operators.reduce, tensor, root, *how, *place)[0]


def broadcast(tensor: Tensor, src: int = 0, group: GroupLike = None) -> Tensor:
    """Gives every rank a copy of one rank's tensor; the others' tensors say shape and dtype only::

        src 0   rank 0  [1, 2]          [1, 2]
                rank 1  [10, 20]    ->  [1, 2]

    ``src`` is a global rank. Differentiable.
    """
    if not isinstance(tensor, Tensor):
        no_tensor("broadcast", tensor)
    found, *place = here("broadcast", group, tensor)
    root = group_rank("broadcast", "src", src, group)
    if found is not None:
        return launch.broadcast(found, tensor, root)
    return operators.start(False, "broadcast", operators.broadcast, tensor, root, *place)[0]


def scatter_tensor(tensor: Tensor, src: int = 0, group: GroupLike = None) -> Tensor:
    """Gives each rank an equal share of one rank's rows; the others' tensors say shape and dtype only::

        src 0   rank 0  [1, 2]          [1]
                rank 1  [10, 20]    ->  [2]

    ``src`` is a global rank. Differentiable.
    """
    if not isinstance(tensor, Tensor):
        no_tensor("scatter_tensor", tensor)
    found, rank, size, key = here("scatter_tensor", group, tensor)
    root = group_rank("scatter_tensor", "src", src, group)
    rows = rows_of(tensor)
    equal_parts(rows.shape[0], size)
    if found is not None:
        return launch.scatter(found, rows, root, rank, size)
    return operators.start(False, "scatter", operators.scatter, rows, root, rank, size, key)[0]


def gather_into_tensor(tensor: Tensor, dst: int = 0, group: GroupLike = None) -> Tensor:
    """Puts the ranks' tensors behind one another on one rank; the others get a 0 of shape [1]::

        dst 0   rank 0  [1, 2]          [1, 2, 10, 20]
                rank 1  [10, 20]    ->  [0]

    ``dst`` is a global rank. Differentiable.
    """
    if not isinstance(tensor, Tensor):
        no_tensor("gather_into_tensor", tensor)
    found, rank, size, key = here("gather_into_tensor", group, tensor)
    root = group_rank("gather_into_tensor", "dst", dst, group)
    rows = rows_of(tensor)
    if found is not None:
        return launch.gather(found, rows, root, rank, size)
    return operators.start(False, "gather", operators.gather, rows, root, rank, size, key)[0]


def barrier(group: GroupLike = None) -> None:
    """Returns when every rank has called it."""
    launch.barrier(member("barrier", group))
