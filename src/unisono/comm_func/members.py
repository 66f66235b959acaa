"""Who takes part: MindSpore's names for making groups and asking about ranks, on torch process groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ..calls.groups import group_rank, member
from ..group import names as groups
from ..group.names import GroupLike, global_ranks, host_ranks, rank_and_size
from ..group.ranks import check_rank, different_ranks


class GlobalComm:
    """MindSpore's facts about the group of all ranks: its name, which any ``group`` argument takes, and its backend."""

    WORLD_COMM_GROUP = "hccl_world_group"
    BACKEND = "unisono"


def init(backend_name: str | None = None) -> None:
    """Makes the default group, on the unisono backend unless told; does nothing if there is one.

    MindSpore's own name for its CPU backend, "mccl", means unisono too.

    Args:
        backend_name: None, "unisono" or "mccl", or another backend that torch knows
    """
    if dist.is_initialized():
        return
    if backend_name in (None, "unisono", "mccl"):
        groups.default_group()
    else:
        dist.init_process_group(backend_name)


def create_group(group: str, rank_ids: Sequence[int]) -> None:
    """Makes a group of some of the default group's ranks, in the order given, to be used by its name.

    Its members call it together; other ranks may call it too, and are not in the group then.

    Args:
        group: the new name
        rank_ids: the members' global ranks, in their order
    """
    if not isinstance(group, str):
        raise TypeError(f"The argument 'group' must be type of string, but got 'group' type : {type(group)}.")
    if group in groups.WORLD_NAMES or groups.is_known(group):
        raise ValueError(f"The group {group!r} exists already.")
    world = groups.default_group()
    ranks = different_ranks("rank_ids", rank_ids, world.size())
    if not ranks:
        raise ValueError("argument 'rank_ids' must name at least one rank, got []")
    if world.rank() not in ranks:
        groups.remember(group, None)
        return
    made = dist.new_group(ranks, use_local_synchronization=True, group_desc=group, sort_ranks=False)
    groups.remember(group, made)


def destroy_group(group: str) -> None:
    """Gives a group up that :func:`create_group` made.

    Args:
        group: its name
    """
    if not isinstance(group, str):
        raise TypeError(f"The argument 'group' must be type of string, but got 'group' type : {type(group)}.")
    if group in groups.WORLD_NAMES:
        raise ValueError(f"The group {group!r} is the default group; torch.distributed.destroy_process_group ends it.")
    found = groups.resolve(group)
    groups.forget(group)
    if found is not None:
        groups.end(found)


def get_rank(group: GroupLike = None) -> int:
    """This process's rank in the group.

    Args:
        group: None for the default group, a name, a torch ProcessGroup or a unisono.Group

    Returns:
        The rank.
    """
    return rank_and_size(member("get_rank", group))[0]


def get_group_size(group: GroupLike = None) -> int:
    """The number of ranks in the group.

    Args:
        group: None for the default group, a name, a torch ProcessGroup or a unisono.Group

    Returns:
        The number of ranks.
    """
    return rank_and_size(member("get_group_size", group))[1]


def get_local_rank(group: GroupLike = None) -> int:
    """This process's number among the group's ranks on its host.

    Args:
        group: None for the default group, a name, a torch ProcessGroup or a unisono.Group

    Returns:
        The number, from 0.
    """
    found = member("get_local_rank", group)
    here = host_ranks(found)
    return here.index(global_ranks(found)[rank_and_size(found)[0]])


def get_local_rank_size(group: GroupLike = None) -> int:
    """The number of the group's ranks on this process's host.

    Args:
        group: None for the default group, a name, a torch ProcessGroup or a unisono.Group

    Returns:
        The number of ranks here.
    """
    return len(host_ranks(member("get_local_rank_size", group)))


def get_world_rank_from_group_rank(group: GroupLike, group_rank_id: int) -> int:
    """The global rank of a rank of the group.

    Args:
        group: None for the default group, a name, a torch ProcessGroup or a unisono.Group
        group_rank_id: a rank in that group

    Returns:
        The global rank.
    """
    ranks = global_ranks(member("get_world_rank_from_group_rank", group))
    return ranks[check_rank("group_rank_id", group_rank_id, len(ranks))]


def get_group_rank_from_world_rank(world_rank_id: int, group: GroupLike) -> int:
    """The rank in the group of a process given by its global rank.

    Args:
        world_rank_id: a global rank
        group: None for the default group, a name, a torch ProcessGroup or a unisono.Group

    Returns:
        Its rank in the group.
    """
    return group_rank("get_group_rank_from_world_rank", "world_rank_id", world_rank_id, group)


def get_process_group_ranks(group: GroupLike = None) -> list[int]:
    """The global ranks of the group's members, by group rank.

    Args:
        group: None for the default group, a name, a torch ProcessGroup or a unisono.Group

    Returns:
        The global ranks.
    """
    return list(global_ranks(member("get_process_group_ranks", group)))
