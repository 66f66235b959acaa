"""What torch.distributed hands to a backend, taken apart: tensors, options, splits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ..calls.splits import cut
from . import refusals

Timeout: TypeAlias = timedelta | None

# What torch's plain forms give in the place of options -> the option that it is; numbers of any type are roots.
_OPTIONS = {timedelta: "timeout", dist.ReduceOp: "reduceOp", dist.ReduceOp.RedOpType: "reduceOp"}


def settled(argument: Any) -> Any:
    """Waits for the results of functional collectives in an argument and puts the tensors in their place."""
    if isinstance(argument, AsyncCollectiveTensor):
        return argument.trigger_wait()  # type: ignore[no-untyped-call]
    if isinstance(argument, tuple):
        return tuple(map(settled, argument))
    return list(map(settled, argument)) if isinstance(argument, list) else argument


def options(kind: type[Any], given: Any, *more: Any) -> Any:
    """torch's options, made of its plain forms: a root, a reduce operation, a timeout, or nothing."""
    if type(given) is kind or hasattr(given, "asyncOp"):
        return given
    made = kind()
    for value in (given, *more):
        if value is not None:
            setattr(made, _OPTIONS.get(type(value), "rootRank"), value)
    return made


def one(tensors: Any) -> Tensor:
    """The tensor in a list of one, as torch gives it, or by itself."""
    if type(tensors) is not list and isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise refusals.not_one_tensor(len(tensors))
    return tensors[0]  # type: ignore[no-any-return]


def inner(lists: Any) -> Any:
    """The list of tensors in a list of one list, as torch gives it, or by itself."""
    return lists[0] if len(lists) == 1 and isinstance(lists[0], (list, tuple)) else lists


def counts(tensor: Tensor, splits: Sequence[int], size: int) -> Sequence[int] | None:
    """Elements per rank from rows of dim 0 per rank; None if they are equal."""
    shape = tensor.shape
    rows = shape[0] if shape else 0
    if not splits and rows % size == 0:
        return None
    return cut(splits, rows, shape[1:].numel(), size)
