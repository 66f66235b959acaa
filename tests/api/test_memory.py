"""What groups keep of the machine's memory while they are idle, and after they are gone."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import unisono
from unisono import _core
from unisono.testing import run_ranks

MIB = 1 << 20
GROUPS = 20


def _settled(most: int) -> int:
    """Bytes of this rank's heap that are in memory, once they are at most `most`, or after some seconds."""
    deadline = time.monotonic() + 15
    while _core.heap_usage()["resident"] > most and time.monotonic() < deadline:
        time.sleep(0.05)
    return _core.heap_usage()["resident"]


def _use(group: unisono.Group, tensor: torch.Tensor) -> None:
    """A call in this thread, one in the progress thread, a short one and a message."""
    group.all_reduce(tensor)
    handle = group.all_reduce(tensor, async_op=True)
    assert handle is not None
    handle.wait()
    group.all_reduce(torch.ones(3000))
    if group.rank == 0:
        group.send(tensor, 1)
    elif group.rank == 1:
        group.recv(tensor, 0)


def _use_all_at_once(groups: list[unisono.Group], tensor: torch.Tensor) -> None:
    tensors = [tensor.clone() for _ in groups]
    handles = [group.all_reduce(own, async_op=True) for group, own in zip(groups, tensors, strict=True)]
    for handle in handles:
        assert handle is not None
        handle.wait()


def _many_groups(world: unisono.Group, new: Callable[..., torch.Tensor], at_once: bool) -> tuple[float, float]:
    """MiB that an idle group adds to this rank, and that all of them have left behind."""
    tensor = new(MIB // 4).zero_()
    world.barrier()
    before = _core.heap_usage()["resident"]
    groups = [world.split(list(range(world.size))) for _ in range(GROUPS)]
    if at_once:
        _use_all_at_once(groups, tensor)
    for group in groups:
        _use(group, tensor)
    idle = _settled(before + GROUPS * MIB) - before
    world.barrier()
    for group in groups:
        group.close()
    del groups, group
    left = _settled(before + 2 * MIB) - before
    world.barrier()
    return idle / MIB / GROUPS, left / MIB


@pytest.mark.parametrize(
    ("size", "new", "at_once"),
    [(2, torch.empty, False), (2, unisono.empty, False), (2, torch.empty, True), (3, torch.empty, True)],
)
def test_groups_give_memory_back(size: int, new: Callable[..., torch.Tensor], at_once: bool) -> None:
    for idle, left in run_ranks(size, _many_groups, new, at_once):
        assert idle <= 1
        assert left <= 2  # MiB, of all of them


def _free_tensors(world: unisono.Group) -> tuple[float, bool]:
    """MiB left of freed tensors, and whether the memory can be used again."""
    before = _core.heap_usage()["resident"]
    tensors = [unisono.empty(8 * MIB, dtype=torch.uint8).fill_(1) for _ in range(4)]
    kept = tensors.pop(1)
    del tensors
    left = _settled(before + 11 * MIB) - before
    again = unisono.zeros(16 * MIB, dtype=torch.uint8)
    world.all_reduce(again)
    world.all_reduce(kept)
    return left / MIB, bool((again == 0).all()) and bool((kept == world.size).all())


def test_freed_tensors() -> None:
    for left, usable in run_ranks(2, _free_tensors):
        assert left <= 11
        assert usable
