"""The all-to-all family: every rank has something for every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.handle import Handle
from ..calls.groups import place, transport
from ..group.names import GroupLike
from . import operators, run
from .arguments import as_rows, exchange_splits
from .collectives import is_direct

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

    A tensor in ``output_shape_list`` gives its shape. Differentiable.
    """
    function = "all_to_all_with_output_shape"
    if not isinstance(input_tensor_list, (list, tuple)):
        raise TypeError(f"Expected list or tuple, but got {type(input_tensor_list)}.")
    for tensor in input_tensor_list:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Expected tensor, but got {type(tensor)}")
    if not isinstance(output_shape_list, (list, tuple)):
        raise TypeError(f"Expected list or tuple, but got {type(output_shape_list)}.")
    shapes = [_shape(shape) for shape in output_shape_list]
    direct = all(map(is_direct, input_tensor_list)) and bool(input_tensor_list)
    if direct:
        found = transport(function, group, input_tensor_list[0])
        rank, size, name = found.rank, found.size, ""
    else:
        rank, size, name = place(function, group)
    for argument, items in (("input_tensor_list", input_tensor_list), ("output_shape_list", shapes)):
        if len(items) != size:
            raise ValueError(f"For {function}, '{argument}' must have one entry per rank: {size}, got {len(items)}")
    dtype = input_tensor_list[0].dtype
    for tensor in input_tensor_list:
        if tensor.dtype != dtype:
            raise TypeError(f"all_to_all input dtype must be the same, but got {dtype} and {tensor.dtype}.")
    if direct:
        return run.all_to_all_lists(found, input_tensor_list, shapes, async_op)
    joined = torch.cat([tensor.reshape(-1) for tensor in input_tensor_list])
    counts = [math.prod(shape) for shape in shapes]
    sent = [tensor.numel() for tensor in input_tensor_list]
    received, handle = _by_operator(joined, counts, sent, rank, name, async_op)
    outputs = tuple(part.reshape(shape) for part, shape in zip(torch.split(received, counts), shapes, strict=True))
    return outputs, None if handle is None else handle.of(outputs)


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

    Splits are rows of dimension 0, for or from each rank; None or an empty list: equal shares. Differentiable.
    """
    function = "all_to_all_single_with_output_shape"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"Expected tensor, but got {type(tensor)}")
    shape = _shape(output_shape)
    direct = is_direct(tensor)
    if direct:
        found = transport(function, group, tensor)
        rank, size, name = found.rank, found.size, ""
    else:
        rank, size, name = place(function, group)
    rows = as_rows(tensor)
    output_splits = exchange_splits(function, "output", output_split_sizes, shape[0] if shape else 1, size)
    input_splits = exchange_splits(function, "input", input_split_sizes, rows.shape[0], size)
    tail, other = tuple(rows.shape[1:]), tuple(shape[1:])
    if tail != other:  # rows of different shapes: count elements
        rows = rows.reshape(-1)
        output_splits = [n * math.prod(other) for n in output_splits]
        input_splits = [n * math.prod(tail) for n in input_splits]
    if direct:
        received, handle = run.all_to_all(found, rows, output_splits, input_splits, async_op)
    else:
        received, handle = _by_operator(rows, output_splits, input_splits, rank, name, async_op)
    if tail != other or not shape:
        received = received.reshape(shape)
        handle = None if handle is None else handle.of(received)
    return received, handle


def all_to_all_v_c(
    output: Tensor, input: Tensor, send_count_matrix: list[int], group: GroupLike = None, async_op: bool = False
) -> Handle | None:
    """Exchanges rows by a matrix that all ranks know: rank i sends ``send_count_matrix[i * size + j]`` rows to rank j::

        matrix [0, 3, 2, 1]   rank 0  [1, 2, 3]             [10, 20]
                              rank 1  [10, 20, 30]    ->    [1, 2, 3, 30]

    Writes into ``output``, and returns a handle if ``async_op``.
    """
    for tensor in (input, output):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Expected tensor, but got {type(tensor)}")
    if not isinstance(send_count_matrix, list):
        raise TypeError(f"send_count_matrix must be list, but got {type(send_count_matrix)}")
    if not all(isinstance(n, int) for n in send_count_matrix):
        raise TypeError("send_count_matrix elements must be of type int")
    found = transport("all_to_all_v_c", group, input)
    rank, size = found.rank, found.size
    if size * size != len(send_count_matrix):
        raise TypeError(
            f"send_count_matrix must be square matrix, but got {len(send_count_matrix)}.\n"
            f"  Expected {size * size} entries, a row of {size} per rank"
        )
    row, other = math.prod(input.shape[1:]), math.prod(output.shape[1:])
    if row != other:
        raise ValueError(f"The input and output dimensions except 0 must be of equal size, but got {row} and {other}.")
    sent = send_count_matrix[rank * size : (rank + 1) * size]
    received = send_count_matrix[rank::size]
    for argument, tensor, counts in (("input", input, sent), ("output", output, received)):
        rows = tensor.shape[0] if tensor.dim() else 1
        if min(counts) < 0 or sum(counts) != rows:
            raise ValueError(
                f"For all_to_all_v_c, this rank's counts must add up to the {rows} rows of '{argument}', got {counts}"
            )
    output_counts, input_counts = [n * row for n in received], [n * row for n in sent]
    handle: Handle | None = found.all_to_all(output, run.plain(input), output_counts, input_counts, None, async_op)
    return handle


def _by_operator(
    tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], rank: int, name: str, async_op: bool
) -> tuple[Tensor, Handle | None]:
    operator = operators.all_to_all
    return operators.start(async_op, "all_to_all", operator, tensor, output_splits, input_splits, rank, name)


def _shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, Tensor):
        return tuple(shape.shape)
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"Expected tensor or tuple, but got {type(shape)}")
    return tuple(shape)
