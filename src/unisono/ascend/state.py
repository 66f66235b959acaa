"""What an emulated device remembers: which one is current, and its random numbers."""

from __future__ import annotations

import os
import threading

import torch

from ..base import settings

_local = threading.local()
_generators: dict[int, torch.Generator] = {}


def device_count() -> int:
    """How many devices there are: UNISONO_NPUS, as many ranks as torchrun started here if those are more, and of them
    only those that ASCEND_RT_VISIBLE_DEVICES lists."""
    count = max(settings.npus, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is None:
        return count
    listed = [int(part) for part in visible.split(",") if part.strip().isdigit()]
    return sum(1 for number in listed if number < count)


def current_device() -> int:
    """The number of this thread's current device."""
    return getattr(_local, "device", 0)


def set_device(index: int) -> None:
    """Makes a device this thread's current one."""
    if not 0 <= index < device_count():
        raise RuntimeError(
            f"Expected a device from npu:0 to npu:{device_count() - 1}, got npu:{index}\n"
            "  unisono.ascend emulates as many as UNISONO_NPUS and ASCEND_RT_VISIBLE_DEVICES say"
        )
    _local.device = index


def generator(index: int) -> torch.Generator:
    """The random number generator of a device, beside that of the CPU; first seeded as torch's own is."""
    found = _generators.get(index)
    if found is None:
        found = _generators[index] = torch._C.Generator()
        found.manual_seed(torch.initial_seed())
    return found


def index_of(device: object = None) -> int:
    """The number of the device meant by None (the current one), a number, a name or a ``torch.device``."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return current_device() if device < 0 else device
    meant = torch.device(device) if isinstance(device, str) else device
    if not isinstance(meant, torch.device) or meant.type != "npu":
        raise ValueError(f"Expected an npu device, got {device!r}")
    return current_device() if meant.index is None else meant.index
