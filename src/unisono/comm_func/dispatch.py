"""Which way a functional call takes: the group's transport itself, or the operators of torch that call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..calls.groups import outside, place
from ..group.names import GroupLike
from ..transport.find import find
from .arguments import expect_tensor
from .operators import Operators

_modes = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
_WITHOUT_BEHAVIOUR = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))


def transport(function: str, group: GroupLike, tensor: Tensor) -> Any:
    """The verbs of the group: its transport, unless there is something to differentiate, trace or fake.

    They are called as ``unisono.transport.protocol.Transport`` says, with a number as output: they make the result.
    """
    if (
        not is_compiling()
        and type(tensor) in _WITHOUT_BEHAVIOUR
        and not (tensor.requires_grad and _grad_enabled())
        and not _modes()
    ):
        return find(group, tensor) or outside(function, group)
    expect_tensor(function, tensor)
    return Operators(*place(function, group))


def transport_of_all(function: str, group: GroupLike, tensors: Sequence[Tensor]) -> Any:
    """As :func:`transport`, for a call of several tensors: operators, if one of them needs it."""
    if not tensors or is_compiling():
        return Operators(*place(function, group))
    return transport(function, group, max(tensors, key=lambda t: (type(t) not in _WITHOUT_BEHAVIOUR, t.requires_grad)))
