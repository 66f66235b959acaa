"""Messages between two ranks, one by one or in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core import eager_partner
from ..base.handle import Handle
from ..base.tensors import plain
from ..calls.groups import group_rank, transport
from ..calls.tensors import expect_tensor
from ..group.names import GroupLike
from ..transport.protocol import Transport


def send(tensor: Tensor, dst: int = 0, group: GroupLike = None, tag: int = 0) -> None:
    """Sends a tensor to the rank ``dst`` (a global rank), which receives it with the same tag.

    Args:
        tensor: what is sent
        dst: the global rank that receives it
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        tag: the same at both ends
    """
    found, to = _partner("send", tensor, "dst", dst, group)
    found.send(plain(tensor), to, tag, None, False)


def isend(tensor: Tensor, dst: int = 0, group: GroupLike = None, tag: int = 0) -> Handle:
    """Begins to send a tensor; it must stay as it is until the handle is complete.

    Args:
        tensor: what is sent
        dst: the global rank that receives it
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        tag: the same at both ends

    Returns:
        A handle; after its ``wait()`` the tensor may change.
    """
    found, to = _partner("isend", tensor, "dst", dst, group)
    handle: Handle = found.send(plain(tensor), to, tag, None, True)
    return handle


def recv(tensor: Tensor, src: int = 0, group: GroupLike = None, tag: int = 0) -> Tensor:
    """Receives a tensor from the rank ``src`` (a global rank); ``tensor`` says shape and dtype, and stays as it is.

    Args:
        tensor: says shape and dtype, and stays as it is
        src: the global rank that sends it
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        tag: the same at both ends

    Returns:
        What was received.
    """
    found, source = _partner("recv", tensor, "src", src, group)
    out = _new_like(found, tensor)
    found.recv(out, source, tag, None, False)
    return out


def irecv(tensor: Tensor, src: int = 0, group: GroupLike = None, tag: int = 0) -> tuple[Tensor, Handle]:
    """Begins to receive a tensor; what is returned holds it when the handle is complete.

    Args:
        tensor: says shape and dtype, and stays as it is
        src: the global rank that sends it
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        tag: the same at both ends

    Returns:
        The tensor to be received, valid after the ``wait()`` of the handle, and the handle.
    """
    found, source = _partner("irecv", tensor, "src", src, group)
    out = _new_like(found, tensor)
    return out, found.recv(out, source, tag, None, True)


def _partner(function: str, tensor: Tensor, argument: str, rank: int, group: GroupLike) -> tuple[Transport, int]:
    """The group's transport, and the partner's rank in the group."""
    found = eager_partner(group, tensor, rank)
    if found is not None:
        return found
    expect_tensor(function, tensor)
    return transport(function, group, tensor), group_rank(function, argument, rank, group)


def _new_like(found: Transport, tensor: Tensor) -> Tensor:
    made = found.new_like(tensor)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format) if made is None else made


class P2POp:
    """One message of a batch.

    ``op`` is "isend" or "irecv", or the function; ``tensor`` what to send or, for shape and dtype, what to receive;
    to receive, a shape with ``recv_dtype`` will do. ``peer`` is a global rank.

    >>> import torch
    >>> from unisono import comm_func
    >>> comm_func.P2POp("irecv", (2, 3), 1, recv_dtype=torch.float32)
    P2POp(irecv, (2, 3), peer 1, tag 0)
    """

    def __init__(
        self,
        op: str | Callable[..., Any],
        tensor: Tensor | tuple[int, ...],
        peer: int,
        group: GroupLike = None,
        tag: int = 0,
        *,
        recv_dtype: torch.dtype | None = None,
    ) -> None:
        if not (isinstance(op, str) or callable(op)):
            raise TypeError(f"op must be type of string or function, but got type of {type(op)}")
        name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
        if name not in ("isend", "irecv"):
            raise ValueError(f"Expected ``op`` to be of type ``isend`` or ``irecv``, but got {name}")
        if not isinstance(tensor, (Tensor, tuple)):
            raise TypeError(f"Expected ``tensor`` to be type of tuple or Tensor, but got {type(tensor)}.")
        if not isinstance(peer, int):
            raise TypeError(f"peer must be type of int, but got type of {type(peer)}")
        if recv_dtype is not None and not isinstance(recv_dtype, torch.dtype):
            raise TypeError(f"recv_dtype must be type of torch.dtype, but got type of {type(recv_dtype)}")
        if isinstance(tensor, tuple):
            if name == "isend":
                raise TypeError("Expected ``tensor`` to be type of Tensor for isend, but got a shape")
            if recv_dtype is None:
                raise ValueError("'recv_dtype' of P2POp is None but op is 'irecv' and tensor is a tuple type.")
        self.op = name
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.recv_dtype = recv_dtype

    def __repr__(self) -> str:
        shape = self.tensor if isinstance(self.tensor, tuple) else tuple(self.tensor.shape)
        return f"P2POp({self.op}, {shape}, peer {self.peer}, tag {self.tag})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> tuple[Tensor, ...]:
    """Sends and receives what the list says, all at once, and returns one tensor per entry: a 0 for what was sent.

    Args:
        p2p_op_list: messages, on all ranks in an order that fits

    Returns:
        One tensor per entry: what was received, or a 0 for what was sent.
    """
    if not isinstance(p2p_op_list, list):
        raise TypeError(f"p2p_op_list must be type of list, but got type of {type(p2p_op_list)}.")
    if not p2p_op_list:
        raise TypeError("p2p_op_list can not be empty list.")
    for one in p2p_op_list:
        if not isinstance(one, P2POp):
            raise TypeError(f"must be type of P2POp, but got type of {type(one)}")
    # All are looked at before the first one is sent: what has been sent cannot be taken back.
    tensors = [
        torch.empty(one.tensor, dtype=one.recv_dtype) if isinstance(one.tensor, tuple) else one.tensor
        for one in p2p_op_list
    ]
    for one, tensor in zip(p2p_op_list, tensors, strict=True):
        _partner(one.op, tensor, "src" if one.op == "irecv" else "dst", one.peer, one.group)
    started: list[tuple[Tensor, Handle]] = []
    try:
        for one, tensor in zip(p2p_op_list, tensors, strict=True):
            where = (one.peer, one.group, one.tag)
            if one.op == "irecv":
                started.append(irecv(tensor, *where))
            else:
                started.append((tensor.new_zeros(()), isend(tensor, *where)))
    except BaseException:
        for one, (_, handle) in zip(p2p_op_list, started, strict=False):
            if one.op == "irecv":  # or it would take a later message
                handle._withdraw()
        raise
    for _, handle in started:
        handle.wait()
    return tuple(tensor for tensor, _ in started)
