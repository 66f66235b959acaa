"""What the functions of comm_func are given: checked, and turned into what the layers below take.

The first line of a message is MindSpore's, so that code and people who know it find what they look for; what was got
follows on a second line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import _core
from ..calls.splits import SplitsLike, cut, splits_of
from ..group.group import Group
from ..group.names import GroupLike, resolve

_RedOpType = dist.ReduceOp.RedOpType

#: The strings an ``op`` may be.
OPS = ("sum", "prod", "min", "max", "avg")
OP_CODES = {name: _core.OPS["product" if name == "prod" else name] for name in OPS}
_TORCH_OPS = {
    getattr(_RedOpType, name): "prod" if name == "PRODUCT" else name.lower()
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}
PLAIN = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))  # types without behaviour of their own


def no_tensor(function: str, got: object) -> NoReturn:
    """Raises for an argument that is no tensor."""
    raise TypeError(f"For {function}, the input tensor must be tensor\n  got {type(got).__name__}")


def reduction(function: str, op: Any) -> tuple[str, float]:
    """The name of a reduce operation, and the factor of a PREMUL_SUM (1.0 for others)."""
    if isinstance(op, str):
        if op in OPS:
            return op, 1.0
        raise TypeError(f"For {function}, the input op value must be one of {', '.join(OPS)}\n  got {op!r}")
    if isinstance(op, _RedOpType):
        name, factor = _TORCH_OPS[op], None
    elif isinstance(op, dist.ReduceOp):
        state: Any = op.__getstate__()  # type: ignore[no-untyped-call, unused-ignore]
        name, factor = _TORCH_OPS[state[0]], state[1]
    else:
        raise TypeError(
            f"For {function}, the input op type must be str\n  or a torch ReduceOp, got {type(op).__name__}"
        )
    if name != "premul_sum":
        return name, 1.0
    if factor is None:
        raise TypeError(f"For {function}, the input op PREMUL_SUM must have a factor: torch makes one with its factor")
    return name, float(factor)


def member(function: str, group: GroupLike) -> ProcessGroup | Group:
    """The group that is meant, which this process must be in: elsewhere there is no result to return."""
    found = resolve(group)
    if found is None:
        words = f"the group {group!r}" if isinstance(group, str) else "the group"
        raise ValueError(f"For {function}, this process must be in {words}, and it is not")
    return found


def numbers(group: ProcessGroup | Group) -> tuple[int, int]:
    """This process's rank in a group, and the group's size."""
    return (group.rank, group.size) if isinstance(group, Group) else (group.rank(), group.size())


def global_ranks(group: ProcessGroup | Group) -> Sequence[int]:
    """The members' global ranks, by group rank."""
    return group.ranks if isinstance(group, Group) else dist.get_process_group_ranks(group)


def group_rank(function: str, argument: str, rank: Any, group: GroupLike) -> int:
    """The rank in the group of a process given by its global rank, as torch and MindSpore count ``src`` and ``dst``."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"For {function}, the {argument} must be int\n  got {type(rank).__name__}")
    ranks = list(global_ranks(member(function, group)))
    if rank not in ranks:
        raise ValueError(f"For {function}, the {argument} must be one of the group's ranks {ranks}, got {rank}")
    return ranks.index(rank)


def facts(function: str, group: GroupLike) -> tuple[int, int, str]:
    """This process's rank in the group, the group's size, and the word by which an operator finds it when it runs."""
    found = member(function, group)
    if isinstance(found, Group):
        key = found.key
    elif found is dist.group.WORLD:
        key = ""  # whatever is the default group when the operator runs
    else:
        key = group if isinstance(group, str) else found.group_name
    return (*numbers(found), key)


# torch.compile runs these while it traces and puts what they say into the graph. (torch.compiler.assume_constant_result
# does the same, and would import all of the compiler.)
for _function in (reduction, group_rank, facts):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010


def equal_parts(rows: int, size: int) -> int:
    """Rows per rank when ``rows`` are dealt out evenly."""
    if rows % size:
        raise ValueError(
            "the first dimension for 'input_shape' must be divided by 'rank_size', "
            f"but got input_shape[0]: {rows}, rank_size: {size}"
        )
    return rows // size


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor as rows: a number is one row."""
    return tensor if tensor.dim() else tensor.reshape(1)


def splits(sizes: SplitsLike, rows: int | None, size: int) -> list[int]:
    """Rows per rank as a list, checked; empty if none were given and ``rows``, their total, is not known either."""
    if isinstance(sizes, (str, dist.ReduceOp, _RedOpType)):
        raise TypeError(f"the split sizes come before 'op': expected a list of whole numbers, or None, got {sizes}")
    if torch.compiler.is_compiling():  # keep sizes that are symbols
        given = () if sizes is None else tuple(sizes)
        check = cut.__wrapped__
    else:
        given = splits_of(sizes)
        check = cut
    if rows is None:
        if not given:
            return []
        rows = sum(given)
    check(given, rows, rows, size)
    return list(given) or [rows // size] * size
