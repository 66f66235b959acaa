"""What torch.distributed offers only to backends it knows by name, for groups on unisono: splitting, monitored barrier.

``dist.split_group`` wants an accelerator and ``dist.monitored_barrier`` the name "gloo"; both check before they ask the
group, which can do both.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import cast

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from ..group import names as groups
from ..group.names import GroupLike
from ..group.ranks import different_ranks, read_ranks
from .adapter import ProcessGroupAdapter


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> ProcessGroup | None:
    """Cuts a group into groups, as ``dist.split_group`` does for NCCL; no store and no new connections are needed.

    All ranks of ``parent_pg`` call it with the same ``split_ranks``, lists of ranks of the parent; each gets the group
    of its list, or None if it is in none. The result is known to torch.distributed, and
    ``dist.destroy_process_group`` ends it::

        unisono.split_group(None, [[0, 2], [1, 3]])   ->  two groups of two

    Args:
        parent_pg: the group to cut; None: the default group
        split_ranks: lists of ranks of the parent
        timeout: the new group's; None: as the parent's
        group_desc: a description that torch keeps

    Returns:
        The group of this rank's list, or None.
    """
    parent_group, parent = find_adapter("split_group", parent_pg)
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    lists = [read_ranks(f"split_ranks[{i}]", ranks) for i, ranks in enumerate(split_ranks)]
    different_ranks("split_ranks", chain(*lists), parent.size())
    mine: Sequence[int] = next((sorted(ranks) for ranks in lists if parent.rank() in ranks), [])
    child: ProcessGroup | None = parent.split_group(mine, timeout=timeout, group_desc=group_desc)
    if child is None:
        return None
    distributed_c10d._register_pg_in_world(
        child,
        backend_name=parent.name(),
        store=child.get_group_store(),
        group_name=child.group_name,
        backend_config=f"cpu:{parent.name()}",
        rank_mapping={dist.get_global_rank(parent_group, rank): i for i, rank in enumerate(mine)},
    )
    return child


def monitored_barrier(group: GroupLike = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """A barrier in which rank 0 names the ranks that did not come in time, as ``dist.monitored_barrier`` for gloo.

    Args:
        group: None for the default group, a name, a torch ProcessGroup or a unisono.Group
        timeout: None: the group's
        wait_all_ranks: True: name all ranks that are late, not the first alone
    """
    _, adapter = find_adapter("monitored_barrier", group)
    adapter.monitored_barrier(timeout, wait_all_ranks)


def find_adapter(function: str, group: GroupLike) -> tuple[ProcessGroup, ProcessGroupAdapter]:
    """The process group that is meant, which must be on unisono, and its adapter."""
    found = groups.resolve(group)
    adapter = groups.adapter_of(found)
    if adapter is None:
        raise TypeError(f"{function} takes a process group of backend unisono, got {found!r}")
    return cast(ProcessGroup, found), adapter
