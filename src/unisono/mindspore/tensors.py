"""MindSpore's tensors as torch's and back, on the same memory.

DLPack carries every dtype but bool and complex, which MindSpore keeps to NumPy. Both wait until MindSpore has computed
the tensor, and keep its memory for as long as the other side looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import torch
from mindspore.utils import dlpack
from torch.utils.dlpack import from_dlpack

from ..base.handle import Handle

_BY_NUMPY = {mindspore.bool_, mindspore.complex64, mindspore.complex128}


def to_torch(tensor: Any) -> torch.Tensor:
    """A MindSpore tensor's memory as a torch tensor."""
    if tensor.dtype in _BY_NUMPY:
        return torch.from_numpy(tensor.asnumpy())
    return from_dlpack(dlpack.to_dlpack(tensor))


def from_torch(tensor: torch.Tensor) -> Any:
    """A torch tensor's memory as a MindSpore tensor."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bool or tensor.is_complex():
        return mindspore.Tensor.from_numpy(tensor.numpy())
    return dlpack.from_dlpack(torch._C._to_dlpack(tensor))


def replaced(value: Any, kinds: Any, change: Callable[[Any], Any]) -> Any:
    """A value with everything of these kinds in it changed, also inside of lists and tuples."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(replaced(one, kinds, change) for one in value)
    return value


def returned(value: Any) -> Any:
    """What a function of :mod:`unisono.comm_func` gave, in MindSpore's kinds: its tensors and its CommHandle."""
    from mindspore.communication.comm_func import CommHandle

    def change(one: Any) -> Any:
        return CommHandle(one) if isinstance(one, Handle) else from_torch(one)

    return replaced(value, (torch.Tensor, Handle), change)
