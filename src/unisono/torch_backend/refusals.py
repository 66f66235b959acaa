"""Bad arguments in the classes and words of torch's own groups, so that code which knows those also knows ours.

Read only after the core has refused a call. The words of torch come first, what the core has found out follows::

    ProcessGroupUnisono::broadcast: invalid root rank: 3 (argument 'root' must be a rank from 0 to 2, got 3)

The error is a RuntimeError, which torch's own groups raise, and also the ValueError or TypeError that a Group raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch


class RefusedValueError(RuntimeError, ValueError):
    """An argument has the right type and a wrong value."""


class RefusedTypeError(RuntimeError, TypeError):
    """An argument has the wrong type or dtype."""


class RefusedLayoutError(NotImplementedError, ValueError):
    """A function does not take tensors of this layout, or got none."""


def is_refusal(error: Exception) -> bool:
    """Whether an error of a call is about its arguments: raised by the core, or by our own Python.

    Not so one that a signal handler has raised while the call waited: its traceback ends in that handler.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == "unisono"


def refusal(name: str, arguments: Sequence[Any], error: Exception) -> Exception:
    """The error to raise for a call that the core refused with ``error``."""
    text = str(error)
    sparse = next((t for t in _tensors(arguments) if t.layout is not torch.strided), None)
    if sparse is not None:
        kind = "SparseCsr" if sparse.layout is torch.sparse_csr else "Sparse"
        return RefusedLayoutError(f"Could not run 'c10d::{name}_' with arguments from the '{kind}CPU' backend: {text}")
    for pattern, words in _WORDS:
        found = re.search(pattern, text)
        if found:
            text = f"{words(name, found)} ({text})"
            break
    made = RefusedTypeError if isinstance(error, TypeError) else RefusedValueError
    return made(f"ProcessGroupUnisono::{name}: {text}")


def not_one_tensor(count: int) -> Exception:
    """The error for a list that should hold one tensor."""
    if count == 0:
        return RefusedLayoutError(
            "There were no tensor arguments to this function (e.g., you passed an empty list of Tensors)"
        )
    return RefusedValueError(f"ProcessGroupUnisono takes a single tensor, expected a list of one, got {count}")


# The words of NCCL's group, since gloo's are about its own internals.
_WHOLE_SIZE: dict[str, str] = {
    "_all_gather_base": "output tensor size must be equal to world_size times input tensor size",
    "_reduce_scatter_base": "input tensor must be the same size as output size times world size",
}
_MAIL = ("send", "recv", "recvAnySource")


def _tensors(arguments: Sequence[Any]) -> list[torch.Tensor]:
    nested = [_tensors(a) if isinstance(a, (list, tuple)) else [a] for a in arguments]
    return [a for part in nested for a in part if isinstance(a, torch.Tensor)]


def _list_length(name: str, found: re.Match[str]) -> str:
    which, size, length = found.groups()
    if name == "reduce_scatter":
        return "invalid input tensor list size, must be world size"
    if name in ("gather", "scatter"):
        return (
            f"Incorrect {which} list size {length}. {which.capitalize()} list size should be {size}, "
            "same as size of the process group."
        )
    return f"invalid {which} tensor list at index 0 (expected length {size}, got {length})"


def _part_size(name: str, found: re.Match[str]) -> str:
    if name in _WHOLE_SIZE:
        return _WHOLE_SIZE[name]
    wanted, got = found.groups()  # gloo expects the list to be like the one tensor
    return f"invalid tensor size at index 0 (expected ({got}), got ({wanted}))"


def _no_such_reduction(name: str, found: re.Match[str]) -> str:
    op = found[1]
    if op in ("band", "bor", "bxor"):
        return f"Cannot use ReduceOp.{op.upper()} with non-integral dtype"
    return "Invalid scalar type"


# A pattern of the core's words (core/python/) -> torch's words for the same, mostly gloo's.
_WORDS: list[tuple[str, Callable[[str, re.Match[str]], str]]] = [
    (r"'root' must be .* got (-?\d+)", lambda name, found: f"invalid root rank: {found[1]}"),
    (r"'(dst|src)' must be .* got (-?\d+)", lambda name, found: f"invalid {found[1]} rank: {found[2]}"),
    (r"'(\w+)' must have one tensor per rank: expected (\d+), got (\d+)", _list_length),
    (r"must have as many elements as this rank's part .* expected (\d+), got (\d+)", _part_size),
    (r"do not divide into", lambda name, found: _WHOLE_SIZE.get(name, "invalid tensor size")),
    (
        r"must be contiguous",
        lambda name, found: "input tensor has to be contiguous" if name in _MAIL else "Tensors must be contiguous",
    ),
    (r"'op': (\w+) is not defined for", _no_such_reduction),
    (r"must have the dtype of", lambda name, found: "invalid tensor type at index 0"),
    (r"sparse tensors only works", lambda name, found: "unsupported reduction operation"),
    (r"got device (\w+)", lambda name, found: f"No backend type associated with device type {found[1]}"),
]
