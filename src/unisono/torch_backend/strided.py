"""Copies for the time of a call: of tensors with gaps or in another order, which the core does not take, and of tensors
that share memory with those of another call of the same list.

torch's own groups take both for most collectives, so the torch backend does for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from ..base.work import tensors_in
from .refusals import RefusedValueError

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_plain(argument: Any) -> bool:
    """Says whether the core takes an argument as it is, for all that a copy could change."""
    kind = type(argument)
    if kind in _PLAIN_TYPES:
        return argument.layout is torch.strided and bool(argument.is_contiguous())
    if kind is tuple or kind is list:
        return all(map(is_plain, argument))
    return not issubclass(kind, (torch.Tensor, list, tuple))


class Copies:
    """The arguments of a call, with a contiguous copy for each tensor that is not contiguous; false if none is.

    The first argument is what the call writes. ``apart`` are ids of tensors to copy in any case.
    """

    def __init__(self, arguments: tuple[Any, ...], apart: Collection[int] = ()) -> None:
        self._apart = apart
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made = False
        self._lock = threading.Lock()
        self.arguments = tuple(self._contiguous(argument, i == 0) for i, argument in enumerate(arguments))

    def __bool__(self) -> bool:
        return self._made

    def write_back(self) -> None:
        """Copies what the call has written to where it belongs; does it once, whoever asks."""
        with self._lock:
            for tensor, copy in self._back:
                tensor.copy_(copy)
            self._back = []

    def _contiguous(self, argument: Any, written: bool) -> Any:
        if isinstance(argument, (list, tuple)):
            return [self._contiguous(part, written) for part in argument]
        if not isinstance(argument, torch.Tensor) or argument.layout is not torch.strided:
            return argument
        if argument.is_contiguous() and id(argument) not in self._apart:
            return argument
        if written and any(stride == 0 and n > 1 for stride, n in zip(argument.stride(), argument.shape, strict=True)):
            return argument  # several elements share their memory: cannot be written, and the core says so
        copy = argument.detach().clone(memory_format=torch.contiguous_format)
        self._made = True
        if written:
            self._back.append((argument.detach(), copy))
        return copy


class _Span(NamedTuple):
    """A tensor in a list of calls, and from where to where it reaches in memory."""

    start: int
    end: int
    tensor: torch.Tensor
    number: int  # of the call
    is_output: bool
    is_input_too: bool


def overlapping(calls: Sequence[tuple[Any, ...]]) -> set[int]:
    """The ids of tensors in a list of calls that share memory with another one there, if either is an output.

    With copies of these, every input is read before any output is written. Where two results would have to be in one
    place, that is an error, unless both come from the same numbers: calls with one tensor, which they change in place.
    An input and an output of the same call are left to the core, which knows where the one may lie in the other.
    """
    spans = []
    for number, (output, *others) in enumerate(calls):
        inputs = _dense(others)
        spans += [_Span(*_reach(tensor), tensor, number, True, not inputs) for tensor in _dense(output)]
        spans += [_Span(*_reach(tensor), tensor, number, False, False) for tensor in inputs]
    spans.sort(key=lambda span: span.start)
    found: set[int] = set()
    reaching: list[_Span] = []  # those before that reach this far
    for span in spans:
        reaching = [other for other in reaching if other.end > span.start]
        for other in reaching:
            if span.is_output and other.is_output:
                if not (span.is_input_too and other.is_input_too) and _share_a_byte(span.tensor, other.tensor):
                    raise RefusedValueError(
                        "ProcessGroupUnisono: two outputs of one coalesced call share memory, of shapes "
                        f"{list(other.tensor.shape)} and {list(span.tensor.shape)}: one would overwrite the other"
                    )
            elif span.number == other.number or not (span.is_output or other.is_output):
                continue
            found |= {id(span.tensor), id(other.tensor)}
        reaching.append(span)
    return found


def share_memory(tensors: Sequence[torch.Tensor], same_may: bool) -> bool:
    """Whether two of these tensors share a byte; ``same_may``: one that is there twice does not count."""
    spans = sorted(((*_reach(tensor), tensor) for tensor in _dense(list(tensors))), key=lambda span: span[0])
    reaching: list[tuple[int, int, torch.Tensor]] = []
    for span in spans:
        reaching = [other for other in reaching if other[1] > span[0]]
        for _, _, other in reaching:
            same = other.data_ptr() == span[0] and other.stride() == span[2].stride() and other.shape == span[2].shape
            if not (same and same_may) and _share_a_byte(other, span[2]):
                return True
        reaching.append(span)
    return False


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor, and the first behind it."""
    start = tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _share_a_byte(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap do so themselves: rows between the rows of the other do not."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    start = min(one.data_ptr(), other.data_ptr())
    marks = torch.zeros(max(_reach(one)[1], _reach(other)[1]) - start, dtype=torch.bool)

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size()
        strides = (*(stride * size for stride in tensor.stride()), 1)
        return marks.as_strided((*tensor.shape, size), strides, tensor.data_ptr() - start)

    bytes_of(one).fill_(True)
    return bool(bytes_of(other).any())


def _dense(value: Any) -> list[torch.Tensor]:
    """The dense tensors with elements in lists of lists."""
    return [tensor for tensor in tensors_in(value) if tensor.layout is torch.strided and tensor.numel()]
