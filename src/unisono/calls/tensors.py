"""Checks of the tensors of a call: dense, in one piece, on a device of the group, apart from one another.

The first line of an error is torch_npu's or MindSpore's text where they have one; the second says what was expected and
what was got.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..base.errors import make_argument_error
from ..group.names import GroupLike, devices_of, resolve


def expect_tensor(function: str, got: object) -> None:
    """Raises for an argument that is no tensor, in MindSpore's words."""
    if not isinstance(got, Tensor):
        raise TypeError(f"For {function}, the input tensor must be tensor\n  got {type(got).__name__}")


def expect_tensors(output: Any, input: Any) -> None:
    """Raises for the first argument that is no tensor."""
    for name, tensor in (("output", output), ("input", input)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"'{name}' must be a tensor\n{expected_got('torch.Tensor', type(tensor).__name__)}")


def row_count(shape: Sequence[int]) -> int:
    """Rows of a tensor of this shape; a number is one row."""
    return shape[0] if shape else 1


def shape_of(like: Any) -> tuple[int, ...]:
    """A shape, given as one or by a tensor that has it."""
    if isinstance(like, Tensor):
        return tuple(like.shape)
    if not isinstance(like, (tuple, list)):
        raise TypeError(f"Expected tensor or tuple, but got {type(like)}")
    return tuple(like) if is_compiling() else tuple(map(index, like))


def check_memory(group: GroupLike, output: Tensor, input: Tensor) -> None:
    """Dense, contiguous, of one dtype, and on a device that the group's backend takes."""
    named = (("output", output), ("input", input))
    for name, tensor in named:
        if tensor.layout is not torch.strided:
            raise RuntimeError(f"Tensors must be dense\n{expected_got(f'a strided {name!r}', tensor.layout)}")
        if not tensor.is_contiguous():
            shape = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            raise RuntimeError(f"Tensors must be contiguous\n{expected_got(f'a contiguous {name!r}', shape)}")
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"'{name}' is a lazily conjugated or negated view; call resolve_conj() or resolve_neg() first"
            )
    found = resolve(group)
    assert found is not None  # or there would be no transport
    kinds = devices_of(found)
    for name, tensor in named:
        if tensor.device.type not in kinds or tensor.device != output.device:
            raise RuntimeError(
                "Tensors must be on a supported device\n"
                + expected_got(" or ".join(kinds), f"'{name}' on {tensor.device}")
            )
    if output.dtype is not input.dtype:
        raise RuntimeError(
            f"output tensor must have the same type as input tensor\n{expected_got(input.dtype, output.dtype)}"
        )


def check_apart(output: Tensor, input: Tensor) -> None:
    """What the core refuses of an exchange, for functions that have no words of their own."""
    for name, tensor in (("output", output), ("input", input)):
        if tensor.layout is not torch.strided:
            got = str(tensor.device), str(tensor.layout), str(tensor.dtype)
            raise make_argument_error("dense", name, got=got)
        if not tensor.is_contiguous():
            raise make_argument_error("contiguous", name, got=(list(tensor.shape), tensor.stride()))
        if tensor.is_conj() or tensor.is_neg():
            raise make_argument_error("lazy", name)
    if output.dtype is not input.dtype:
        raise make_argument_error("dtype_of", "output", str(input.dtype)[6:], str(output.dtype)[6:], "input")
    if overlap(output, input):
        raise make_argument_error("overlap", "output", other="input")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share a byte."""
    a, b, a_bytes, b_bytes = one.data_ptr(), other.data_ptr(), one.nbytes, other.nbytes
    return a_bytes > 0 and b_bytes > 0 and a < b + b_bytes and b < a + a_bytes


def expected_got(expected: object, got: object) -> str:
    """The second line of an error."""
    return f"  expected {expected}, got {got}"
