"""Tensors in shared memory: making them, moving others there, recognising them.

A tensor in the heap is an ordinary CPU tensor whose bytes other ranks of this host can see; collectives read and write
it where it is. Allocation is local: no other rank takes part, and sizes may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import nn

from .. import _core

# DLPack's names for torch's dtypes: (type code, bits).
_DLPACK: dict[torch.dtype, tuple[int, int]] = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
}

Anything = TypeVar("Anything", torch.Tensor, nn.Module)
Dtype: TypeAlias = torch.dtype | None
Device: TypeAlias = torch.device | str | None


@overload
def empty(
    size: Sequence[int], /, *, dtype: Dtype = None, device: Device = None, requires_grad: bool = False
) -> torch.Tensor: ...
@overload
def empty(*size: int, dtype: Dtype = None, device: Device = None, requires_grad: bool = False) -> torch.Tensor: ...
def empty(*size: object, dtype: Dtype = None, device: Device = None, requires_grad: bool = False) -> torch.Tensor:
    """Makes an uninitialised tensor in shared memory; arguments as those of torch.empty.

    >>> import torch, unisono
    >>> t = unisono.empty(2, 3, dtype=torch.bfloat16)
    >>> t.shape, unisono.is_shared(t), unisono.is_shared(t[1])
    (torch.Size([2, 3]), True, True)

    Raises HeapMemoryError when the machine or its cgroup has too little memory left, ValueError for another device than
    the CPU.

    Args:
        *size: the shape, as numbers or as one sequence
        dtype: torch's default dtype if None
        device: None or the CPU
        requires_grad: as in torch

    Returns:
        A CPU tensor whose memory other ranks of the host can read.
    """
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"shared memory is on the CPU, got device {device!r}; leave 'device' out or pass 'cpu'")
    dtype = dtype or torch.get_default_dtype()
    shape = list(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[call-overload]
    for n in shape:
        if n < 0:
            raise ValueError(f"sizes must not be negative, got {shape}")
    if dtype in _DLPACK:
        made = _core.empty(shape, *_DLPACK[dtype])
    elif dtype.itemsize == 1 and dtype.is_floating_point:  # the float8 family
        made = _core.empty(shape, 1, 8).view(dtype)
    else:
        raise TypeError(f"unisono has no shared memory for dtype {dtype}")
    return made.requires_grad_() if requires_grad else made


@overload
def zeros(
    size: Sequence[int], /, *, dtype: Dtype = None, device: Device = None, requires_grad: bool = False
) -> torch.Tensor: ...
@overload
def zeros(*size: int, dtype: Dtype = None, device: Device = None, requires_grad: bool = False) -> torch.Tensor: ...
def zeros(*size: Any, dtype: Dtype = None, device: Device = None, requires_grad: bool = False) -> torch.Tensor:
    """Makes a tensor of zeros in shared memory; see :func:`empty`.

    Args:
        *size: the shape, as numbers or as one sequence
        dtype: torch's default dtype if None
        device: None or the CPU
        requires_grad: as in torch

    Returns:
        A tensor in shared memory.
    """
    return empty(*size, dtype=dtype, device=device).zero_().requires_grad_(requires_grad)


@overload
def ones(
    size: Sequence[int], /, *, dtype: Dtype = None, device: Device = None, requires_grad: bool = False
) -> torch.Tensor: ...
@overload
def ones(*size: int, dtype: Dtype = None, device: Device = None, requires_grad: bool = False) -> torch.Tensor: ...
def ones(*size: Any, dtype: Dtype = None, device: Device = None, requires_grad: bool = False) -> torch.Tensor:
    """Makes a tensor of ones in shared memory; see :func:`empty`.

    Args:
        *size: the shape, as numbers or as one sequence
        dtype: torch's default dtype if None
        device: None or the CPU
        requires_grad: as in torch

    Returns:
        A tensor in shared memory.
    """
    return empty(*size, dtype=dtype, device=device).fill_(1).requires_grad_(requires_grad)


def full(
    size: Sequence[int], fill_value: Any, *, dtype: Dtype = None, device: Device = None, requires_grad: bool = False
) -> torch.Tensor:
    """Makes a tensor in shared memory that holds one value everywhere; the dtype follows from it as in torch.full.

    >>> import unisono
    >>> unisono.full((2,), 7)
    tensor([7, 7])

    Args:
        size: the shape
        fill_value: the value
        dtype: that of the value if None
        device: None or the CPU
        requires_grad: as in torch

    Returns:
        A tensor in shared memory.
    """
    dtype = dtype or torch.full((), fill_value).dtype
    return empty(size, dtype=dtype, device=device).fill_(fill_value).requires_grad_(requires_grad)


def tensor(data: Any, *, dtype: Dtype = None, device: Device = None, requires_grad: bool = False) -> torch.Tensor:
    """Makes a tensor in shared memory from numbers, lists or an array, as torch.tensor does elsewhere.

    >>> import unisono
    >>> unisono.tensor([[1.0, 2.0], [3.0, 4.0]]).sum()
    tensor(10.)

    Args:
        data: numbers, lists or an array
        dtype: that of the data if None
        device: None or the CPU
        requires_grad: as in torch

    Returns:
        A tensor in shared memory.
    """
    source = torch.tensor(data, dtype=dtype)
    return empty(source.shape, dtype=source.dtype, device=device).copy_(source).requires_grad_(requires_grad)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Makes an uninitialised contiguous tensor in shared memory with the shape and dtype of another.

    Args:
        tensor: the other tensor

    Returns:
        A tensor in shared memory.
    """
    made = _core.empty_like(tensor)
    return empty(tensor.shape, dtype=tensor.dtype) if made is None else made


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it has gaps or is a lazy view: what a transport can read."""
    if _core.is_plain(tensor) or tensor.layout is not torch.strided:
        return tensor  # if it is sparse, the transport says whether it takes it
    return tensor.contiguous().resolve_conj().resolve_neg()


def is_shared(tensor: torch.Tensor) -> bool:
    """Says whether a tensor's bytes are in the heap, of this process or of another rank; views count.

    Args:
        tensor: any torch tensor

    Returns:
        True or False.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"is_shared takes a torch.Tensor, got {type(tensor).__name__}")
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and _core.is_reachable(tensor.data_ptr())


def to_shared_(what: Anything) -> Anything:
    """Moves a tensor, or all parameters and buffers of a module, into shared memory, keeping the objects.

    >>> import torch, unisono
    >>> model = unisono.to_shared_(torch.nn.Linear(4, 2))
    >>> all(unisono.is_shared(p) for p in model.parameters())
    True

    Optimizers, hooks and ties between parameters stay valid, since the objects are the same. Other views of the old
    memory are not moved. What is in the heap already stays where it is.

    Args:
        what: a CPU tensor, or a module whose parameters and buffers are on the CPU

    Returns:
        The same object.
    """
    if isinstance(what, nn.Module):
        for tensor in [*what.parameters(), *what.buffers()]:
            to_shared_(tensor)
        return what
    if not isinstance(what, torch.Tensor):
        raise TypeError(f"to_shared_ takes a torch.Tensor or a torch.nn.Module, got {type(what).__name__}")
    if what.device.type != "cpu":
        raise ValueError(f"to_shared_ takes tensors on the CPU, got device {what.device}")
    if not is_shared(what):
        moved = empty_like(what)
        moved.copy_(what.detach())
        what.data = moved
    return what
