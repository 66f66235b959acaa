"""What torch itself has to be told of the device: its name, and the few places that cannot know it otherwise.

torch's support for devices written in Python knows one device, number 0, and has no hooks for storages, generators and
pinned memory. Each function here mends one of these, and only for npu; torch's behaviour elsewhere stays as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device, backend_registration

from . import amp, dispatch, memory, state


def adapt_torch() -> None:
    """Makes ``npu`` a device of torch, once per process."""
    from . import npu

    if getattr(torch, "npu", None) is npu.module:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(
            f"torch has one private device type, and another package has named it {name!r}: "
            "unisono.ascend cannot emulate npu in this process"
        )
    backend_registration._setup_privateuseone_for_python_backend("npu", npu.module)
    sys.modules["torch.npu.amp"] = amp
    dispatch.register()
    amp.register()
    _name_current_device()
    _make_storages()
    _make_generators()
    _pin_memory()
    _run_backward_here()


def _name_current_device() -> None:
    """torch takes "npu" without a number for npu:0; here it is the current device."""
    torch.overrides.get_ignored_functions()  # these and the next look the originals up, and remember them
    _device._device_constructors()
    for owner, name, place in (
        (torch.Tensor, "to", 1),
        (torch, "tensor", None),
        (torch, "as_tensor", None),
        (torch, "asarray", None),
    ):
        setattr(owner, name, _with_number(getattr(owner, name), place))


def _with_number(function: Callable[..., Any], place: int | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _numbered(kwargs["device"])
        elif place is not None and len(args) > place:
            args = (*args[:place], _numbered(args[place]), *args[place + 1 :])
        return function(*args, **kwargs)

    return call


def _numbered(device: Any) -> Any:
    if isinstance(device, str):
        unnumbered = device == "npu"
    else:
        unnumbered = isinstance(device, torch.device) and device.type == "npu" and device.index is None
    return torch.device("npu", state.current_device()) if unnumbered else device


def _make_storages() -> None:
    """torch has no allocator for npu: a storage is made through a tensor."""
    plain = torch._C.StorageBase.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "npu":
            size = args[0] if args else 0
            values = (
                torch.empty(size, dtype=torch.uint8) if isinstance(size, int) else torch.tensor(size, dtype=torch.uint8)
            )
            return memory.as_npu(values, state.index_of(device)).untyped_storage()
        if device is not None:
            kwargs["device"] = device
        return plain(cls, *args, **kwargs)

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "npu":
            return plain_resize(self, size)
        # Sharded models free a parameter's memory by size 0 and ask for the same size again. The memory stays.
        if size not in (0, self.nbytes()):
            raise NotImplementedError(
                f"UntypedStorage.resize_ of an npu storage from {self.nbytes()} to {size} bytes is not emulated by "
                "unisono.ascend: make a new tensor"
            )
        return self

    plain_resize = torch._C.StorageBase.resize_  # type: ignore[attr-defined]
    torch.UntypedStorage.__new__ = new
    torch.UntypedStorage.resize_ = resize
    torch.UntypedStorage.npu = lambda self, device=None, non_blocking=False: _move(self, device)  # type: ignore[attr-defined]
    torch.UntypedStorage.is_npu = property(lambda self: self.device.type == "npu")  # type: ignore[attr-defined]


def _move(storage: torch.UntypedStorage, device: Any) -> torch.UntypedStorage:
    meant = torch.device("npu", state.index_of(device))
    if storage.device == meant:
        return storage
    return torch.UntypedStorage(storage.nbytes(), device=meant).copy_(storage)


def _make_generators() -> None:
    """``torch.Generator("npu")``: a generator of the CPU, which is what npu operators here use."""
    plain = torch._C.Generator

    class Kind(type(plain)):  # type: ignore[misc]
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, plain)

    class Generator(plain, metaclass=Kind):  # type: ignore[misc, valid-type]
        """As ``torch.Generator``, also for npu."""

        def __new__(cls, device: Any = "cpu") -> Any:
            meant = torch.device(device)
            if meant.type != "npu":
                return plain(device)
            made = super().__new__(cls)
            made._npu = torch.device("npu", state.index_of(meant))
            return made

        def __init__(self, device: Any = "cpu") -> None:
            pass

        @property
        def device(self) -> torch.device:
            return self._npu  # type: ignore[no-any-return]

    Generator.__module__ = "torch"
    torch.Generator = Generator  # type: ignore[misc]


def _pin_memory() -> None:
    """Pinned memory is memory the device reads directly; the emulated one reads all of the host's."""
    plain = torch.Tensor.is_pinned

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if not self.is_cpu:
            raise RuntimeError(f"cannot pin {self.type()!r} only dense CPU tensors can be pinned")
        if self.is_pinned():
            return self
        pinned = self.clone()
        pinned._pinned = True  # type: ignore[attr-defined]
        return pinned

    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        return getattr(self, "_pinned", False) or (self.device.type != "npu" and plain(self))

    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment]
    torch.Tensor.is_pinned = is_pinned  # type: ignore[assignment]


def _run_backward_here() -> None:
    """torch keeps one thread for backward per device, of which it knows only npu:0; the caller's thread serves all."""
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
