"""Tensors with gaps or in another order, which the core does not take: contiguous copies for the time of a call.

torch's own groups take them for most collectives, so the torch backend does for all of them.
"""

from __future__ import annotations

import threading
from typing import Any

import torch


class Copies:
    """The arguments of a call, with a contiguous copy for each tensor that is not contiguous; false if none is."""

    def __init__(self, arguments: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
        self._outputs = outputs
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made = False
        self._lock = threading.Lock()
        self.arguments = tuple(self._contiguous(argument) for argument in arguments)

    def __bool__(self) -> bool:
        return self._made

    def write_back(self) -> None:
        """Copies what the call has written to where it belongs; does it once, whoever asks."""
        with self._lock:
            for tensor, copy in self._back:
                tensor.copy_(copy)
            self._back = []

    def _contiguous(self, argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [self._contiguous(part) for part in argument]
        if not isinstance(argument, torch.Tensor) or argument.layout is not torch.strided or argument.is_contiguous():
            return argument
        written = any(argument is output for output in self._outputs)
        if written and _repeats(argument):
            return argument  # cannot be written, and the core says so
        copy = argument.detach().contiguous()
        self._made = True
        if written:
            self._back.append((argument.detach(), copy))
        return copy


def _repeats(tensor: torch.Tensor) -> bool:
    """Says whether several elements share their memory, as in an expanded tensor."""
    return any(stride == 0 and n > 1 for stride, n in zip(tensor.stride(), tensor.shape, strict=True))
