"""What is expected of survivors, on one host and on several: for test_shrink.py and test_shrink_over_hosts.py."""

from __future__ import annotations

from typing import Any

from tests.faults.fresh import FreshRanks, finish


def expect_bits(said: list[Any], survivors: list[int], fresh: list[Any]) -> None:
    """What the survivors' group gave is what a fresh group of the same ranks gives, bit for bit."""
    for number, one in enumerate(said):
        assert (one["rank"], one["size"], one["ranks"]) == (number, len(survivors), survivors), one
        assert one["bits"] == fresh[number], f"rank {number} of {survivors} has other bits than a fresh group's"


def die_one_after_another(ranks: FreshRanks) -> None:
    """Of five ranks that run `repeatedly`, one after the other dies, the first one first, until one is left."""
    ranks.expect_all("inside")
    alive = list(range(5))
    for victim in (0, 3, 1, 4):
        ranks.signal([victim])
        gone = alive.index(victim)
        alive.remove(victim)
        said = [ranks.expect(r, "shrunk") for r in alive]
        assert all((one["ranks"], one["lost"]) == (alive, [gone]) for one in said), said
    ranks.expect(2, "done")
    finish(ranks, [2])
