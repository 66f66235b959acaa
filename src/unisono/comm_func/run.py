"""One functional call on one transport: leaves the input alone, and returns the result in a new tensor.

Those that can be asynchronous return it with a Handle, or with None if they are over. On groups of ours results lie in
shared memory, so the next call on them copies nothing. Ranks here are ranks in the group. The transports make the new
tensor: an output that is a number says how many rows it has, -1 for as many as the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.handle import Handle
from ..transport.protocol import Transport

Result = tuple[Tensor, Handle | None]


def all_reduce(transport: Transport, tensor: Tensor, op: str, factor: float | None, async_op: bool) -> Result:
    """Combines a tensor over all ranks."""
    made = transport.all_reduce(tensor, -1, op, factor, None, async_op)
    return (made, None) if not async_op else (made.outputs, made)


def reduce(transport: Transport, tensor: Tensor, root: int, op: str, factor: float | None) -> Tensor:
    """Combines a tensor over all ranks; the others than root get a 0 of shape [1]."""
    made = transport.reduce(tensor, root, -1, op, factor, None, False)
    return nothing(tensor) if made is None else made


def broadcast(transport: Transport, tensor: Tensor, root: int) -> Tensor:
    """The root's tensor, on every rank."""
    made: Tensor = transport.broadcast(tensor, root, -1, None, False)
    return made


def all_gather(transport: Transport, tensor: Tensor, splits: Sequence[int] | None, async_op: bool) -> Result:
    """The rows of all ranks behind one another; ``splits`` says how many each has, None: all the same."""
    rows = sum(splits) if splits is not None else transport.size * (tensor.shape[0] if tensor.dim() else 1)
    made = transport.all_gather(rows, tensor, splits and _elements(splits, tensor), None, async_op)
    return (made, None) if not async_op else (made.outputs, made)


def reduce_scatter(
    transport: Transport, tensor: Tensor, splits: Sequence[int] | None, op: str, factor: float | None, async_op: bool
) -> Result:
    """Combines tensors over all ranks and gives each its rows, ``splits`` says how many, None: equally many."""
    rows = splits[transport.rank] if splits is not None else tensor.shape[0] // transport.size if tensor.dim() else 1
    made = transport.reduce_scatter(rows, tensor, splits and _elements(splits, tensor), op, factor, None, async_op)
    return (made, None) if not async_op else (made.outputs, made)


def scatter(transport: Transport, tensor: Tensor, root: int) -> Tensor:
    """Each rank's share of the root's rows; elsewhere the tensor says shape and dtype only."""
    rows = tensor.shape[0] // transport.size if tensor.dim() else 1
    made: Tensor = transport.scatter(rows, tensor, root, None, None, False)
    return made


def gather(transport: Transport, tensor: Tensor, root: int) -> Tensor:
    """The rows of all ranks behind one another on the root; the others get a 0 of shape [1]."""
    rows = transport.size * (tensor.shape[0] if tensor.dim() else 1)
    made = transport.gather(rows, tensor, root, None, None, False)
    return nothing(tensor) if made is None else made


def all_to_all(
    transport: Transport, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], async_op: bool
) -> Result:
    """Sends rows to every rank and receives rows from every rank."""
    counts = _elements(output_splits, tensor), _elements(input_splits, tensor)
    made = transport.all_to_all(sum(output_splits), tensor, *counts, None, async_op)
    return (made, None) if not async_op else (made.outputs, made)


def all_to_all_lists(
    transport: Transport, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], async_op: bool
) -> tuple[tuple[Tensor, ...], Handle | None]:
    """Sends a tensor to every rank and receives one of each shape; nothing is put together, nothing is cut."""
    inputs = [plain(tensor) for tensor in tensors]
    like = inputs[0] if inputs[0].dim() == 1 else inputs[0].view(-1)
    outputs = tuple([_new(transport, like, shape) for shape in shapes])
    handle = transport.all_to_all(outputs, inputs, None, None, None, async_op)
    return outputs, None if handle is None else handle.of(outputs)


def recv(transport: Transport, like: Tensor, src: int, tag: int, async_op: bool) -> Result:
    """Receives a tensor of this shape and dtype from one rank."""
    out = transport.new_like(like)
    if out is None:
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
    handle = transport.recv(out, src, tag, None, async_op)
    return out, handle if async_op else None


def nothing(tensor: Tensor) -> Tensor:
    """What ranks get that receive no result: MindSpore's tensor of shape [1], always 0."""
    return tensor.new_zeros(1)


def plain(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it has gaps or is a lazy view: what a transport can read."""
    if tensor.layout is not torch.strided:
        return tensor  # the transport says whether it takes it
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.contiguous().resolve_conj().resolve_neg()


def _new(transport: Transport, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    made: Any = transport.new_rows(like, shape[0] if len(shape) == 1 else math.prod(shape))
    return like.new_empty(shape) if made is None else made if len(shape) == 1 else made.view(shape)


def _elements(splits: Sequence[int], tensor: Tensor) -> Sequence[int]:
    if tensor.dim() <= 1:
        return splits
    row = tensor.shape[1:].numel()
    return [rows * row for rows in splits]
