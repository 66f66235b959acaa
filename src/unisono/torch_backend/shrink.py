"""``dist.shrink_group`` for groups on unisono.

torch 2.13 puts the smaller group's backend into a C++ process group, which takes backends written in C++ only, and
clones the store, whose server may have died with rank 0. Its checks, its arguments and what it does to its own tables
are the same here; the group comes from :meth:`unisono.Group.shrink`, which needs neither.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup, distributed_c10d

from .adapter import ProcessGroupAdapter
from .groups import find_adapter


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = distributed_c10d.SHRINK_DEFAULT,
    pg_options: Any | None = None,
) -> ProcessGroup:
    """Goes on without some ranks, dead or alive, as ``dist.shrink_group`` does for NCCL.

    All other ranks of ``group`` call it with the same list, and get a group of themselves in the old order. If the
    default group shrinks, that is the new default group, ranks count from 0 in it, and all other groups are destroyed.
    Should further ranks be lost, every survivor gets a PeerLostError that names them in ``peers``, and may call again
    with a longer list. What is under way in the old group ends with an error, with either flag::

        try: dist.all_reduce(t)
        except unisono.PeerLostError as error: group = unisono.shrink_group(list(error.peers))

    ``group.unisono_group.inherit(rank)`` has what a lost rank has kept (:func:`unisono.keep`).

    Args:
        ranks_to_exclude: ranks of ``group``; the same list on all callers
        group: None: the default group
        shrink_flags: one of torch's two; both act alike here
        pg_options: taken, as torch's function does, and not used

    Returns:
        The new process group.
    """
    distributed_c10d._validate_shrink_inputs(ranks_to_exclude, shrink_flags)
    target, adapter = find_adapter("shrink_group", group)
    facts = distributed_c10d._prepare_shrink_target_group(target)
    excluded = sorted(distributed_c10d._validate_and_process_excluded_ranks(ranks_to_exclude, facts))
    old_ranks = distributed_c10d.get_process_group_ranks(target)
    smaller, _ = adapter.unisono_group._shrink(excluded, None, strict=True)

    is_default = bool(facts["is_default_group"])
    if is_default:
        distributed_c10d._destroy_all_other_groups(exclude_group=target)
    about = distributed_c10d._extract_group_metadata(target)
    distributed_c10d._cleanup_original_group(target, is_default)
    made: ProcessGroup = ProcessGroupAdapter.group_type(smaller, about["store"])
    made._set_group_name(about["new_group_name"])
    made._set_group_desc("default:shrunken" if is_default else f"{about['original_group_name']}:shrunk")
    members = [rank for number, rank in enumerate(old_ranks) if number not in excluded]
    if is_default:
        distributed_c10d._update_default_pg(made)
        members = list(range(smaller.size))
    distributed_c10d._register_pg_in_world(
        made,
        backend_name=about["backend_name"],
        store=about["store"],
        group_name=about["new_group_name"],
        backend_config=about["backend_config"],
        rank_mapping={rank: number for number, rank in enumerate(members)},
    )
    return made
