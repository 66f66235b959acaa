"""Gathers and reduce-scatters of different sizes per rank, along any dimension, as inference servers call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm_func import all_gather_into_tensor_uneven, reduce_scatter_tensor_uneven

Sizes = Sequence[int] | None


def all_gatherv(
    group: ProcessGroup, input_: Tensor | Sequence[Tensor], dim: int = 0, sizes: Sizes = None
) -> Tensor | list[Tensor]:
    """Puts the ranks' tensors behind one another along ``dim``; rank r has ``sizes[r]`` of it, which may be none::

        sizes [1, 2]    rank 0  [1]             [1, 10, 20]
                        rank 1  [10, 20]    ->  [1, 10, 20]

    Args:
        group: a process group of any backend.
        input_: a tensor, or a list of tensors of any dtypes and widths, which travel together.
        dim: where the ranks differ; of every tensor of a list.
        sizes: one number for each rank; None where all have as many as this one.

    Returns:
        The tensor, or a list of them, on every rank.
    """
    if isinstance(input_, Tensor):
        return _back(all_gather_into_tensor_uneven(_first(input_, dim), sizes, group)[0], dim)
    # All are under way before the first is waited for.
    started = [all_gather_into_tensor_uneven(_first(one, dim), sizes, group, async_op=True) for one in input_]
    for _, handle in started:
        assert handle is not None
        handle.wait()
    return [_back(one, dim) for one, _ in started]


def reduce_scatterv(group: ProcessGroup, input_: Tensor, dim: int = -1, sizes: Sizes = None) -> Tensor:
    """Adds the ranks' tensors up and gives rank r ``sizes[r]`` of them along ``dim``, which may be none::

        sizes [1, 2]    rank 0  [1, 2, 3]           [11]
                        rank 1  [10, 20, 30]    ->  [22, 33]

    Args:
        group: a process group of any backend.
        input_: the tensor, of the same shape on all ranks.
        dim: which is cut.
        sizes: one number for each rank; None for equal parts.

    Returns:
        This rank's part.
    """
    return _back(reduce_scatter_tensor_uneven(_first(input_, dim), sizes, "sum", group)[0], dim)


def _first(tensor: Tensor, dim: int) -> Tensor:
    """The tensor with this dimension in front, without gaps."""
    return tensor.movedim(dim, 0).contiguous()


def _back(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(0, dim).contiguous()


def check_output(output: Tensor | None, result: Any) -> Any:
    """The result, in the caller's tensor if there is one."""
    if output is None:
        return result
    if not isinstance(result, Tensor) or output.shape != result.shape:
        raise ValueError(f"'output' takes one tensor of the result's shape, got {list(output.shape)}")
    return output.copy_(result)
