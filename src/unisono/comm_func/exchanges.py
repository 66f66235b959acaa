"""The all-to-all family: every rank has something for every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..base.handle import Handle
from ..base.tensors import plain
from ..calls.exchanges import are_usual_lists, check_exchange_of_rows, check_lists, cut_usual_sides, side_counts
from ..calls.groups import transport as transport_of_group
from ..calls.tensors import shape_of
from ..group.names import GroupLike
from .dispatch import transport, transport_of_all

Shape = Tensor | Sequence[int]


def all_to_all_with_output_shape(
    output_shape_list: Sequence[Shape],
    input_tensor_list: Sequence[Tensor],
    group: GroupLike = None,
    async_op: bool = False,
) -> tuple[tuple[Tensor, ...], Handle | None]:
    """Sends one tensor to every rank and receives one from every rank, of the shapes given::

        rank 0  input [1], [2, 3]    shapes (1), (2)          [1], [10, 20]
        rank 1  input [10, 20], [30]   shapes (2), (1)    ->  [2, 3], [30]

    Differentiable.

    Args:
        output_shape_list: the shape of what comes from each rank, or a tensor of that shape
        input_tensor_list: what goes to each rank
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the handle's ``wait()``

    Returns:
        The tensors that came, and a handle with ``async_op=True``, else None.
    """
    function = "all_to_all_with_output_shape"
    found = transport_of_all(function, group, input_tensor_list)
    if is_dynamo_compiling() or not are_usual_lists(output_shape_list, input_tensor_list, found.size):
        output_shape_list = check_lists(function, output_shape_list, input_tensor_list, found.size)
    made = found.all_to_all(output_shape_list, input_tensor_list, None, None, None, async_op)
    return (made.outputs, made) if async_op else (made, None)


def all_to_all_single_with_output_shape(
    output_shape: Shape,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> tuple[Tensor, Handle | None]:
    """Sends rows of one tensor to every rank and receives rows from every rank, in one tensor of the shape given::

        rank 0  [1, 2, 3]   sends 1 and 2, receives 1 and 1       [1, 10]
        rank 1  [10, 20]    sends 1 and 1, receives 2 and 1   ->  [2, 3, 20]

    Differentiable.

    Args:
        output_shape: the shape of the result, or a tensor of that shape
        tensor: the rows to send
        output_split_sizes: rows (not elements) that come from each rank; None or empty: equal shares
        input_split_sizes: rows (not elements) that go to each rank; None or empty: equal shares
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the handle's ``wait()``

    Returns:
        The result, and a handle with ``async_op=True``, else None.
    """
    function = "all_to_all_single_with_output_shape"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"Expected tensor, but got {type(tensor)}")
    found = transport(function, group, tensor)
    splits = (output_split_sizes, input_split_sizes)
    usual = None if is_dynamo_compiling() else cut_usual_sides(output_shape, tensor, *splits, found.size)
    if usual is not None:
        made = found.all_to_all(usual[0], tensor, usual[1], usual[2], None, async_op)
        return (made.outputs, made) if async_op else (made, None)
    shape = shape_of(output_shape)
    output_counts = side_counts(function, "output", output_split_sizes, shape, found.size)
    input_counts = side_counts(function, "input", input_split_sizes, tensor.shape, found.size)
    as_asked = len(shape) > 0 and shape[1:] == tensor.shape[1:]  # else only the elements count
    rows, source = (shape[0], tensor) if as_asked else (math.prod(shape), tensor.reshape(-1))
    made = found.all_to_all(rows, source, output_counts, input_counts, None, async_op)
    if not as_asked:
        made = made.of(made.outputs.reshape(shape)) if async_op else made.reshape(shape)
    return (made.outputs, made) if async_op else (made, None)


def all_to_all_v_c(
    output: Tensor, input: Tensor, send_count_matrix: list[int], group: GroupLike = None, async_op: bool = False
) -> Handle | None:
    """Exchanges rows by a matrix that all ranks know: rank i sends ``send_count_matrix[i * size + j]`` rows to rank j::

        matrix [0, 3, 2, 1]   rank 0  [1, 2, 3]             [10, 20]
                              rank 1  [10, 20, 30]    ->    [1, 2, 3, 30]

    Args:
        output: written: the rows that come to this rank
        input: the rows that this rank sends
        send_count_matrix: n * n numbers of rows (not elements), the sender's row by row
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        async_op: True: return at once; read no result and change no input before the handle's ``wait()``

    Returns:
        A handle with ``async_op=True``, else None.
    """
    if not (isinstance(input, Tensor) and isinstance(output, Tensor)):
        raise TypeError(f"Expected tensor, but got {type(output if isinstance(input, Tensor) else input)}")
    found = transport_of_group("all_to_all_v_c", group, input)
    input = plain(input)
    counts = check_exchange_of_rows(found, output, input, send_count_matrix)
    handle: Handle | None = found.all_to_all(output, input, *counts, None, async_op)
    return handle
