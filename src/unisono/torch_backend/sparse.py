"""Sparse all_reduce: gathers indices and values of all ranks, unpadded, and adds them up by the number rule.

That is the tree over ranks, in float32 for 16-bit types; a rank without an entry at a place is not there.
"""

from __future__ import annotations

from typing import Any

import torch

from ..base import ops
from ..base.errors import MismatchError, lines_of_ranks, make_argument_error, with_facts
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
    if values.dtype in (torch.float16, torch.bfloat16):
        all_values = all_values.float()
    parts = [
        torch.sparse_coo_tensor(i.t(), v, mine.shape, check_invariants=False, is_coalesced=True)
        for i, v in zip(
            torch.split_with_sizes(all_indices, entries), torch.split_with_sizes(all_values, entries), strict=True
        )
    ]
    while len(parts) > 1:
        sums = [_add(left, right) for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = sums + parts[len(sums) * 2 :]
    return tensor.copy_(parts[0].to(values.dtype))


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Two coalesced tensors added: no place has more than two entries, the left one first."""
    indices = torch.cat([left.indices(), right.indices()], dim=1)
    values = torch.cat([left.values(), right.values()])
    return torch.sparse_coo_tensor(indices, values, left.shape, check_invariants=False).coalesce()


def _mismatch(group: Group, facts: torch.Tensor) -> MismatchError:
    """The error when ranks have tensors of different shapes: a line for each rank."""
    lines = {}
    for r, (sparse_dim, dense_dim, *shape) in enumerate(facts[:, 1:].tolist()):
        sizes = [n for n in shape if n >= 0]
        lines[r] = f"sparse {sizes}, {sparse_dim} sparse dimensions and {dense_dim} dense"
    error = MismatchError(f'all_reduce in group "{group.name}": ranks disagree on shape{lines_of_ranks(lines)}')
    error.seq = group.calls
    differing = [r for r in lines if lines[r] != lines[group.rank]]
    return with_facts(error, "all_reduce", group.name, group.rank, differing)
