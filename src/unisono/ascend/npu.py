"""``torch.npu``, which is ``torch_npu.npu`` as well: devices, streams, random numbers and memory figures."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, NamedTuple

import torch

from . import amp as amp
from . import memory, missing, state
from .amp import get_amp_supported_dtype as get_amp_supported_dtype
from .state import current_device as current_device
from .state import device_count as device_count
from .streams import Event as Event
from .streams import Stream as Stream
from .streams import StreamContext as StreamContext
from .streams import current_stream as current_stream
from .streams import default_stream as default_stream
from .streams import set_stream as set_stream
from .streams import stream as stream

__getattr__ = missing.attribute_of("torch.npu")

# -- devices


def is_available() -> bool:
    """Whether there is a device: the emulated ones."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether the device was set up; the emulated one always is."""
    return True


def init() -> None:
    """Sets the device up; the emulated one is."""


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False  # the emulated device lives in ordinary memory, which a child has too


def set_device(device: Any) -> None:
    """Makes a device the current one: a number, ``"npu:1"`` or a ``torch.device``."""
    state.set_device(state.index_of(device))


def synchronize(device: Any = None) -> None:
    """Waits for all work on a device; every operator has run when its call returned."""
    state.index_of(device)


class device(contextlib.ContextDecorator):
    """``with torch.npu.device(1):`` makes a device the current one; None and -1 change nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None or device == -1 else state.index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = state.current_device()
        if self.idx >= 0:
            state.set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        state.set_device(self.prev_idx)


class device_of(device):
    """As :class:`device`, with the device of a tensor; one elsewhere changes nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device if obj.device.type == "npu" else None)


def _exchange_device(index: int) -> int:
    previous = state.current_device()
    if index >= 0:
        state.set_device(index)
    return previous


_maybe_exchange_device = _exchange_device


class _Properties(NamedTuple):
    name: str
    total_memory: int
    major: int | None = None
    minor: int | None = None


def get_device_name(device: Any = None) -> str:
    """The name of a device, which says that it is emulated."""
    _known(device)
    return "Ascend (emulated on CPU by unisono)"


def get_device_properties(device: Any = None) -> _Properties:
    """Name and memory of a device; the memory is the machine's."""
    return _Properties(get_device_name(device), memory.host_memory()[1])


def get_device_capability(device: Any = None) -> None:
    """None, as on an Ascend device."""
    _known(device)


def can_device_access_peer(device_id: Any, peer_device_id: Any) -> bool:
    """Whether one device reads another's memory: they share the machine's."""
    return _known(device_id) >= 0 and _known(peer_device_id) >= 0


def is_bf16_supported() -> bool:
    """Whether bfloat16 works: on the CPU it does."""
    return True


def _known(device: Any) -> int:
    index = state.index_of(device)
    if not 0 <= index < device_count():
        raise AssertionError(f"Invalid device id: expected 0 to {device_count() - 1}, got {index}")
    return index


# -- random numbers


def manual_seed(seed: int) -> None:
    """Seeds the current device."""
    state.generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds all devices; ``torch.manual_seed`` does so too."""
    for index in range(device_count()):
        state.generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seeds the current device with a number nobody knows."""
    state.generator(current_device()).seed()


def seed_all() -> None:
    """Seeds all devices with one number nobody knows."""
    manual_seed_all(torch._C.Generator().seed())


def initial_seed() -> int:
    """The current device's seed."""
    return state.generator(current_device()).initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The state of a device's generator, as a tensor on the CPU."""
    return state.generator(state.index_of(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Puts a device's generator into a state that get_rng_state gave."""
    state.generator(state.index_of(device)).set_state(new_state.clone(memory_format=torch.contiguous_format))


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Any) -> None:
    """Puts all devices' generators into states that get_rng_state_all gave."""
    for index, new_state in enumerate(new_states):
        set_rng_state(new_state, index)


# -- memory; there is no cache, so what is reserved is what is allocated


def memory_allocated(device: Any = None) -> int:
    """Bytes of all tensors on a device."""
    return memory.usage(state.index_of(device)).now


def max_memory_allocated(device: Any = None) -> int:
    """Most bytes at one time since the start or the last reset."""
    return memory.usage(state.index_of(device)).peak


memory_reserved = memory_cached = memory_allocated
max_memory_reserved = max_memory_cached = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Starts the search for the most bytes anew."""
    memory.usage(state.index_of(device)).reset_peak()


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def memory_stats(device: Any = None) -> dict[str, int]:
    """The figures above by torch's names for them."""
    use = memory.usage(state.index_of(device))
    figures = {"current": use.now, "peak": use.peak, "allocated": use.made, "freed": use.gone}
    return {f"{kind}_bytes.all.{name}": value for kind in ("allocated", "reserved") for name, value in figures.items()}


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes, of the machine."""
    _known(device)
    return memory.host_memory()


def empty_cache() -> None:
    """Gives cached memory back; there is no cache."""


def ipc_collect() -> None:
    """Frees memory that other processes have let go of; none is shared."""


# -- settings of the real device that do not change results


class _Settings:
    """A group of settings that can be set and read, and warns that they change nothing."""

    def __init__(self, name: str, **values: Any) -> None:
        object.__setattr__(self, "_name", name)
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise missing.NotEmulatedError(missing.explain(f"{self._name}.{name}"))
        missing.without_effect(f"{self._name}.{name}", "it is about Ascend's kernels")
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise missing.NotEmulatedError(missing.explain(f"{self._name}.{name}"))


config = _Settings("torch.npu.config", allow_internal_format=False)
matmul = _Settings("torch.npu.matmul", allow_hf32=False)
conv = _Settings("torch.npu.conv", allow_hf32=False)


def set_compile_mode(jit_compile: bool = False) -> None:
    """Whether Ascend compiles its kernels at run time."""
    missing.without_effect("torch.npu.set_compile_mode", "its kernels are the CPU's")


def is_jit_compile_false() -> bool:
    """Whether kernels come compiled: the CPU's do."""
    return True


def set_option(option: dict[str, Any]) -> None:
    """Options of Ascend's compiler."""
    if not isinstance(option, dict):
        raise TypeError(f"npu option must be a dict, got {type(option).__name__}")
    missing.without_effect("torch.npu.set_option", "its kernels are the CPU's")


# -- mixed precision


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("npu")


def set_autocast_enabled(enabled: bool) -> None:
    torch.set_autocast_enabled("npu", enabled)


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("npu")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("npu", dtype)


module = sys.modules[__name__]
