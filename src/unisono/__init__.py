"""unisono: collective communication for PyTorch between processes of one host, through shared memory.

    group = unisono.Group.from_env()                    # under torchrun
    group.all_reduce(tensor)                            # in place, the same bits on every rank
    group.all_gather(output, mine, counts=[2, 3])       # shards of different sizes, no padding

Tensors from :func:`empty`, :func:`zeros` or :func:`to_shared_` are read and written where they are; others go through a
small stage. See :class:`Group` for all verbs.
"""

from __future__ import annotations

import torch as _torch

from . import _core
from .base import errors, settings
from .base.handle import Handle as _Handle
from .version import __version__ as __version__

_core.setup(
    tensor=_torch.Tensor,
    reduce_op=_torch.distributed.ReduceOp,
    handle=_Handle,
    make_error=errors.make_error,
    make_argument_error=errors.make_argument_error,
    call_site=errors.call_site,
    heap_max=settings.heap_max,
    spin_us=settings.spin_us,
    fork_copy_max=settings.fork_copy_max,
)
if settings.isa and not _core.set_isa(settings.isa):
    raise ValueError(f"UNISONO_ISA={settings.isa}: this CPU does not have it; leave it empty for the best there is")

from . import comm_func  # noqa: E402
from .base.errors import (  # noqa: E402
    AbortedError,
    ClosedError,
    CollectiveTimeoutError,
    ForkedError,
    HeapMemoryError,
    MismatchError,
    PeerLostError,
    SystemCallError,
    UnisonoError,
)
from .base.handle import Handle  # noqa: E402
from .base.tensors import empty, empty_like, is_shared, to_shared_, zeros  # noqa: E402
from .fused.matmul import (  # noqa: E402
    PreparedWeight,
    all_gather_grouped_matmul,
    all_gather_matmul,
    grouped_matmul_all_reduce,
    grouped_matmul_reduce_scatter,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from .group.group import Group  # noqa: E402
from .group.shared_gather import SharedGather  # noqa: E402
from .torch_backend.groups import monitored_barrier, split_group  # noqa: E402
from .torch_backend.registration import ProcessGroupUnisono  # noqa: E402
from .uneven import operators as _uneven_ops  # noqa: E402, F401
from .uneven.collectives import all_gather_into_tensor_uneven, all_to_all_vc, reduce_scatter_tensor_uneven  # noqa: E402

__all__ = [
    "AbortedError",
    "ClosedError",
    "CollectiveTimeoutError",
    "ForkedError",
    "Group",
    "Handle",
    "HeapMemoryError",
    "MismatchError",
    "PeerLostError",
    "PreparedWeight",
    "ProcessGroupUnisono",
    "SharedGather",
    "SystemCallError",
    "UnisonoError",
    "all_gather_grouped_matmul",
    "all_gather_into_tensor_uneven",
    "all_gather_matmul",
    "all_to_all_vc",
    "comm_func",
    "empty",
    "empty_like",
    "grouped_matmul_all_reduce",
    "grouped_matmul_reduce_scatter",
    "is_shared",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "monitored_barrier",
    "reduce_scatter_tensor_uneven",
    "split_group",
    "to_shared_",
    "zeros",
]
