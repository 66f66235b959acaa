"""One call on one group: natively on unisono groups, through torch.distributed on all others.

Each function leaves its input alone, makes the result, and returns it with a Handle, or with None if ``async_op`` is
False. On unisono groups results lie in shared memory, so the next call on them copies nothing. Ranks here are ranks in
the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import _core
from ..base import tensors
from ..base.handle import Handle, PendingWork
from ..group.group import Group
from ..group.names import native
from ..transport.compositions import composition_of

Result = tuple[Tensor, Handle | None]
Found = ProcessGroup | Group
Step = Callable[[], None]

# torch 2.13 renamed it and warns of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def plain(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it has gaps or is a lazy view: what a backend can read."""
    if tensor.layout is not torch.strided:
        return tensor  # the backend says whether it takes it
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.contiguous().resolve_conj().resolve_neg()


def all_reduce(group: Found, tensor: Tensor, op: str, factor: float, async_op: bool) -> Result:
    """Combines a tensor over all ranks."""
    tensor = plain(tensor)
    own, other = _sides(group)
    if own is not None:
        out = tensors.empty_like(tensor)
        return out, own.all_reduce(tensor, op, out=out, factor=_given(op, factor), async_op=async_op)
    out, torch_op, finish = _for_torch(tensor.clone(), op, factor, other)
    return _ended(dist.all_reduce(out, torch_op, other, async_op), "all_reduce", out, async_op, finish)


def reduce(group: Found, tensor: Tensor, root: int, op: str, factor: float) -> Tensor:
    """Combines a tensor over all ranks; the others than root get a 0 of shape [1]."""
    tensor = plain(tensor)
    own, other = _sides(group)
    if own is not None:
        out = tensors.empty_like(tensor) if own.rank == root else nothing(tensor)
        own.reduce(tensor, root, op, out=out if own.rank == root else None, factor=_given(op, factor))
        return out
    out, torch_op, finish = _for_torch(tensor.clone(), op, factor, other)
    dist.reduce(out, op=torch_op, group=other, group_dst=root)
    if other.rank() != root:
        return nothing(tensor)
    if finish is not None:
        finish()
    return out


def broadcast(group: Found, tensor: Tensor, root: int) -> Tensor:
    """The root's tensor, on every rank."""
    own, other = _sides(group)
    if own is not None:
        out = tensors.empty(tensor.shape, dtype=tensor.dtype)
        if own.rank != root:
            own.broadcast(out, root)
        elif tensor.is_contiguous() and tensors.is_shared(tensor):
            own.broadcast(plain(tensor), root)  # the others read while this rank copies
            out.copy_(tensor)
        else:
            own.broadcast(out.copy_(tensor), root)
        return out
    out = plain(tensor).clone()
    dist.broadcast(out, group=other, group_src=root)
    return out


def all_gather(group: Found, tensor: Tensor, splits: Sequence[int], async_op: bool) -> Result:
    """The rows of all ranks behind one another; ``splits`` says how many each has."""
    tensor = plain(tensor)
    out = _rows_like(group, tensor, sum(splits))
    counts = _elements(splits, tensor)
    own, other = _sides(group)
    if own is not None:
        return out, own.all_gather(out, tensor, counts, async_op=async_op)
    if len(set(splits)) == 1:
        work = _all_gather_single(out, tensor, other, async_op)
    else:
        work = composition_of(other, out.device).all_gather(out.view(-1), tensor.view(-1), counts, async_op)
    return _ended(work, "all_gather", out, async_op)


def reduce_scatter(
    group: Found, tensor: Tensor, splits: Sequence[int], op: str, factor: float, async_op: bool
) -> Result:
    """Combines tensors over all ranks and gives each its rows, ``splits`` says how many."""
    tensor = plain(tensor)
    counts = _elements(splits, tensor)
    own, other = _sides(group)
    if own is not None:
        out = _rows_like(group, tensor, splits[own.rank])
        given = _given(op, factor)
        return out, own.reduce_scatter(out, tensor, counts, op, factor=given, async_op=async_op)
    out = _rows_like(group, tensor, splits[other.rank()])
    code = _core.OPS["product" if op == "prod" else op]
    composition = composition_of(other, out.device)
    work = composition.reduce_scatter(out.view(-1), tensor.view(-1), counts, code, factor, async_op)
    return _ended(work, "reduce_scatter", out, async_op)


