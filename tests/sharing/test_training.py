"""Whole programs with new tensors shared: the same numbers as without, and nothing goes through the stage."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.torch_stack.worlds import world
from unisono import _core
from unisono.bench.plain_programs import PROGRAMS
from unisono.group import names as groups
from unisono.testing import run_ranks

WIDTH = 256
STEPS = 3


def _both_ways(group: unisono.Group, name: str) -> tuple[int, int]:
    """Bytes that were staged without and with the switch; the results must be the same bits."""
    # All that is not shared goes through the ring, whatever was measured here.
    _core.choose_tuning((0, 0), (0, 0), 256 << 10, 4 << 20)
    staged, results = [], []
    for on in (False, True):
        with unisono.share_new_tensors(enabled=on), world(group, "unisono"):
            assert dist.group.WORLD is not None
            step = PROGRAMS[name](dist.group.WORLD, WIDTH)
            results.append([step().clone() for _ in range(STEPS)])
            native = groups.native(dist.group.WORLD)
            assert native is not None
            staged.append(native.staged_bytes)
    for without, shared in zip(*results, strict=True):
        assert torch.equal(without, shared)
    return staged[0], staged[1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    for without, shared in run_ranks(2, _both_ways, name, timeout_s=110):
        assert without > 1 << 20, "the program is no test: nothing was staged without the switch"
        assert shared < without / 50
