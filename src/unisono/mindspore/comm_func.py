"""MindSpore's ``communication.comm_func`` on real ``mindspore.Tensor``s, with its names, arguments and handles.

Results lie in shared memory and inputs are read where they are, so a chain of calls copies nothing; see
:mod:`unisono.comm_func` for what each function does. Gradients work in PyNative mode, of calls with ``async_op=True``
too. Groups are meant by name, and made by :func:`create_group`.
"""

from __future__ import annotations

from typing import Any

import mindspore
import torch

from .. import comm_func as _torch
from ..comm_func import (  # noqa: F401  (names of __all__)
    GlobalComm,
    barrier,
    create_group,
    destroy_group,
    get_group_rank_from_world_rank,
    get_group_size,
    get_local_rank,
    get_local_rank_size,
    get_process_group_ranks,
    get_rank,
    get_world_rank_from_group_rank,
    init,
    members,
)
from .calls import lifted
from .tensors import from_torch, to_torch

all_gather_into_tensor = lifted(_torch.all_gather_into_tensor)
all_gather_into_tensor_uneven = lifted(_torch.all_gather_into_tensor_uneven)
all_reduce = lifted(_torch.all_reduce)
all_to_all_single_with_output_shape = lifted(_torch.all_to_all_single_with_output_shape)
all_to_all_v_c = lifted(_torch.all_to_all_v_c)
all_to_all_with_output_shape = lifted(_torch.all_to_all_with_output_shape)
broadcast = lifted(_torch.broadcast)
gather_into_tensor = lifted(_torch.gather_into_tensor)
irecv = lifted(_torch.irecv, differentiable=False)
isend = lifted(_torch.isend, differentiable=False)
recv = lifted(_torch.recv, differentiable=False)
reduce = lifted(_torch.reduce)
reduce_scatter_tensor = lifted(_torch.reduce_scatter_tensor)
reduce_scatter_tensor_uneven = lifted(_torch.reduce_scatter_tensor_uneven)
scatter_tensor = lifted(_torch.scatter_tensor)
send = lifted(_torch.send, differentiable=False)


class P2POp(_torch.P2POp):
    """One message of a batch; ``recv_dtype`` is MindSpore's."""

    def __init__(
        self, op: Any, tensor: Any, peer: int, group: Any = None, tag: int = 0, *, recv_dtype: Any = None
    ) -> None:
        given = to_torch(tensor) if isinstance(tensor, mindspore.Tensor) else tensor
        dtype = None if recv_dtype is None else to_torch(mindspore.ops.zeros((1,), recv_dtype)).dtype
        super().__init__(op, given, peer, group, tag, recv_dtype=dtype)


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> tuple[Any, ...]:
    """Sends and receives what the list says, all at once, and returns one tensor per entry: a 0 for what was sent."""
    return tuple(from_torch(tensor) for tensor in _torch.batch_isend_irecv(p2p_op_list))  # type: ignore[arg-type]


def release() -> None:
    """Gives the default group and all others up."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


__all__ = ["release"]
__all__ += _torch.__all__

#: Names of ``mindspore.communication``, about groups and ranks; all others are ``comm_func``'s.
MEMBERS = ("release", *(name for name in _torch.__all__ if name != "GlobalComm" and hasattr(members, name)))
