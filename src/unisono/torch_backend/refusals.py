"""Bad arguments in the classes and words of torch's own groups, so that code which knows those also knows ours.

Used only when a call was refused. The words of torch come first, what the core has found out follows::

    ProcessGroupUnisono::broadcast: invalid root rank: 3 (argument 'root' must be a rank from 0 to 2, got 3)

The error is a RuntimeError, which torch's own groups raise, and also the ValueError or TypeError that a Group raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.errors import ArgumentError
from ..base.work import tensors_in


class RefusedValueError(RuntimeError, ValueError):
    """An argument has the right type and a wrong value."""


class RefusedTypeError(RuntimeError, TypeError):
    """An argument has the wrong type or dtype."""


class RefusedLayoutError(NotImplementedError, ValueError):
    """A function does not take tensors of this layout, or got none."""


def refusal(name: str, arguments: Sequence[Any], error: ArgumentError) -> Exception:
    """The error to raise for a call whose arguments were refused with ``error``."""
    text = str(error)
    sparse = next((t for t in tensors_in(arguments) if t.layout is not torch.strided), None)
    if sparse is not None:
        kind = "SparseCsr" if sparse.layout is torch.sparse_csr else "Sparse"
        return RefusedLayoutError(f"Could not run 'c10d::{name}_' with arguments from the '{kind}CPU' backend: {text}")
    if error.rule in _WORDS:
        text = f"{_WORDS[error.rule](name, error)} ({text})"
    made = RefusedTypeError if isinstance(error, TypeError) else RefusedValueError
    return made(f"ProcessGroupUnisono::{name}: {text}")


class NotOneTensor(Exception):
    """A list that should hold one tensor holds none or several."""


class NoTensors(NotOneTensor, RefusedLayoutError):
    """A list of tensors is empty."""


class SeveralTensors(NotOneTensor, RefusedValueError):
    """A list holds more than one tensor."""


def not_one_tensor(count: int, words: str) -> Exception:
    """The error for a list that should hold one tensor; ``words`` are gloo's, torch's dispatcher has others."""
    if count == 0:
        return NoTensors(
            "There were no tensor arguments to this function (e.g., you passed an empty list of Tensors)"
            f" (ProcessGroupUnisono::{words})"
        )
    return SeveralTensors(f"ProcessGroupUnisono::{words}, got {count}")


# The words of NCCL's group, since gloo's are about its own internals.
_WHOLE_SIZE: dict[str, str] = {
    "_all_gather_base": "output tensor size must be equal to world_size times input tensor size",
    "_reduce_scatter_base": "input tensor must be the same size as output size times world size",
}
#: The functions that take contiguous tensors only.
MESSAGES = ("send", "recv", "recvAnySource")


def _list_length(name: str, error: ArgumentError) -> str:
    which, size, length = error.argument, error.expected, error.got
    if name == "reduce_scatter":
        return "invalid input tensor list size, must be world size"
    if name in ("gather", "scatter"):
        return (
            f"Incorrect {which} list size {length}. {which.capitalize()} list size should be {size}, "
            "same as size of the process group."
        )
    return f"invalid {which} tensor list at index 0 (expected length {size}, got {length})"


def _part_size(name: str, error: ArgumentError) -> str:
    # gloo expects the list to be like the one tensor, so what is expected and what was got change places.
    other_way_round = f"invalid tensor size at index 0 (expected ({error.got}), got ({error.expected}))"
    return _WHOLE_SIZE.get(name, other_way_round)


def _contiguous(name: str, error: ArgumentError) -> str:
    return "input tensor has to be contiguous" if name in MESSAGES else "Tensors must be contiguous"


def _no_such_reduction(name: str, error: ArgumentError) -> str:
    if error.got in ("band", "bor", "bxor"):
        return f"Cannot use ReduceOp.{error.got.upper()} with non-integral dtype"
    return "Invalid scalar type"


def _device(name: str, error: ArgumentError) -> str:
    device: str = error.got[0] if error.rule == "dense" else error.got
    return f"No backend type associated with device type {device.partition(':')[0]}"


# A rule of unisono.base.errors -> torch's words for breaking it, mostly gloo's.
_WORDS: dict[str, Callable[[str, ArgumentError], str]] = {
    "rank_range": lambda name, error: f"invalid {error.argument} rank: {error.got}",
    "list_length": _list_length,
    "part_size": _part_size,
    "divides": lambda name, error: _WHOLE_SIZE.get(name, "invalid tensor size"),
    "contiguous": _contiguous,
    "op_dtype": _no_such_reduction,
    "dtype_of": lambda name, error: "invalid tensor type at index 0",
    "sparse_op": lambda name, error: "unsupported reduction operation",
    "device": _device,
    "dense": _device,
}
