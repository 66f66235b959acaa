"""The kinds of group that comm_func takes, made inside a rank, and what ranks bring to a call."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import unisono

# How a call names its group: a unisono.Group; the default group of a backend; a ProcessGroup of a backend; a name.
NATIVE = ("Group", "unisono", "unisono group", "unisono name")
OTHERS = ("gloo", "gloo name")
WORLDS = NATIVE + OTHERS


@contextlib.contextmanager
def default_group(group: unisono.Group, backend: str, folder: str) -> Iterator[Any]:
    """torch's default group on a backend, among the ranks of `group`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    numbers = torch.tensor([0])
    if group.rank == 0:
        numbers[0] = int.from_bytes(os.urandom(4), "little")
    group.broadcast(numbers, 0)
    store = dist.FileStore(f"{folder}/store-{int(numbers)}", group.size)
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size)
    group.barrier()  # gloo's ranks are still connecting to one another: nobody may leave before all have
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        gc.collect()


@contextlib.contextmanager
def world(group: unisono.Group, kind: str, folder: str) -> Iterator[Any]:
    """What to give as `group` to a call among all ranks, for one of WORLDS."""
    if kind == "Group":
        yield group
        return
    backend, _, form = kind.partition(" ")
    with default_group(group, backend, folder) as made:
        if form == "name":
            unisono.comm_func.create_group("everyone", list(range(group.size)))
            try:
                yield "everyone"
            finally:
                unisono.comm_func.destroy_group("everyone")
        else:
            yield made if form == "group" else None
