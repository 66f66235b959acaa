"""The emulated device's memory: ordinary host memory, seen through tensors that are truly on ``npu:0``.

An npu tensor here is a plain ``torch.Tensor`` of torch's renamed private-use device. It is made from a CPU tensor by
handing the same bytes over through DLPack, with the device written into the capsule changed on the way; nothing is
copied, and torch's own code keeps the bytes alive. :func:`as_cpu` goes the other way. How many bytes are in use per
device is counted by watching the storages, for ``torch.npu.memory_allocated``.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import torch

Tensor = torch.Tensor

_CPU_DEVICE = 1  # DLPack's numbers of device types: kDLCPU,
_EXTENSION_DEVICE = 12  # and kDLExtDev, which torch reads as its private-use device
_DEVICE_AT = ctypes.sizeof(ctypes.c_void_p)  # where a DLTensor has its device: behind the pointer to the data

_to_capsule: Any = torch._C._to_dlpack
_from_capsule: Any = torch._C._from_dlpack
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_word_at = ctypes.c_int64.from_address


def as_npu(cpu: Tensor, index: int) -> Tensor:
    """A tensor on ``npu:index`` with the bytes, sizes and strides of a CPU tensor; no autograd between the two."""
    capsule = _to_capsule(cpu)
    _word_at(_pointer(capsule, b"dltensor") + _DEVICE_AT).value = _EXTENSION_DEVICE | index << 32
    npu: Tensor = _from_capsule(capsule)
    _count(npu, index)
    return npu


def as_cpu(npu: Tensor) -> Tensor:
    """A CPU tensor with the bytes, sizes and strides of an npu tensor; no autograd between the two."""
    capsule = _to_capsule(npu)
    _word_at(_pointer(capsule, b"dltensor") + _DEVICE_AT).value = _CPU_DEVICE
    cpu: Tensor = _from_capsule(capsule)
    if npu.is_conj():
        cpu = torch._conj(cpu)
    return torch._neg_view(cpu) if npu.is_neg() else cpu


def storage_as_cpu(storage: torch.UntypedStorage) -> Tensor:
    """The bytes of an npu storage as a CPU tensor, which keeps the storage alive."""
    if storage.nbytes() == 0:
        return torch.empty(0, dtype=torch.uint8)
    held: Any = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    held.storage = storage
    return torch.frombuffer(held, dtype=torch.uint8)


class Usage:
    """Bytes in use on one device, now and at most."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.made = 0  # all allocations ever
        self.gone = 0  # all of them that were freed

    def reset_peak(self) -> None:
        self.peak = self.now


_usage: dict[int, Usage] = {}
_watched: dict[Any, tuple[Usage, int]] = {}


def usage(index: int) -> Usage:
    """What is in use on ``npu:index``."""
    found = _usage.get(index)
    if found is None:
        found = _usage[index] = Usage()
    return found


def _count(npu: Tensor, index: int) -> None:
    # torch keeps a storage's Python object as long as the storage, so its end is the end of the memory.
    storage = npu.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes:
        use = usage(index)
        _watched[weakref.ref(storage, _freed)] = use, nbytes
        use.made += nbytes
        use.now += nbytes
        if use.now > use.peak:
            use.peak = use.now


def _freed(storage: Any) -> None:
    use, nbytes = _watched.pop(storage)
    use.now -= nbytes
    use.gone += nbytes


def host_memory() -> tuple[int, int]:
    """Free and total bytes of the machine, which are the emulated device's too."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
