"""`ranks` runs functions on ranks that have a default process group on unisono, and the groups of world.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Pool
from tests.mutation import mutants
from tests.torch_backend import world


class Ranks:
    """A pool whose functions use torch.distributed, and get no other group."""

    def __init__(self, pool: Pool) -> None:
        self.size = pool.size
        self._pool = pool

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What `fn(*args)` returned on each rank."""
        return self._pool.run(world.call, mutants.chosen(), fn, args)

    def check(self, fn: Callable[..., list[str]], *args: Any) -> None:
        """Fail with the complaints that `fn(*args)` returned on the ranks."""
        lines = [f"rank {rank}: {line}" for rank, found in enumerate(self.run(fn, *args)) for line in found]
        assert not lines, f"{len(lines)} complaints, the first are:\n  " + "\n  ".join(lines[:12])


@pytest.fixture
def pool(pool: Pool) -> Pool:
    """Process groups are made before the leak guard looks."""
    pool.run(world.enter)
    return pool


@pytest.fixture
def ranks(pool: Pool) -> Ranks:
    return Ranks(pool)
