"""Functional collectives: the input is left alone, the result is returned, differentiable and ready for torch.compile::

    from unisono import comm_func

    total, _ = comm_func.all_reduce(tensor)                      # on the default group
    total, handle = comm_func.all_reduce(tensor, "max", group="tp", async_op=True)
    handle.wait()                                                # or: await handle

The names and arguments are those of MindSpore's ``communication.comm_func``, on torch tensors. ``op`` is one of "sum",
"prod", "min", "max", "avg" or a torch ReduceOp. ``group`` is None for the default group, which is looked up at the
call, a name, a torch ProcessGroup or a :class:`unisono.Group`. ``src``, ``dst`` and ``peer`` are global ranks.

On unisono groups results lie in shared memory, so a chain of calls copies nothing on the way; on other backends the
calls go through torch.distributed. In code compiled by torch.compile a call with ``async_op=True`` runs to its end, and
its handle is complete.
"""

from __future__ import annotations

from ..comm_func import gradients  # noqa: F401  (registers them)
from .collectives import (
    all_gather_into_tensor,
    all_gather_into_tensor_uneven,
    all_reduce,
    barrier,
    broadcast,
    gather_into_tensor,
    reduce,
    reduce_scatter_tensor,
    reduce_scatter_tensor_uneven,
    scatter_tensor,
)
from .exchanges import all_to_all_single_with_output_shape, all_to_all_v_c, all_to_all_with_output_shape
from .members import (
    GlobalComm,
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
)
from .messages import P2POp, batch_isend_irecv, irecv, isend, recv, send

__all__ = [
    "GlobalComm",
    "P2POp",
    "all_gather_into_tensor",
    "all_gather_into_tensor_uneven",
    "all_reduce",
    "all_to_all_single_with_output_shape",
    "all_to_all_v_c",
    "all_to_all_with_output_shape",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "create_group",
    "destroy_group",
    "gather_into_tensor",
    "get_group_rank_from_world_rank",
    "get_group_size",
    "get_local_rank",
    "get_local_rank_size",
    "get_process_group_ranks",
    "get_rank",
    "get_world_rank_from_group_rank",
    "init",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_uneven",
    "scatter_tensor",
    "send",
]
