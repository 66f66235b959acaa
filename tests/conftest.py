"""Pools of ranks that live through many tests, and a leak guard on every test.

A test that takes the fixture `pool` and the parameter `size` runs functions on `size` persistent ranks. Tests
are ordered by that size, so that each pool starts once; at most two pools are alive.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

import unisono
from tests import leaks
from unisono.testing import RankPool, run_ranks, stop_fork_server

torch.set_num_threads(1)  # torch's own pool of threads would look like a leak

RUN_LIMIT_S = 100.0
ALIVE_POOLS = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_pool_size)


def _pool_size(item: pytest.Item) -> int:
    """Tests without a pool first, then by size."""
    if "pool" not in getattr(item, "fixturenames", ()):
        return 0
    return int(item.callspec.params["size"])  # type: ignore[attr-defined]


class Pool:
    """`size` ranks; after a run that failed the next one gets new ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks = RankPool(size)
        self.starts = 0
        self._alive = False

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        try:
            if not self._alive:
                self.starts += 1
                self._ranks.run(_warm_up, timeout_s=RUN_LIMIT_S)
                self._alive = True
            return self._ranks.run(fn, *args, timeout_s=RUN_LIMIT_S)
        except BaseException:
            self._alive = False
            raise

    def close(self) -> None:
        self._ranks.close()


def _warm_up(group: Any) -> None:
    """Start what lives as long as the group or the process: progress thread, torch's threads."""
    torch.ones(1 << 20).mul_(2).sum()
    group.all_reduce(torch.ones(4), async_op=True).wait()
    group.barrier()


def _nothing(group: Any) -> None:
    pass


def rank_holdings(group: Any, collect: bool = False) -> leaks.Holdings:
    if collect:
        gc.collect()
    return leaks.holdings()


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Start the process that ranks are forked from, and this process's heap, before any test counts."""
    run_ranks(1, _nothing)
    unisono.zeros(1)
    with tempfile.TemporaryDirectory() as folder:
        unisono.Group.from_store(FileStore(f"{folder}/store", 1), 0, 1).close()
    yield
    stop_fork_server()


@pytest.fixture(scope="session")
def pools(fork_server: None) -> Iterator[Callable[[int], Pool]]:
    kept: dict[int, Pool] = {}

    def pool_of(size: int) -> Pool:
        pool = kept.pop(size, None) or Pool(size)
        kept[size] = pool  # the newest is last
        for old in list(kept)[:-ALIVE_POOLS]:
            kept.pop(old).close()
        return pool

    yield pool_of
    for pool in kept.values():
        pool.close()


@pytest.fixture
def pool(size: int, pools: Callable[[int], Pool]) -> Pool:
    """`size` ranks that live through many tests."""
    return pools(size)


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which this process or a rank of its pool holds more than before."""
    # Ask for the pool first: what it holds is no leak.
    pool: Pool | None = request.getfixturevalue("pool") if "pool" in request.fixturenames else None
    ranks_before = pool.run(rank_holdings) if pool else []
    starts = pool.starts if pool else 0
    before = leaks.holdings()
    yield
    if pool is not None:
        ranks_after = pool.run(rank_holdings)  # new ranks if the test ended the old ones
        if pool.starts != starts:
            return
    lines = []
    if leaks.growth(before, leaks.holdings()):  # collecting garbage takes long, so only if need be
        gc.collect()
        lines = [f"this process: {line}" for line in leaks.settled_growth(before)]
    for rank, held in enumerate(ranks_before):
        if leaks.growth(held, ranks_after[rank]):
            grown = leaks.settled_growth(held, lambda rank=rank: pool.run(rank_holdings, True)[rank])
            lines += [f"rank {rank}: {line}" for line in grown]
    assert not lines, "left behind:\n  " + "\n  ".join(lines)
