"""MindSpore's names for communication, on torch tensors: ``mindspore.communication``, ``ops.communication`` and
``mint.distributed``. The first two leave their input alone and return results; mint writes into its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import comm_func
from ..base import ops
from ..calls.ops import OPS
from ..group import names as groups
from ..uneven import collectives as uneven
from .crossing import on_host

HCCL_WORLD_COMM_GROUP = "hccl_world_group"
NCCL_WORLD_COMM_GROUP = "nccl_world_group"
MCCL_WORLD_COMM_GROUP = "mccl_world_group"

#: Names of comm_func that take and return tensors; here also on npu.
FUNCTIONS = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_uneven",
    "all_reduce",
    "all_to_all_single_with_output_shape",
    "all_to_all_v_c",
    "all_to_all_with_output_shape",
    "barrier",
    "broadcast",
    "gather_into_tensor",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_uneven",
    "scatter_tensor",
    "send",
)


def functions() -> dict[str, Callable[..., Any]]:
    """The functions of ``mindspore.communication.comm_func`` by name."""
    made: dict[str, Callable[..., Any]] = {name: on_host(getattr(comm_func, name)) for name in FUNCTIONS}
    made["P2POp"] = comm_func.P2POp
    made["batch_isend_irecv"] = batch_isend_irecv
    return made


def batch_isend_irecv(p2p_op_list: list[comm_func.P2POp]) -> tuple[torch.Tensor, ...]:
    """Sends and receives what the list says, all at once; see ``unisono.comm_func.batch_isend_irecv``."""
    if not isinstance(p2p_op_list, list) or not any(_is_npu(getattr(p, "tensor", None)) for p in p2p_op_list):
        return comm_func.batch_isend_irecv(p2p_op_list)

    def batch(*tensors: Any) -> tuple[torch.Tensor, ...]:
        same = [
            comm_func.P2POp(p.op, tensor, p.peer, p.group, p.tag, recv_dtype=p.recv_dtype)
            for p, tensor in zip(p2p_op_list, tensors, strict=True)
        ]
        return comm_func.batch_isend_irecv(same)

    return on_host(batch)(*[p.tensor for p in p2p_op_list])


def _is_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


class ReduceOp:
    """``mindspore.ops.ReduceOp``."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PROD = "prod"


def release() -> None:
    """Gives the default group and all others up."""
    if dist.is_initialized():
        dist.destroy_process_group()


# -- mint.distributed: torch.distributed's functions, with groups by name


def _named(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """torch's function, whose ``group`` may be a name and whose ``op`` a string."""

    parameters = list(inspect.signature(function).parameters)
    places = {parameters.index(key) for key in ("group", "op") if key in parameters}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_group(a) if i in places and isinstance(a, str) else a for i, a in enumerate(args))
        for key in ("group", "op"):
            if isinstance(kwargs.get(key), str):
                kwargs[key] = _group(kwargs[key])
        return function(*args, **kwargs)

    call.__name__ = name or function.__name__
    return call


def _group(word: str) -> Any:
    if word in OPS:
        return ops.for_torch(*ops.read(word))
    found = groups.resolve(word)
    return dist.GroupMember.NON_GROUP_MEMBER if found is None else found


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Makes the default group, on unisono unless told."""
    dist.init_process_group(
        "unisono" if backend in (None, "mccl") else backend, init_method, timeout, world_size, rank, store
    )


def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, *_: Any, **__: Any) -> str:
    """Makes a group of some ranks and returns its name; all ranks call it."""
    made = dist.new_group(ranks, timeout, backend)
    if made is dist.GroupMember.NON_GROUP_MEMBER:
        return ""
    groups.remember(made.group_name, made)
    return str(made.group_name)


class P2POp:
    """One message of a batch: ``op`` is this module's ``isend`` or ``irecv``, or the word."""

    def __new__(cls, op: Any, tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
        word = op if isinstance(op, str) else getattr(op, "__name__", "")
        if word not in ("isend", "irecv"):
            raise ValueError(f"argument 'op' must be isend or irecv, got {op!r}")
        return dist.P2POp(getattr(dist, word), tensor, peer, _group(group) if isinstance(group, str) else group, tag)


def mint_functions() -> dict[str, Any]:
    """The functions of ``mindspore.mint.distributed`` by name."""
    plain = """
        all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast
        broadcast_object_list destroy_process_group gather gather_object get_backend get_global_rank get_group_rank
        get_process_group_ranks get_rank get_world_size irecv isend recv reduce reduce_scatter reduce_scatter_tensor
        scatter scatter_object_list send
    """
    made: dict[str, Any] = {name: _named(getattr(dist, name)) for name in plain.split()}
    for name in ("all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven"):
        made[name] = on_host(_named(getattr(uneven, name)))
    for name in ("is_available", "is_initialized", "batch_isend_irecv"):
        made[name] = getattr(dist, name)
    made.update(init_process_group=init_process_group, new_group=new_group, P2POp=P2POp)
    return made
