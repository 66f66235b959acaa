"""The torch.distributed backend "hccl": a unisono group for npu tensors, which reach it as the CPU tensors they share
their bytes with. ``"cpu:gloo,npu:hccl"`` makes one group that takes both kinds of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ..base.work import FINISHED, Work
from ..group.group import Group
from ..torch_backend import registration as torch_backend
from ..torch_backend.arguments import settled
from ..torch_backend.registration import ProcessGroupUnisono
from . import missing
from .memory import as_cpu

Tensor = torch.Tensor


class Options:
    """``ProcessGroupHCCL.Options()``, for the argument ``pg_options``: how HCCL uses its buffers and streams."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.hccl_config: dict[str, Any] = {}
        self.op_timeout = timedelta(minutes=30)
        self.global_ranks_in_group: list[int] = []
        self.group_id = ""


class ProcessGroupHCCL(ProcessGroupUnisono):
    """A group of backend "hccl"; its ``unisono_group`` does the work."""

    Options = Options

    def __init__(self, group: Group, store: Store | None = None, takes_cpu: bool = False) -> None:
        super().__init__(group, store)
        self._takes_cpu = takes_cpu
        self._rebuilt = 0

    def name(self) -> str:
        return "hccl"

    getBackendName = _get_backend_name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in (["cpu", "npu"] if self._takes_cpu else ["npu"])]

    def _get_backend(self, device: torch.device) -> ProcessGroupHCCL:
        kind = torch.device(device).type
        if kind != "npu" and not (kind == "cpu" and self._takes_cpu):
            raise RuntimeError(_no_backend(kind))
        return self

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """The communicator's name, which the fused operators take; ``rank`` is this process's, in the group or global.

        torch_npu makes the communicator here unless ``init_comm`` is False; ours is there from the start.
        """
        group = self.unisono_group
        if rank not in (group.rank, group.ranks[group.rank]):
            raise ValueError(f"argument 'rank' must be this process's rank, {group.rank}, got {rank}")
        return self.get_comm_name(group.rank)

    def split_group(self, *args: Any, **kwargs: Any) -> ProcessGroupUnisono | None:
        child = super().split_group(*args, **kwargs)
        return None if child is None else ProcessGroupHCCL(child.unisono_group, self._store, self._takes_cpu)

    def rebuild(self) -> None:
        """Leaves the group and meets the others in a new one, also after an error; all its ranks call this."""
        old = self.unisono_group
        if self._store is None:
            raise RuntimeError("Expected a group of init_process_group or new_group, got one that was split off")
        self._rebuilt += 1
        # With their numbers: groups that were split off beside one another have one name.
        name = f"{old.name}#{self._rebuilt}"
        group = Group.from_store(self._store, old.rank, old.size, ranks=old.ranks, name=name, timeout_s=old.timeout_s)
        old.close()
        self.unisono_group = group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise missing.NotEmulatedError(missing.explain(f"torch_npu's ProcessGroupHCCL.{name}"))

    # -- how a call is made: the CPU tensors go down, the caller's own tensors are what futures hold

    def _run(
        self, verb: str, arguments: tuple[Any, ...], opts: Any, outputs: Any = None, name: str | None = None
    ) -> Work:
        lower = _Lowering(self._takes_cpu)
        outputs = list(arguments[:1]) if outputs is None else outputs
        return lower.back(super()._run(verb, lower(arguments), opts, lower(outputs), name), outputs)

    def _run_all(self, verb: str, name: str, calls: Sequence[tuple[Any, ...]], opts: Any, outputs: Any) -> Work:
        lower = _Lowering(self._takes_cpu)
        return lower.back(super()._run_all(verb, name, lower(calls), opts, lower(outputs)), outputs)

    def _message(
        self, verb: str, name: str, tensor: Tensor, peer: int | None, tag: int, caller: FrameType | None
    ) -> Work:
        lower = _Lowering(self._takes_cpu)
        return lower.back(super()._message(verb, name, lower(tensor), peer, tag, caller), [tensor])


class _Lowering:
    """The CPU tensors that the tensors of one call share their bytes with; the same one for the same tensor."""

    def __init__(self, takes_cpu: bool) -> None:
        self._takes_cpu = takes_cpu
        self._met: dict[int, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._met[id(value)] if id(value) in self._met else self._lower(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self(part) for part in value)
        return value

    def _lower(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "npu" and not (tensor.is_cpu and self._takes_cpu):
            raise RuntimeError(_no_backend(tensor.device.type))
        known: Tensor = settled(tensor)
        cpu = self._met[id(tensor)] = as_cpu(known) if tensor.device.type == "npu" else known
        return cpu

    def back(self, work: Work, outputs: Any) -> Work:
        """The call, whose results are the caller's own tensors."""
        if work is not FINISHED:
            work._outputs = outputs
        return work


def _no_backend(kind: str) -> str:
    return f"No backend type associated with device type {kind}: this group is for npu"


def create(opts: Any, backend_options: Any = None) -> ProcessGroupHCCL:
    """Makes the group that init_process_group and new_group ask for."""
    if getattr(backend_options, "hccl_config", None):
        missing.without_effect("ProcessGroupHCCL.Options.hccl_config", "it is about HCCL's buffers and queues")
    others = {d: b for d, b in torch_backend.wanted_backends().items() if (d, b) != ("npu", "hccl")}
    unknown = [f'"{device}:{backend}"' for device, backend in others.items() if device != "cpu"]
    if unknown:
        raise RuntimeError(f"unisono.ascend cannot combine hccl with {', '.join(unknown)} in one group")
    made = torch_backend.join(opts)
    return ProcessGroupHCCL(made, opts.store, takes_cpu="cpu" in others)


def register() -> None:
    """Makes "hccl" known to torch.distributed, once per process."""
    if "HCCL" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("hccl", create, extended_api=True, devices=["npu"])
    for name, value in (
        ("is_hccl_available", is_hccl_available),
        ("reinit_process_group", reinit_process_group),
        ("ProcessGroupHCCL", ProcessGroupHCCL),
    ):
        setattr(dist, name, value)


def is_hccl_available() -> bool:
    """Whether the backend "hccl" is there."""
    return "HCCL" in dist.Backend._plugins


def reinit_process_group(group: Any = None, rebuild_link: bool = True) -> Any:
    """Makes a group usable again, by meeting its other ranks anew, and returns it; all of them call it.

    ``rebuild_link=False`` keeps the connections, so the group must be sound: ranks that find it is not get its error.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ProcessGroupHCCL):
        raise RuntimeError(f"Expected a group of backend hccl, got {found!r}")
    if not rebuild_link:
        found.unisono_group.barrier()
        return None
    found.rebuild()
    return found
