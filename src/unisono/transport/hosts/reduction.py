"""A reduce operation over hosts: one step inside each host, one over the hosts' partial results.

Inside a host the core sums its ranks in the order of the number rule, then the hosts' partial sums are combined in the
same order over host numbers. For hosts with equal, contiguous, power-of-two numbers of ranks that is the binary tree
over all ranks, and the bits are those of one host; for other layouts the sum goes host by host. 16-bit partial sums are
rounded once per host; with UNISONO_HOSTS_FP32=1 they travel as float32, twice the bytes, and are rounded at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import _core
from ...base import ops
from ..backend import divide

_SUMS = (ops.SUM, ops.AVG, ops.PREMUL_SUM)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_HALF = (torch.float16, torch.bfloat16)


class Reduction:
    """One call's operation on one dtype; ``size`` is the number of ranks, ``wide`` the group's UNISONO_HOSTS_FP32."""

    def __init__(self, op: int, factor: float, dtype: torch.dtype, size: int, wide: bool) -> None:
        self.op = op
        self.factor = factor
        self.dtype = dtype
        self.size = size
        self.is_avg = op == ops.AVG
        self.inside = ops.name_of(ops.SUM if self.is_avg else op)  # the step inside a host
        self.inside_factor = factor if op == ops.PREMUL_SUM else None
        self.between = ops.SUM if op in _SUMS else op
        self.partial_dtype = torch.float32 if wide and dtype in _HALF and op in _SUMS else dtype

    @property
    def keeps_one(self) -> bool:
        """Whether a single input is its own partial result: it is neither multiplied, nor widened, nor made 0 or 1."""
        return self.op != ops.PREMUL_SUM and self.partial_dtype is self.dtype and self.dtype is not torch.bool

    def widened(self, tensor: Tensor) -> Tensor:
        """An input as the step inside a host takes it."""
        return tensor if tensor.dtype is self.partial_dtype else tensor.to(self.partial_dtype)

    def combine_inside(self, partial: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
        """The partial result of one host's inputs."""
        op = ops.SUM if self.is_avg else self.op
        _core.combine(partial, [self.widened(p) for p in parts], op, list(factors))

    def combine_hosts(self, output: Tensor, partials: Sequence[Tensor]) -> None:
        """The result of all hosts' partial results, which may be the output's own memory only if it is the first."""
        if self.is_avg and self.dtype in _UNSIGNED:  # torch cannot divide these; the core divides by what it is given
            nothing = torch.zeros_like(output)
            every = [*partials, *[nothing] * (self.size - len(partials))]
            _core.combine(output, every, ops.AVG, [1.0] * self.size)
            return
        ones = [1.0] * len(partials)
        if self.dtype not in _HALF or not (self.is_avg or self.partial_dtype is torch.float32):
            _core.combine(output, list(partials), self.between, ones)
            if self.is_avg:
                divide(output, self.size)
            return
        # Rounded once, behind the division.
        total = torch.empty(output.numel(), dtype=torch.float32)
        _core.combine(total, [p.float() for p in partials], self.between, ones)
        output.copy_(total.div_(self.size) if self.is_avg else total)