def scatter(group: Found, tensor: Tensor, root: int, rank: int, size: int) -> Tensor:
    """Each rank's share of the root's rows; elsewhere the tensor says shape and dtype only."""
    out = _rows_like(group, tensor, tensor.shape[0] // size)
    own, other = _sides(group)
    if own is not None:
        own.scatter(out, plain(tensor) if rank == root else None, root)
    else:
        parts = list(plain(tensor).chunk(size)) if rank == root else None
        if parts is not None and len(parts) != size:  # chunk gives fewer of nothing
            parts = [out.new_empty(out.shape) for _ in range(size)]
        dist.scatter(out, parts, group=other, group_src=root)
    return out


def gather(group: Found, tensor: Tensor, root: int, rank: int, size: int) -> Tensor:
    """The rows of all ranks behind one another on the root; the others get a 0 of shape [1]."""
    tensor = plain(tensor)
    out = _rows_like(group, tensor, tensor.shape[0] * size) if rank == root else nothing(tensor)
    own, other = _sides(group)
    if own is not None:
        own.gather(out if rank == root else None, tensor, root)
    else:
        rows = tensor.shape[0]
        parts = [out[i * rows : (i + 1) * rows] for i in range(size)] if rank == root else None
        dist.gather(tensor, parts, group=other, group_dst=root)
    return out


def all_to_all(
    group: Found, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], async_op: bool
) -> Result:
    """Sends rows to every rank and receives rows from every rank."""
    tensor = plain(tensor)
    out = _rows_like(group, tensor, sum(output_splits))
    counts = _elements(output_splits, tensor), _elements(input_splits, tensor)
    return out, exchange(group, out, tensor, *counts, async_op)


def exchange(
    group: Found, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], async_op: bool
) -> Handle | None:
    """Sends and receives so many elements to and from every rank; writes into ``output``."""
    own, other = _sides(group)
    if own is not None:
        return own.all_to_all(output, input, output_counts, input_counts, async_op=async_op)
    work = dist.all_to_all_single(output.view(-1), input.view(-1), output_counts, input_counts, other, async_op)
    return _ended(work, "all_to_all", output, async_op)[1]


def send(group: Found, tensor: Tensor, dst: int, tag: int, async_op: bool) -> Handle | None:
    """Sends a tensor to one rank."""
    tensor = plain(tensor)
    own, other = _sides(group)
    if own is not None:
        return own.send(tensor, dst, tag, async_op=async_op)
    if async_op:
        work = dist.isend(tensor, group=other, tag=tag, group_dst=dst)
        return _ended(work, "send", tensor, True)[1]
    dist.send(tensor, group=other, tag=tag, group_dst=dst)
    return None


def recv(group: Found, like: Tensor, src: int, tag: int, async_op: bool) -> Result:
    """Receives a tensor of this shape and dtype from one rank."""
    own, other = _sides(group)
    if own is not None:
        out = tensors.empty(like.shape, dtype=like.dtype)
        handle = own.recv(out, src, tag, async_op=async_op)
        return out, handle if isinstance(handle, Handle) else None
    out = like.new_empty(like.shape)
    if async_op:
        return _ended(dist.irecv(out, group=other, tag=tag, group_src=src), "recv", out, True)
    dist.recv(out, group=other, tag=tag, group_src=src)
    return out, None


def barrier(group: Found) -> None:
    """Waits for all ranks."""
    own, other = _sides(group)
    if own is not None:
        own.barrier()
    else:
        dist.barrier(other)


def nothing(tensor: Tensor) -> Tensor:
    """What ranks get that receive no result: MindSpore's tensor of shape [1], always 0."""
    return tensor.new_zeros(1)


def _sides(group: Found) -> tuple[Group | None, ProcessGroup]:
    """The group if it is ours, and the group for torch if it is not."""
    return native(group), cast(ProcessGroup, group)


def _rows_like(group: Found, tensor: Tensor, rows: int) -> Tensor:
    """A new tensor of so many rows, in shared memory if the group is ours."""
    shape = (rows, *tensor.shape[1:])
    if _sides(group)[0] is not None:
        return tensors.empty(shape, dtype=tensor.dtype)
    return tensor.new_empty(shape)


def _elements(splits: Sequence[int], tensor: Tensor) -> list[int]:
    row = 1
    for n in tensor.shape[1:]:
        row *= n
    return [rows * row for rows in splits]


def _given(op: str, factor: float) -> float | None:
    return factor if op == "premul_sum" else None


def _for_torch(
    tensor: Tensor, op: str, factor: float, group: ProcessGroup
) -> tuple[Tensor, dist.ReduceOp.RedOpType, Step | None]:
    """What to hand to torch for an op that not every backend has: AVG and PREMUL_SUM become a SUM.

    Returns the tensor to reduce in place, the op, and a step for after the call.
    """
    if op == "premul_sum":
        return tensor * factor, dist.ReduceOp.SUM, None
    if op != "avg":
        return tensor, getattr(dist.ReduceOp, "PRODUCT" if op == "prod" else op.upper()), None
    rounding = None if tensor.is_floating_point() or tensor.is_complex() else "trunc"

    def divide() -> None:
        tensor.copy_(torch.div(tensor, group.size(), rounding_mode=rounding))

    return tensor, dist.ReduceOp.SUM, divide


def _ended(work: dist.Work | None, op: str, out: Tensor, async_op: bool, finish: Step | None = None) -> Result:
    if async_op and work is not None:
        return out, Handle(PendingWork(work, finish), op, out)
    if finish is not None:
        finish()
    return out, None
