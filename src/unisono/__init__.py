"""unisono: collective communication for PyTorch on CPUs, through shared memory on a host and by gloo between hosts::

    group = unisono.Group.from_env()                    # under torchrun
    group.all_reduce(tensor)                            # in place, the same bits on every rank
    group.all_gather(output, mine, counts=[2, 3])       # shards of different sizes, no padding

Tensors from :func:`empty`, :func:`zeros` or :func:`to_shared_` are read and written where they are; others go through a
small stage. See :class:`Group` for all verbs.
"""

from __future__ import annotations

from importlib import import_module as _import_module

import torch as _torch

from . import _core
from .base import errors, log, settings
from .base.handle import Finished as _Finished
from .base.handle import Handle as _Handle
from .version import __version__ as __version__

_core.setup(
    tensor=_torch.Tensor,
    reduce_op=_torch.distributed.ReduceOp,
    handle=_Handle,
    finished=_Finished,
    make_error=errors.make_error,
    make_argument_error=errors.make_argument_error,
    warn=log.warn,
    library_folders=log.LIBRARY_FOLDERS,
    trace_folder=settings.trace_dir,
    trace_signal=settings.trace_signal,
    heap_max=settings.heap_max,
    spin_us=settings.spin_us,
    fork_copy_max=settings.fork_copy_max,
)
if settings.single_copy >= 0:
    _start = max(settings.single_copy, 4 << 10) if settings.single_copy else 0
    _core.choose_tuning((_start, 0), (_start, 0), 256 << 10, 4 << 20)
if settings.isa and not _core.set_isa(settings.isa):
    raise ValueError(f"UNISONO_ISA={settings.isa}: this CPU does not have it; leave it empty for the best there is")

from . import comm_func  # noqa: E402
from .base.errors import (  # noqa: E402
    AbortedError,
    ClosedError,
    CollectiveTimeoutError,
    DeadlockError,
    ForkedError,
    HeapMemoryError,
    MismatchError,
    PeerLostError,
    SystemCallError,
    UnisonoError,
)
from .base.handle import Handle  # noqa: E402
from .base.kept import Inherited, Kept, keep  # noqa: E402
from .base.sharing import Sharing, share_new_tensors, trim  # noqa: E402
from .base.sharing import share_by_environment as _share_by_environment  # noqa: E402
from .base.tensors import empty, empty_like, full, is_shared, ones, tensor, to_shared_, zeros  # noqa: E402
from .fused.layers import tensor_parallel  # noqa: E402
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
from .torch_backend.serving import serve_gloo  # noqa: E402
from .torch_backend.shrink import shrink_group  # noqa: E402
from .uneven import operators as _uneven_ops  # noqa: E402, F401
from .uneven.collectives import all_gather_into_tensor_uneven, all_to_all_vc, reduce_scatter_tensor_uneven  # noqa: E402

__all__ = [
    "AbortedError",
    "ClosedError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "ForkedError",
    "Group",
    "Handle",
    "HeapMemoryError",
    "Inherited",
    "Kept",
    "MismatchError",
    "PeerLostError",
    "PreparedWeight",
    "ProcessGroupUnisono",
    "SharedGather",
    "Sharing",
    "SystemCallError",
    "UnisonoError",
    "all_gather_grouped_matmul",
    "all_gather_into_tensor_uneven",
    "all_gather_matmul",
    "all_to_all_vc",
    "comm_func",
    "empty",
    "empty_like",
    "fsdp",
    "full",
    "grouped_matmul_all_reduce",
    "grouped_matmul_reduce_scatter",
    "is_shared",
    "keep",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "monitored_barrier",
    "ones",
    "reduce_scatter_tensor_uneven",
    "serve_gloo",
    "share_new_tensors",
    "shrink_group",
    "split_group",
    "tensor",
    "tensor_parallel",
    "testing",
    "to_shared_",
    "trim",
    "zeros",
]

if settings.share:
    _share_by_environment()
if settings.serve_gloo and _torch.distributed.is_gloo_available():
    serve_gloo()


def __getattr__(name: str) -> object:
    if name in ("fsdp", "testing"):  # imported at first use: FSDP takes long, and few programs start ranks themselves
        return _import_module(f"unisono.{name}")
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
