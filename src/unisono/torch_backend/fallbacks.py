"""Functional collectives that torch 2.13's C++ sends past a process group written in Python, as kernels of our own.

``_c10d_functional::all_gather_into_tensor_out`` and ``reduce_scatter_tensor_out``, which inductor makes of collectives
into a given buffer, ask the group for its C++ backend, and ``batch_p2p_ops`` for its batches. The kernels here ask the
group itself. They are registered for CPU tensors, which stands before torch's kernel for any device, so they also get
the calls on groups of other backends. Importing the module registers them.

To hand a call on to torch's kernel keeps the interpreter's lock, which gloo's threads take while they hold the lock
that a collective needs to begin. So collectives of other backends are made here too, by the group's methods, which let
go of it; messages, and what torch refuses, are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup, Work

from ..base import ops
from ..base.uncompiled import keep_uncompiled
from ..base.work import Work as UnisonoWork
from ..group import names as groups

_library: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]


def _group(name: Any) -> Any:
    """The process group that an operator was given, by name or, since torch 2.12, as an object."""
    if isinstance(name, str):
        return c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return name if isinstance(name, ProcessGroup) else ProcessGroup.unbox(name)


def _remember(tensor: Tensor, work: Work) -> None:
    """Lets ``wait_tensor(tensor)`` wait for the work; C++ keeps a future alive, but not a Work written in Python."""
    if isinstance(work, UnisonoWork):
        work = c10d._create_work_from_future(work.get_future())  # type: ignore[attr-defined]
    c10d._register_work(tensor, work)


_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")  # as torch's kernels spell them


def _kernel(takes: Callable[..., bool]) -> Callable[[Callable[..., Any]], None]:
    """Registers a kernel for the calls that it ``takes``, and for all on groups of ours; the others are torch's.

    It has the name of its operator, which not every version of torch has.
    """

    def register(ours: Callable[..., Any]) -> None:
        name = ours.__name__
        if not hasattr(torch.ops._c10d_functional, name):
            return
        torchs = torch.library.get_kernel(f"_c10d_functional::{name}", "CPU")

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            # The group is the last argument of all three operators, but for `out`.
            if takes(*args) or groups.adapter_of(_group(args[-1])) is not None:
                return ours(*args, **kwargs)
            return torchs.call_boxed(keys, *args, **kwargs)

        keep_uncompiled(kernel, ours)
        _library.impl(name, kernel, "CPU", with_keyset=True)

    return register


@_kernel(takes=lambda *args: True)
def all_gather_into_tensor_out(input: Tensor, group_size: int, group_name: Any, *, out: Tensor) -> Tensor:
    _remember(out, _group(group_name).all_gather_single(out, input, c10d.AllgatherOptions()))
    return out


@_kernel(takes=lambda input, reduce_op, *args: reduce_op.lower() in _REDUCE_OPS)
def reduce_scatter_tensor_out(
    input: Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: Tensor
) -> Tensor:
    options = c10d.ReduceScatterOptions()
    options.reduceOp = ops.for_torch(*ops.read(reduce_op.lower()))
    _remember(out, _group(group_name).reduce_scatter_single(out, input, options))
    return out


@_kernel(takes=lambda *args: False)
def batch_p2p_ops(
    op_list: list[str], peer_list: list[int], tag_list: list[int], tensors: list[Tensor], group_name: Any
) -> list[Tensor]:
    group, results = _group(group_name), []
    for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        if op == "isend":
            result, work = tensor.new_empty(0), group.send([tensor], peer, tag)
        else:
            result, work = tensor, group.recv([tensor], peer, tag)
        _remember(result, work)
        results.append(result)
    return results
