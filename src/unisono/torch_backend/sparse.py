"""Sparse all_reduce: gathers indices and values of all ranks, unpadded, and adds them up in rank order."""

from __future__ import annotations

from typing import Any

import torch

from ..base import ops
from ..base.errors import MismatchError, make_argument_error
from ..group.group import Group


def all_reduce(group: Group, tensor: torch.Tensor, op: Any) -> torch.Tensor:
    """Sums a sparse COO tensor over all ranks, in place; the result is coalesced, the same on all ranks.

    Every rank may have another number of entries. It runs in the caller's thread, also when asked for with async_op.
    """
    name = ops.name_of(ops.read(op)[0])
    if name != "sum":
        raise make_argument_error("sparse_op", "op", "sum", name)
    if tensor.layout is not torch.sparse_coo:
        raise make_argument_error("sparse_layout", "tensor", torch.sparse_coo, tensor.layout)
    mine = tensor.coalesce()
    indices, values = mine.indices(), mine.values().contiguous()
    shape = [mine.sparse_dim(), mine.dense_dim(), *mine.shape]
    facts = torch.full((group.size, 2 + 16), -1, dtype=torch.int64)
    own = torch.full((2 + 16,), -1, dtype=torch.int64)
    own[0] = indices.shape[1]
    own[1 : 1 + len(shape)] = torch.tensor(shape)
    group.all_gather(facts, own)
    if not bool((facts[:, 1:] == own[1:]).all()):
        raise _mismatch(group, facts)
    entries = facts[:, 0].tolist()
    total = sum(entries)
    # One entry per row, so that a rank's entries are one stretch of memory.
    all_indices = torch.empty(total, mine.sparse_dim(), dtype=torch.int64)
    group.all_gather(all_indices, indices.t().contiguous(), [n * mine.sparse_dim() for n in entries])
    all_values = torch.empty(total, *values.shape[1:], dtype=values.dtype)
    width = all_values[0].numel() if total else 0
    group.all_gather(all_values, values, [n * width for n in entries])
    result = torch.sparse_coo_tensor(all_indices.t(), all_values, mine.shape, check_invariants=False).coalesce()
    return tensor.copy_(result)


def _mismatch(group: Group, facts: torch.Tensor) -> MismatchError:
    """The error when ranks have tensors of different shapes: a line for each rank."""
    lines = []
    for r, (sparse_dim, dense_dim, *shape) in enumerate(facts[:, 1:].tolist()):
        sizes = [n for n in shape if n >= 0]
        lines.append(f"\n  rank {r}   sparse {sizes}, {sparse_dim} sparse dimensions and {dense_dim} dense")
    error = MismatchError(f'all_reduce in group "{group.name}": ranks disagree on shape{"".join(lines)}')
    error.op, error.seq, error.group, error.rank = "all_reduce", group.calls, group.name, group.rank
    return error
