"""The default process group of a pooled rank, and groups of some ranks: made once, used by many tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup

import unisono
from tests.mutation import mutants, wrong
from unisono.testing import run_ranks


@dataclass(frozen=True)
class Members:
    """A process group and the default group's ranks in it; `group` is None on other ranks."""

    ranks: tuple[int, ...]
    group: ProcessGroup | None

    @property
    def rank(self) -> int:
        return self.ranks.index(dist.get_rank())


groups: dict[str, Members] = {}
gloo: ProcessGroup | None = None


def layouts(size: int) -> dict[str, tuple[int, ...]]:
    """Which groups there are: another order, two at once, overlapping ones, one rank alone."""
    everyone = tuple(range(size))
    found = {"world": everyone, "reversed": everyone[::-1], "alone": (size - 1,)}
    if size > 2:
        found |= {"evens": everyone[::2][::-1], "odds": everyone[1::2], "later": (*everyone[2:], 1)}
    return found


def enter(group: unisono.Group) -> None:
    """On a rank: make the default group and the others, once, and start all their threads."""
    global gloo
    if dist.is_initialized():
        return
    store = PrefixStore("torch", group._store)
    dist.init_process_group("unisono", store=store, rank=group.rank, world_size=group.size)
    groups.clear()
    for name, ranks in layouts(group.size).items():
        made = dist.group.WORLD if name == "world" else dist.new_group(list(ranks), sort_ranks=False, group_desc=name)
        groups[name] = Members(ranks, made if group.rank in ranks else None)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gloo = dist.new_group(backend="gloo")
    for members in groups.values():
        if members.group is not None:
            dist.all_reduce(torch.ones(4), group=members.group, async_op=True).wait()
    dist.all_reduce(torch.ones(4), group=gloo)
    dist.barrier()


def leave() -> None:
    """On a rank: destroy all of them."""
    global gloo
    groups.clear()
    gloo = None
    dist.destroy_process_group()


def call(group: unisono.Group, mutant: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """On a rank: `fn(*args)`; should it fail, the others hear of it rather than wait for their deadline."""
    enter(group)
    try:
        with wrong.applied(mutants.change_of(mutant)):
            return fn(*args)
    except BaseException:
        for members in groups.values():
            if isinstance(members.group, unisono.ProcessGroupUnisono):
                with contextlib.suppress(Exception):
                    members.group.abort()
        raise


def run_fresh(n: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(group, *args)` on new ranks, which have no process group yet; results by rank."""
    return run_ranks(n, _call_fresh, mutants.chosen(), fn, args)


def _call_fresh(group: unisono.Group, mutant: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with wrong.applied(mutants.change_of(mutant)):
        return fn(group, *args)
