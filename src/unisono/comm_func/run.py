"""One functional call on one transport: leaves the input alone, makes the result, and returns it.

Those that can be asynchronous return it with a Handle, or with None if they are over. On groups of ours results lie in
shared memory, so the next call on them copies nothing. Ranks here are ranks in the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.handle import Handle
from ..base.tensors import is_shared
from ..transport.protocol import Transport
from .arguments import factor_of

Result = tuple[Tensor, Handle | None]


def plain(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it has gaps or is a lazy view: what a transport can read."""
    if tensor.layout is not torch.strided:
        return tensor  # the transport says whether it takes it
    return tensor.contiguous().resolve_conj().resolve_neg()


def all_reduce(transport: Transport, tensor: Tensor, op: str, factor: float, async_op: bool) -> Result:
    """Combines a tensor over all ranks."""
    out = transport.new_like(tensor)
    if out is None:
        tensor, out = _plain_and_like(transport, tensor)
    return out, transport.all_reduce(tensor, out, op, factor_of(op, factor), None, async_op)


def reduce(transport: Transport, tensor: Tensor, root: int, op: str, factor: float) -> Tensor:
    """Combines a tensor over all ranks; the others than root get a 0 of shape [1]."""
    if transport.rank == root:
        out = transport.new_like(tensor)
        if out is None:
            tensor, out = _plain_and_like(transport, tensor)
        transport.reduce(tensor, root, out, op, factor_of(op, factor), None, False)
        return out
    transport.reduce(plain(tensor), root, None, op, factor_of(op, factor), None, False)
    return nothing(tensor)


def broadcast(transport: Transport, tensor: Tensor, root: int) -> Tensor:
    """The root's tensor, on every rank."""
    out = transport.new_like(tensor)
    if out is None:
        tensor, out = _plain_and_like(transport, tensor)
    if transport.rank != root:
        transport.broadcast(out, root, None, False)
    elif is_shared(tensor):
        transport.broadcast(tensor, root, None, False)  # the others read while this rank copies
        out.copy_(tensor)
    else:
        transport.broadcast(out.copy_(tensor), root, None, False)
    return out


def all_gather(transport: Transport, tensor: Tensor, splits: Sequence[int] | None, async_op: bool) -> Result:
    """The rows of all ranks behind one another; ``splits`` says how many each has, None: all the same."""
    rows = sum(splits) if splits is not None else transport.size * (tensor.shape[0] if tensor.dim() else 1)
    tensor, out = _plain_and_rows(transport, tensor, rows)
    counts = None if splits is None else _elements(splits, tensor)
    return out, transport.all_gather(out, tensor, counts, None, async_op)


def reduce_scatter(
    transport: Transport, tensor: Tensor, splits: Sequence[int] | None, op: str, factor: float, async_op: bool
) -> Result:
    """Combines tensors over all ranks and gives each its rows, ``splits`` says how many, None: equally many."""
    rows = splits[transport.rank] if splits is not None else tensor.shape[0] // transport.size if tensor.dim() else 1
    tensor, out = _plain_and_rows(transport, tensor, rows)
    counts = None if splits is None else _elements(splits, tensor)
    return out, transport.reduce_scatter(out, tensor, counts, op, factor_of(op, factor), None, async_op)


def scatter(transport: Transport, tensor: Tensor, root: int) -> Tensor:
    """Each rank's share of the root's rows; elsewhere the tensor says shape and dtype only."""
    tensor, out = _plain_and_rows(transport, tensor, tensor.shape[0] // transport.size if tensor.dim() else 1)
    transport.scatter(out, tensor if transport.rank == root else None, root, None, None, False)
    return out


def gather(transport: Transport, tensor: Tensor, root: int) -> Tensor:
    """The rows of all ranks behind one another on the root; the others get a 0 of shape [1]."""
    if transport.rank != root:
        transport.gather(None, plain(tensor), root, None, None, False)
        return nothing(tensor)
    rows = transport.size * (tensor.shape[0] if tensor.dim() else 1)
    tensor, out = _plain_and_rows(transport, tensor, rows)
    transport.gather(out, tensor, root, None, None, False)
    return out


def all_to_all(
    transport: Transport, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], async_op: bool
) -> Result:
    """Sends rows to every rank and receives rows from every rank."""
    tensor, out = _plain_and_rows(transport, tensor, sum(output_splits))
    counts = _elements(output_splits, tensor), _elements(input_splits, tensor)
    return out, transport.all_to_all(out, tensor, *counts, None, async_op)


def all_to_all_lists(
    transport: Transport, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], async_op: bool
) -> tuple[tuple[Tensor, ...], Handle | None]:
    """Sends a tensor to every rank and receives one of each shape; nothing is put together, nothing is cut."""
    inputs = [plain(tensor) for tensor in tensors]
    outputs = []
    for shape in shapes:
        _, out = _plain_and_rows(transport, inputs[0].reshape(-1), torch.Size(shape).numel())
        outputs.append(out.view(shape))
    return tuple(outputs), transport.all_to_all(outputs, inputs, None, None, None, async_op)


def recv(transport: Transport, like: Tensor, src: int, tag: int, async_op: bool) -> Result:
    """Receives a tensor of this shape and dtype from one rank."""
    out = transport.new_like(like)
    if out is None:
        _, out = _plain_and_like(transport, like)
    handle = transport.recv(out, src, tag, None, async_op)
    return out, handle if async_op else None


def nothing(tensor: Tensor) -> Tensor:
    """What ranks get that receive no result: MindSpore's tensor of shape [1], always 0."""
    return tensor.new_zeros(1)


def _plain_and_like(transport: Transport, tensor: Tensor) -> tuple[Tensor, Tensor]:
    tensor = plain(tensor)
    out = transport.new_like(tensor)
    return tensor, torch.empty_like(tensor) if out is None else out  # the verb says what is wrong with it


def _plain_and_rows(transport: Transport, tensor: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The tensor as the transport takes it, and a new one with so many rows."""
    out = transport.new_rows(tensor, rows)
    if out is None:
        tensor = plain(tensor)
        out = transport.new_rows(tensor, rows)
        if out is None:
            out = tensor.new_empty((rows, *tensor.shape[1:]))  # the verb says what is wrong with it
    return tensor, out


def _elements(splits: Sequence[int], tensor: Tensor) -> Sequence[int]:
    row = tensor.shape[1:].numel()
    return splits if row == 1 else [rows * row for rows in splits]
