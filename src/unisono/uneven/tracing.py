"""What torch.compile and other tracers must be able to read: arguments as names, and whether a call is being traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import Parameter

from ..group.group import Group
from ..group.names import GroupLike
from ..transport.composed_work import JoinedWork

_OPS = tuple(
    (getattr(ReduceOp, name.upper()), name)
    for name in (
        "sum",
        "avg",
        "product",
        "min",
        "max",
        "band",
        "bor",
        "bxor",
    )
)


def op_name(op: Any) -> str:
    """The name of a reduce operation; written for torch.compile to read."""
    if isinstance(op, str):
        return op
    # By identity: of a look-up in a dict torch.compile keeps the first answer for all later ops.
    for known, name in _OPS:
        if op is known:
            return name
    raise ValueError("under torch.compile, 'op' must be a name or a constant such as ReduceOp.SUM")


def group_name(group: GroupLike) -> str:
    """The name by which an operator finds a group; written for torch.compile to read."""
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    if isinstance(group, Group):
        raise TypeError("under torch.compile, 'group' must be a ProcessGroup or its name, got a unisono.Group")
    return group.group_name


def numbers(like: Any) -> list[Any]:
    """Splits or counts as a list, in which torch.compile may keep symbols."""
    if like is None:
        return []
    return list(like) if isinstance(like, (list, tuple)) else like.tolist()


def flat(matrix: Any) -> list[Any]:
    """A matrix of counts as one list."""
    return [n for row in numbers(matrix) for n in (row if isinstance(row, (list, tuple)) else [row])]


def is_traced(group: GroupLike, *tensors: Tensor) -> bool:
    """Says whether a call has to go through torch's dispatcher: it is compiled, or a tensor only stands for one."""
    if torch.compiler.is_compiling():
        return not isinstance(group, int)  # what torch gives to ranks outside of a group
    return any(type(t) is not Tensor and type(t) is not Parameter and isinstance(t, Tensor) for t in tensors)


def untraced(function: Callable[..., Any], output: Tensor, *arguments: Any) -> Any:
    """Makes an asynchronous call outside of a trace: a graph cannot hold a Work.

    Tensors that only stand for others are written by no thread; for them the call is over at once.
    """
    if type(output) is Tensor or isinstance(output, Parameter):
        return torch.compiler.disable(function)(output, *arguments, True)  # type: ignore[no-untyped-call]
    function(output, *arguments, False)
    return JoinedWork([], output)


untraced._torchdynamo_disable = True  # type: ignore[attr-defined]  # what disable sets, without importing the compiler
