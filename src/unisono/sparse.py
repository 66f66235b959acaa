"""Sparse all_reduce: gathers indices and values of all ranks, unpadded, and adds them up in rank order."""

from __future__ import annotations

from typing import Any

import torch

from .group import Group, reduce_op_name


def all_reduce(group: Group, tensor: torch.Tensor, op: Any) -> torch.Tensor:
    """Sums a sparse COO tensor over all ranks, in place; the result is coalesced, the same on all ranks.

    Every rank may have another number of entries. It runs in the caller's thread, also when asked for with async_op.
    """
    if reduce_op_name(op) != "sum":
        raise ValueError(f"all_reduce of sparse tensors supports SUM only, got {reduce_op_name(op)}")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce takes dense and sparse COO tensors, got layout {tensor.layout}")
    mine = tensor.coalesce()
    indices, values = mine.indices(), mine.values().contiguous()
    shape = [mine.sparse_dim(), mine.dense_dim(), *mine.shape]
    facts = torch.full((group.size, 2 + 16), -1, dtype=torch.int64)
    own = torch.full((2 + 16,), -1, dtype=torch.int64)
    own[0] = indices.shape[1]
    own[1 : 1 + len(shape)] = torch.tensor(shape)
    group.all_gather(facts, own)
    differing = [r for r in range(group.size) if not torch.equal(facts[r, 1:], own[1:])]
    if differing:
        raise ValueError(
            f"all_reduce: ranks {differing} have sparse tensors of other sizes or sparse dimensions than rank "
            f"{group.rank}, which has {list(mine.shape)}"
        )
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
