"""Which way a functional call takes: the group's transport itself, or the operators of torch that call it.

What decides is asked in the binding (``core/python/eager.h``), in one step, since it is on the way of every small call.
The transport is called as ``unisono.transport.protocol.Transport`` says, with a number or shapes as output: it makes
the result. So are the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .._core import eager_partner, eager_transport, eager_transport_of_all
from ..calls.groups import group_rank, place
from ..calls.groups import transport as transport_of_group
from ..calls.tensors import expect_tensor
from ..group.names import GroupLike
from .operators import Operators


def transport(function: str, group: GroupLike, tensor: Tensor) -> Any:
    """The verbs of the group: its transport, unless there is something to differentiate, trace or fake."""
    found = False if is_dynamo_compiling() else eager_transport(group, tensor)
    if found is None:
        return transport_of_group(function, group, tensor)
    if found is False:
        expect_tensor(function, tensor)
        return _operators(function, group, (tensor,))
    return found


def transport_of_all(function: str, group: GroupLike, tensors: Sequence[Tensor]) -> Any:
    """As :func:`transport`, for a call of several tensors: operators, if one of them needs it."""
    found = False if is_dynamo_compiling() else eager_transport_of_all(group, tensors)
    if found is None:
        return transport_of_group(function, group, tensors[0])
    return _operators(function, group, tensors) if found is False else found


def rooted(function: str, group: GroupLike, tensor: Tensor, argument: str, rank: int) -> tuple[Any, int]:
    """As :func:`transport`, and with it the rank in the group of a root given by its global rank."""
    found = None if is_dynamo_compiling() else eager_partner(group, tensor, rank)
    if found is None:
        root = group_rank(function, argument, rank, group)
        return transport(function, group, tensor), root
    return found


def _operators(function: str, group: GroupLike, tensors: Sequence[Tensor]) -> Operators:
    """The verbs as operators of torch, which have a backward but would drop the tangents of forward mode."""
    if not is_dynamo_compiling() and forward_ad._current_level >= 0:
        for tensor in filter(torch.is_tensor, tensors):
            if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
                raise NotImplementedError(
                    f"For {function}, there are no forward-mode derivatives, and the tensor has a tangent; "
                    "use backward, or torch.autograd.forward_ad.unpack_dual(tensor).primal"
                )
    return Operators(*place(function, group))
