"""Which transport a call takes: the one place that knows what kinds of groups there are.

It follows from the group and the tensor's device: our own groups have the core, which is the group's communicator; for
others it follows from the name of their backend (and for hccl from what the installed torch_npu offers), which is the
same on all ranks, and is remembered as long as the group lives.
"""

from __future__ import annotations

import sys
import weakref
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from ..group.group import Group
from ..group.names import GroupLike, devices_of, native, resolve
from . import hosts  # noqa: F401  (sets how ranks join, on one host or over several)
from .backend import BackendTransport
from .gloo import GlooTransport
from .lists import AscendTransport, ListsTransport
from .protocol import Transport

_known: weakref.WeakKeyDictionary[ProcessGroup, dict[str, BackendTransport]] = weakref.WeakKeyDictionary()
_ON_CPU = torch.empty(0, device="cpu")


def find(group: GroupLike, tensor: Tensor) -> Transport | None:
    """The transport for this tensor on this group; None if this process is not in the group."""
    # The usual case first: a group of ours, which has no other backend beside it.
    ours = getattr(distributed_c10d._world.default_pg if group is None else group, "unisono_group", None)
    if ours is not None:
        return ours.transport  # type: ignore[no-any-return]
    found = resolve(group)
    return None if found is None else transport_of(found, tensor.device)


def find_for_barrier(group: GroupLike) -> Transport | None:
    """The transport for a call without tensors: the one of CPU tensors, if there are several."""
    return find(group, _ON_CPU)


def transport_of(group: Group | ProcessGroup, device: torch.device) -> Transport:
    """The transport for tensors of this device, made at the first call and forgotten with the group."""
    pg = cast(ProcessGroup, group)
    known = _known.get(pg, {}).get(device.type)
    if known is not None:
        return known
    ours, kinds = native(group), devices_of(group)
    if ours is not None and (device.type == "cpu" or device.type not in kinds):
        return ours.transport  # which says what is wrong with tensors of other devices
    if device.type not in kinds:  # the adapter, or the backend itself, refuses the tensor in its own words
        return transport_of(group, torch.device(kinds[0]))
    made = _known.setdefault(pg, {})[device.type] = _make(pg, device)
    return made


def checks_itself(transport: Transport) -> bool:
    """Whether a transport checks its arguments: ours do, by the core; others take what ``calls/`` lets through."""
    return not isinstance(transport, BackendTransport)


def _make(pg: ProcessGroup, device: torch.device) -> BackendTransport:
    name = pg._get_backend(device).name().lower()
    if name == "gloo" and device.type == "cpu":
        return GlooTransport(pg)
    if name == "hccl":
        native_calls = getattr(sys.modules.get("torch_npu"), "distributed", None)
        if all(hasattr(native_calls, verb) for verb in AscendTransport.CALLS):
            return AscendTransport(pg, native_calls)
    if name in ("nccl", "hccl", "xccl"):
        return ListsTransport(pg)
    return BackendTransport(pg, keeps_input=name in ("mpi", "ucc"))
