"""gloo's checks of arguments, in its order and words, for calls that unisono itself would take or put differently.

Lists of several tensors per rank are checked here always. Of a group that stands in for gloo (``served.py``) these are
asked first in every call with lists: unisono takes lists of unequal tensors, which all ranks must agree on; a program
that was written for gloo means equal ones, and a mistake in one is to be an error on the rank that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .refusals import RefusedTypeError, RefusedValueError


def refuse(name: str, words: str) -> RefusedValueError:
    """The error for a call that gloo refuses with these words."""
    return RefusedValueError(f"ProcessGroupUnisono::{name}: {words}")


def root(name: str, rank: int, size: int, tensor: int = 0, tensors: int = 1) -> None:
    """Refuses a root rank, or a place of the root's tensor in a list, that is not there."""
    if not 0 <= rank < size:
        raise refuse(name, f"invalid root rank: {rank}")
    if not 0 <= tensor < tensors:
        raise refuse(name, f"invalid root tensor: {tensor}")


def dense(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuses a list that begins with a sparse tensor."""
    if tensors and tensors[0].layout is not torch.strided:
        raise refuse(name, "only supports dense tensors")


def same_layout(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuses tensors of a layout that the first one does not have."""
    for i, tensor in enumerate(tensors):
        if tensor.layout is not tensors[0].layout:
            words = f"(expected {tensors[0].layout}, got {tensor.layout})"
            raise refuse(name, f"invalid tensor layout at index {i} {words}")


def alike(name: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    """Refuses tensors of a dtype or shape that ``like`` does not have."""
    dtype, shape = like.dtype, like.shape
    for i, tensor in enumerate(tensors):
        if tensor.dtype is not dtype:
            words = f"invalid tensor type at index {i} (expected {dtype}, got {tensor.dtype})"
            raise RefusedTypeError(f"ProcessGroupUnisono::{name}: {words}")
        if tensor.shape != shape:
            raise refuse(name, f"invalid tensor size at index {i} (expected {tuple(shape)}, got {tuple(tensor.shape)})")


def all_gather(output_lists: Sequence[Any], inputs: Sequence[Tensor], size: int) -> None:
    """Each output list has a place for every input of every rank."""
    if not inputs:
        raise refuse("allgather", "requires non-empty input tensor list")
    if len(inputs) != len(output_lists):
        raise refuse("allgather", "requires input/output tensor lists to have the same length")
    expected = len(inputs) * size
    for i, outputs in enumerate(output_lists):
        if len(outputs) != expected:
            words = f"invalid output tensor list at index {i} (expected length {expected}, got {len(outputs)})"
            raise refuse("allgather", words)
    dense("allgather", inputs)
    alike("allgather", inputs, inputs[0])
    for outputs in output_lists:
        alike("allgather", outputs, inputs[0])


def all_gather_coalesced(output_lists: Sequence[Any], inputs: Sequence[Tensor], size: int) -> None:
    """A list for every rank, with outputs as the inputs are."""
    name = "allgather_coalesced"
    if not inputs:
        raise refuse(name, "requires non-empty input tensor list")
    if len(output_lists) != size:
        raise refuse(name, "output lists should be equal to world size")
    for outputs in output_lists:
        if len(outputs) != len(inputs):
            raise refuse(name, f"invalid output size: (expected length {len(inputs)}, got {len(outputs)})")
        for i, (output, input) in enumerate(zip(outputs, inputs, strict=True)):
            if output.shape != input.shape:
                words = f"(expected length {tuple(input.shape)}, got {tuple(output.shape)})"
                raise refuse(name, f"invalid size of output tensor at index {i} {words}")
            if output.dtype is not input.dtype:
                raise refuse(name, f"invalid tensor type at index {i} (expected {input.dtype}, got {output.dtype})")
    dense(name, inputs)


def all_reduce_coalesced(tensors: Sequence[Tensor]) -> None:
    """Dense tensors of one dtype."""
    name = "allreduce_coalesced"
    if not tensors:
        raise refuse(name, "requires non-empty tensor list")
    same_layout(name, tensors)
    if any(tensor.dtype is not tensors[0].dtype for tensor in tensors):
        raise refuse(name, "tensors must all have the same type")
    if tensors[0].layout is not torch.strided:
        raise refuse(name, "unsupported layout")


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
    """A tensor for and from every rank, all alike."""
    name = "alltoall"
    for what, tensors in (("input", inputs), ("output", outputs)):
        if len(tensors) != size:
            raise refuse(name, f"{what} tensor list size {len(tensors)} does not match world size {size}")
    dense(name, inputs)
    dense(name, outputs)
    alike(name, inputs, inputs[0])
    alike(name, outputs, outputs[0])
    for what in ("dtype", "shape"):
        if getattr(inputs[0], what) != getattr(outputs[0], what):
            kind = "type" if what == "dtype" else "size"
            raise refuse(name, f"input and output tensors must have the same {kind}")


def all_to_all_single(output: Tensor, input: Tensor) -> None:
    """gloo's ValueError: it takes no copy of an input with gaps."""
    if output.device != input.device:
        raise refuse("alltoall_base", "output tensor and input tensor must be on the same type of device")
    for tensor in (output, input):
        dense("alltoall_base", [tensor])
    if not input.is_contiguous():
        raise RefusedValueError("Tensors must be contiguous")
