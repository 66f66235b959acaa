"""The torch.distributed backend "unisono": what init_process_group("unisono") and new_group make, and its registration.

One body, :class:`ProcessGroupAdapter` (``adapter.py``), serves both of torch's bases: ProcessGroup, which every version
lets Python inherit from and calls directly, and since torch 2.14 Backend, which C++ code asks the group for and which
alone can be one of several.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from ..base.uncompiled import keep_uncompiled
from ..base.work import Work
from ..group import names as groups
from ..group.group import Group
from . import fallbacks  # noqa: F401  (registers its kernels)
from .adapter import ProcessGroupAdapter

_CPU = torch.device("cpu")


if groups.PYTHON_BACKENDS:

    class BackendUnisono(ProcessGroupAdapter, Backend):
        """Unisono as the CPU backend inside of a C++ process group, which may have others for other devices."""

        supports_splitting = False

        def __init__(self, group: Group, store: Store | None = None) -> None:
            Backend.__init__(self, group.rank, group.size)
            self._begin(group, store)

        def start_coalescing(self) -> None:
            self._start_coalescing(_CPU)

        def end_coalescing(self) -> Work:
            return self._end_coalescing(_CPU)

    keep_uncompiled(BackendUnisono)


class ProcessGroupUnisono(ProcessGroupAdapter, dist.ProcessGroup):
    """A torch process group on a unisono :class:`Group`, its ``unisono_group``; see :class:`ProcessGroupAdapter`."""

    def __init__(self, group: Group, store: Store | None = None) -> None:
        dist.ProcessGroup.__init__(self, group.rank, group.size)  # type: ignore[call-arg]
        self._begin(group, store)
        if groups.PYTHON_BACKENDS:
            # C++ code that asks for the backend inside finds one, which does the same.
            self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            self._register_backend(_CPU, dist.ProcessGroup.BackendType.CUSTOM, BackendUnisono(group, store))


def create(opts: Any, backend_options: Any = None) -> ProcessGroupAdapter:
    """Makes the group that init_process_group and new_group ask for, or the CPU backend of one with other devices."""
    others = ", ".join(f'"{device}:{name}"' for device, name in wanted_backends().items() if name != "unisono")
    if others and not groups.PYTHON_BACKENDS:
        raise RuntimeError(
            f"torch {torch.__version__} cannot combine unisono with {others} in one group: it would silently drop the "
            'latter.\n  Make two groups: init_process_group("unisono") for CPU tensors, and new_group(backend=…) for '
            "the others"
        )
    group = join(opts)
    return BackendUnisono(group, opts.store) if others else ProcessGroupUnisono(group, opts.store)


def join(opts: Any) -> Group:
    """Meets the other ranks of a group that torch is making."""
    return Group.from_store(
        opts.store,
        opts.group_rank,
        opts.group_size,
        ranks=list(opts.global_ranks_in_group) or None,  # empty for the default group
        name=opts.group_id or "0",
        timeout_s=opts.timeout.total_seconds(),
    )


def wanted_backends() -> dict[str, str]:
    """By device, the backends of the group that torch is making.

    torch tells a backend nothing of the others, and puts a process group written in Python in the place of all of them.
    """
    config = torch_is_making().get("backend_config")
    return {} if config is None else {device: str(name) for device, name in config.get_device_backend_map().items()}


def torch_is_making() -> dict[str, Any]:
    """What torch has said of the group that it is making: the variables of its own function, empty if it makes none."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "_new_process_group_helper":
        if frame.f_back is None:
            return {}
        frame = frame.f_back
    return frame.f_locals


ProcessGroupAdapter.group_type = ProcessGroupUnisono
dist.Backend.register_backend("unisono", create, extended_api=True, devices=["cpu"])
