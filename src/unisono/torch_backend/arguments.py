"""What torch.distributed hands to a backend, taken apart: tensors and options."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ..group.group import Group
from . import refusals

Timeout: TypeAlias = timedelta | None
Root: TypeAlias = int | None

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


def group_options(group: Group) -> Any:
    """What torch knows a group's options by: gloo's, if this torch has gloo."""
    gloo: Any = getattr(dist, "ProcessGroupGloo", None)
    made = SimpleNamespace() if gloo is None else gloo._Options()
    made._timeout = timedelta(seconds=group.timeout_s)
    made.group_name = group.name
    made.global_ranks_in_group = group.ranks
    return made


def one(tensors: Any, words: str = "requires a single-element tensor list") -> Tensor:
    """The tensor in a list of one, as torch gives it, or by itself; else an error that has gloo's words."""
    if type(tensors) is not list and isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise refusals.not_one_tensor(len(tensors), words)
    return tensors[0]  # type: ignore[no-any-return]


def inner(lists: Any, words: str) -> Any:
    """The list of tensors in a list of one list, as torch gives it, or by itself; else an error with these words."""
    if len(lists) == 1 and isinstance(lists[0], (list, tuple)):
        return lists[0]
    if not lists or isinstance(lists[0], (list, tuple)):
        raise refusals.RefusedValueError(f"ProcessGroupUnisono::{words}, got {len(lists)}")
    return lists


def of_root(name: str, lists: Any, rank: int, root: int, size: int) -> Any:
    """The list of a gather's or scatter's root, None elsewhere; an error where gloo has one."""
    what = "output" if name == "gather" else "input"
    if rank == root:
        return inner(lists, f"{name}: requires a single-element {what} list containing a list with {size} tensors")
    if lists and 0 <= root < size:
        raise refusals.RefusedValueError(f"ProcessGroupUnisono::{name}: requires empty {what} on non-root")
    return None
