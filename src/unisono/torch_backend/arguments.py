"""What torch.distributed hands to a backend, taken apart: tensors, reduce operations, splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ..base import ops
from ..calls.splits import cut
from . import refusals


def settled(argument: Any) -> Any:
    """Waits for the results of functional collectives in an argument and puts the tensors in their place."""
    if isinstance(argument, AsyncCollectiveTensor):
        return argument.trigger_wait()  # type: ignore[no-untyped-call]
    if isinstance(argument, tuple):
        return tuple(settled(part) for part in argument)
    return [settled(part) for part in argument] if isinstance(argument, list) else argument


def one(tensors: Any) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise refusals.not_one_tensor(len(tensors))
    tensor: Tensor = tensors[0]
    return tensor


def nested(lists: Any) -> bool:
    return len(lists) == 1 and not isinstance(lists[0], Tensor)


def reduction(opts: Any) -> tuple[Any, Any]:
    """The reduce operation, and the options if there are any."""
    if opts is None:
        return dist.ReduceOp.SUM, None
    if type(opts) in ops.TORCH_CLASSES:
        return opts, None
    return opts.reduceOp, opts


def counts(tensor: Tensor, splits: Sequence[int], size: int) -> Sequence[int] | None:
    """Elements per rank from rows of dim 0 per rank; None if they are equal."""
    shape = tensor.shape
    counts = cut(splits, shape[0] if shape else 0, shape[1:].numel(), size)
    return counts if splits else None
