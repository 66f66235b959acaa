"""Whether a call is being traced, by torch.compile or another tracer, and calls that must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base.handle import Finished, Handle
from ..base.work import Work
from ..group.names import GroupLike


def is_traced(group: GroupLike, *tensors: Tensor) -> bool:
    """Says whether a call has to go through torch's dispatcher: it is compiled, or a tensor only stands for one."""
    if torch.compiler.is_compiling():
        return not isinstance(group, int)  # what torch gives to ranks outside of a group
    return any(_is_stand_in(t) for t in tensors)


def _is_stand_in(tensor: Any) -> bool:
    """Whether a tensor's own class decides what operators do with it; other subclasses are tensors like any."""
    return isinstance(tensor, Tensor) and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def untraced(function: Callable[..., Any], output: Tensor, *arguments: Any) -> Any:
    """Makes an asynchronous call outside of a trace: a graph cannot hold a Work.

    Tensors that only stand for others are written by no thread; for them the call is over at once.
    """
    arguments = tuple(a.trigger_wait() if hasattr(a, "trigger_wait") else a for a in arguments)  # results not yet there
    if not any(_is_stand_in(t) for t in (output, *arguments)):
        return torch.compiler.disable(function)(output, *arguments, True)  # type: ignore[no-untyped-call]
    function(output, *arguments, False)
    return Work((Handle(Finished(), function.__name__, output),), [output])


untraced._torchdynamo_disable = True  # type: ignore[attr-defined]  # what disable sets, without importing the compiler
