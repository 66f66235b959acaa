"""Four ranks for all of these tests: they import much of torch once, and sizes such as 5 and 3 do not divide by 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.torch_stack.worlds import on_both, on_unisono
from unisono.testing import RankPool

RANKS = 4
RUN_LIMIT_S = 100.0


def _nothing(group: Any) -> None:
    pass


class Stack:
    """Runs programs on the ranks; see `worlds`."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def compare(self, program: Callable[..., Any], *args: Any, tolerance: float = 0.0) -> None:
        """Fails unless gloo and unisono give the same."""
        results = self._pool.run(_compare, program, args, tolerance, timeout_s=RUN_LIMIT_S)
        lines = [f"rank {rank}: {line}" for rank, found in enumerate(results) for line in found]
        assert not lines, "unisono differs from gloo:\n  " + "\n  ".join(lines[:12])

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs a program on unisono and returns what each rank returned."""
        return self._pool.run(on_unisono, program, *args, timeout_s=RUN_LIMIT_S)


def _compare(group: Any, program: Callable[..., Any], args: tuple[Any, ...], tolerance: float) -> list[str]:
    return on_both(group, program, *args, tolerance=tolerance)


@pytest.fixture(scope="session")
def stack_pool(fork_server: None) -> Iterator[RankPool]:
    with RankPool(RANKS) as pool:
        yield pool


@pytest.fixture
def stack(stack_pool: RankPool) -> Stack:
    stack_pool.run(_nothing, timeout_s=RUN_LIMIT_S)  # starts new ranks after a test that failed
    return Stack(stack_pool)


@pytest.fixture
def ranks_first(request: pytest.FixtureRequest) -> None:
    if "stack" in request.fixturenames:
        request.getfixturevalue("stack")


@pytest.fixture(autouse=True)
def leak_guard(ranks_first: None, leak_guard: None) -> None:
    """As everywhere, but counting from when the ranks are there."""
