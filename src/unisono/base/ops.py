"""Reduce operations: one reader, in the core, and their names.

:func:`read` takes a name, a torch ReduceOp or its type, and gives the core's number and the factor of a premul_sum.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch.distributed as dist

from .. import _core

read = _core.read_op

#: What users may write for a reduce operation.
Op: TypeAlias = str | dist.ReduceOp | dist.ReduceOp.RedOpType

#: The numbers of reduce operations by name.
NUMBERS: dict[str, int] = {name: number for name, number in _core.OPS.items() if name != "none"}
_NAMES = {number: name for name, number in NUMBERS.items()}
#: What torch calls them, but for premul_sum, which it makes with a factor.
TORCH_OPS = {number: getattr(dist.ReduceOp, name.upper()) for name, number in NUMBERS.items() if name != "premul_sum"}
AVG, SUM, PREMUL_SUM = NUMBERS["avg"], NUMBERS["sum"], NUMBERS["premul_sum"]

#: The classes of torch's reduce operations. Compare types: isinstance takes microseconds for these.
TORCH_CLASSES = (dist.ReduceOp, dist.ReduceOp.RedOpType)


def name_of(number: int) -> str:
    """The name of a reduce operation."""
    return _NAMES[number]


def for_torch(number: int, factor: float) -> Any:
    """What torch.distributed takes for a reduce operation."""
    if number == PREMUL_SUM:
        return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
    return TORCH_OPS[number]
