"""Groups as a user writes them: which one is meant, its transport, ranks in it, and what a call on it returns."""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.handle import Handle
from ..base.work import Work
from ..group.group import Group
from ..group.names import GroupLike, global_ranks, is_own, name_of, rank_and_size, resolve
from ..transport.find import find
from ..transport.protocol import Transport


def member(function: str, group: GroupLike) -> ProcessGroup | Group:
    """The group that is meant, which this process must be in: elsewhere there is no result to return."""
    return resolve(group) or outside(function, group)


def transport(function: str, group: GroupLike, tensor: Tensor) -> Transport:
    """The transport for this tensor on the group that is meant, which this process must be in."""
    return find(group, tensor) or outside(function, group)


def outside(function: str, group: GroupLike) -> NoReturn:
    """Raises for a group this process is not in."""
    words = f"the group {group!r}" if isinstance(group, str) else "the group"
    raise ValueError(f"For {function}, this process must be in {words}, and it is not")


def group_rank(function: str, argument: str, rank: Any, group: GroupLike) -> int:
    """The rank in the group of a process given by its global rank, as torch and MindSpore count ``src`` and ``dst``."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"For {function}, the {argument} must be int\n  got {type(rank).__name__}")
    ranks = global_ranks(member(function, group))
    if rank not in ranks:
        raise ValueError(f"For {function}, the {argument} must be one of the group's ranks {list(ranks)}, got {rank}")
    return ranks.index(rank)


def place(function: str, group: GroupLike) -> tuple[int, int, str]:
    """This process's rank in the group, the group's size, and the name by which an operator finds it when it runs."""
    found = member(function, group)
    if found is dist.group.WORLD:
        name = ""  # whatever is the default group when the operator runs
    else:
        name = group if isinstance(group, str) else name_of(found)
    return (*rank_and_size(found), name)


def traced_group(group: GroupLike) -> str:
    """The name by which an operator finds a group (empty: the default group); written for torch.compile to read."""
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"under torch.compile, 'group' must be a ProcessGroup or its name, got {type(group).__name__}")
    return group.group_name


# torch.compile runs these while it traces and puts what they say into the graph. (torch.compiler.assume_constant_result
# does the same, and would import all of the compiler.)
for _function in (group_rank, place):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010


def result(group: GroupLike, handle: Handle | None, output: Any) -> Any:
    """What a call of torch's kind returns: None when it is over, else a Work, or the Handle itself for a Group."""
    if handle is None or is_own(resolve(group)):
        return handle
    return Work((handle,), [output])
