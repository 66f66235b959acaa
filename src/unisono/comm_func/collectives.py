"""The functional collectives: input left alone, result returned.

The transport makes the result: an output that is a number says how many rows it has, -1 for as many as the verb gives.
On groups of ours results lie in shared memory, so the next call on them copies nothing.
"""

from __future__ import annotations

from torch import Tensor

from ..base.handle import Handle
from ..base.ops import Op
from ..calls.groups import outside
from ..calls.ops import SUM, reduction
from ..calls.splits import SplitsLike, uneven_rows
from ..group.names import GroupLike
from ..transport.find import find_for_barrier
from .dispatch import rooted, transport


def all_reduce(
    tensor: Tensor, op: Op = "sum", group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Combines a tensor over all ranks; all of them get the same bits::

        rank 0  [1, 2]        [11, 22]
        rank 1  [10, 20]  ->  [11, 22]

    Differentiable.

    Args:
        tensor: this rank's part; stays as it is
        op: sum, prod, min, max or avg, or a torch ReduceOp
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the handle's ``wait()``

    Returns:
        The result, and a handle with ``async_op=True``, else None.
    """
    op, factor = (op, None) if op is SUM else reduction("all_reduce", op)
    made = transport("all_reduce", group, tensor).all_reduce(tensor, -1, op, factor, None, async_op)
    return (made.outputs, made) if async_op else (made, None)


def all_gather_into_tensor(
    tensor: Tensor, group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Puts the ranks' tensors behind one another, along dimension 0, on every rank::

        rank 0  [1, 2]        [1, 2, 10, 20]
        rank 1  [10, 20]  ->  [1, 2, 10, 20]

    Differentiable.

    Args:
        tensor: this rank's rows; the same shape on all ranks, a 0-dim tensor counts as one row
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the handle's ``wait()``

    Returns:
        The result, and a handle with ``async_op=True``, else None.
    """
    made = transport("all_gather_into_tensor", group, tensor).all_gather(-1, tensor, None, None, async_op)
    return (made.outputs, made) if async_op else (made, None)


def all_gather_into_tensor_uneven(
    tensor: Tensor, output_split_sizes: SplitsLike = None, group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Puts the ranks' tensors behind one another; rank r has ``output_split_sizes[r]`` rows, which may be none::

        splits [1, 2]   rank 0  [1]             [1, 10, 20]
                        rank 1  [10, 20]    ->  [1, 10, 20]

    Differentiable.

    Args:
        tensor: this rank's rows
        output_split_sizes: rows (not elements) of each rank; None or empty: all have as many as this one
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the handle's ``wait()``

    Returns:
        The result, and a handle with ``async_op=True``, else None.
    """
    found = transport("all_gather_into_tensor_uneven", group, tensor)
    rows, counts = uneven_rows(output_split_sizes, tensor, found.rank, found.size, gathers=True)
    made = found.all_gather(rows, tensor, counts, None, async_op)
    return (made.outputs, made) if async_op else (made, None)


def reduce_scatter_tensor(
    tensor: Tensor, op: Op = "sum", group: GroupLike = None, async_op: bool = False
) -> tuple[Tensor, Handle | None]:
    """Combines a tensor over all ranks and gives each an equal share of the rows::

        rank 0  [1, 2]         [11]
        rank 1  [10, 20]  ->   [22]

    Differentiable.

    Args:
        tensor: this rank's part, for all rows; dimension 0 is a multiple of the group's size
        op: sum, prod, min, max or avg, or a torch ReduceOp
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the handle's ``wait()``

    Returns:
        The result, and a handle with ``async_op=True``, else None.
    """
    op, factor = (op, None) if op is SUM else reduction("reduce_scatter_tensor", op)
    found = transport("reduce_scatter_tensor", group, tensor)
    made = found.reduce_scatter(-1, tensor, None, op, factor, None, async_op)
    return (made.outputs, made) if async_op else (made, None)


def reduce_scatter_tensor_uneven(
    tensor: Tensor,
    input_split_sizes: SplitsLike = None,
    op: Op = "sum",
    group: GroupLike = None,
    async_op: bool = False,
) -> tuple[Tensor, Handle | None]:
    """Combines a tensor over all ranks and gives rank r ``input_split_sizes[r]`` of the rows, which may be none::

        splits [1, 2]   rank 0  [1, 2, 3]           [11]
                        rank 1  [10, 20, 30]    ->  [22, 33]

    Differentiable.

    Args:
        tensor: this rank's part, for all rows
        input_split_sizes: rows (not elements) of each rank's share; None or empty: equal shares
        op: sum, prod, min, max or avg, or a torch ReduceOp
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the handle's ``wait()``

    Returns:
        The result, and a handle with ``async_op=True``, else None.
    """
    op, factor = (op, None) if op is SUM else reduction("reduce_scatter_tensor_uneven", op)
    found = transport("reduce_scatter_tensor_uneven", group, tensor)
    rows, counts = uneven_rows(input_split_sizes, tensor, found.rank, found.size, gathers=False)
    made = found.reduce_scatter(rows, tensor, counts, op, factor, None, async_op)
    return (made.outputs, made) if async_op else (made, None)


def reduce(tensor: Tensor, dst: int, op: Op = "sum", group: GroupLike = None) -> Tensor:
    """Combines a tensor over all ranks into one rank's result; the others get a 0 of shape [1]::

        dst 0   rank 0  [1, 2]          [11, 22]
                rank 1  [10, 20]    ->  [0]

    Differentiable.

    Args:
        tensor: this rank's part
        dst: the global rank that gets the result
        op: sum, prod, min, max or avg, or a torch ReduceOp
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group

    Returns:
        The result on ``dst``, elsewhere a 0 of shape [1].
    """
    op, factor = (op, None) if op is SUM else reduction("reduce", op)
    found, root = rooted("reduce", group, tensor, "dst", dst)
    made: Tensor = found.reduce(tensor, root, -1, op, factor, None, False)
    return made


def broadcast(tensor: Tensor, src: int = 0, group: GroupLike = None) -> Tensor:
    """Gives every rank a copy of one rank's tensor; the others' tensors say shape and dtype only::

        src 0   rank 0  [1, 2]          [1, 2]
                rank 1  [10, 20]    ->  [1, 2]

    Differentiable.

    Args:
        tensor: what is sent; on the other ranks only its shape and dtype count
        src: the global rank it comes from
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group

    Returns:
        A copy of ``src``'s tensor.
    """
    found, root = rooted("broadcast", group, tensor, "src", src)
    made: Tensor = found.broadcast(tensor, root, -1, None, False)
    return made


def scatter_tensor(tensor: Tensor, src: int = 0, group: GroupLike = None) -> Tensor:
    """Gives each rank an equal share of one rank's rows; the others' tensors say shape and dtype only::

        src 0   rank 0  [1, 2]          [1]
                rank 1  [10, 20]    ->  [2]

    Differentiable.

    Args:
        tensor: what is cut; on the other ranks only its shape and dtype count
        src: the global rank it comes from
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group

    Returns:
        This rank's share of the rows.
    """
    found, root = rooted("scatter_tensor", group, tensor, "src", src)
    made: Tensor = found.scatter(-1, tensor, root, None, None, False)
    return made


def gather_into_tensor(tensor: Tensor, dst: int = 0, group: GroupLike = None) -> Tensor:
    """Puts the ranks' tensors behind one another on one rank; the others get a 0 of shape [1]::

        dst 0   rank 0  [1, 2]          [1, 2, 10, 20]
                rank 1  [10, 20]    ->  [0]

    Differentiable.

    Args:
        tensor: this rank's rows; the same shape on all ranks
        dst: the global rank that gets the result
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group

    Returns:
        The rows of all ranks on ``dst``, elsewhere a 0 of shape [1].
    """
    found, root = rooted("gather_into_tensor", group, tensor, "dst", dst)
    made: Tensor = found.gather(-1, tensor, root, None, None, False)
    return made


def barrier(group: GroupLike = None) -> None:
    """Returns when every rank has called it.

    Args:
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
    """
    (find_for_barrier(group) or outside("barrier", group)).barrier(None, False)
