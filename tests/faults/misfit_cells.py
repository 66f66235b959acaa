"""Cells of the fault matrix: calls that do not fit together, or are wrong in themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.cells import Cell, Told


def _differ(wrong: Callable[[Cell], Any]) -> Callable[[Cell], Told]:
    def cell(c: Cell) -> Told:
        c.group.barrier()
        c.mark()
        found = c.told(lambda: wrong(c) if c.inject and c.rank == c.last else c.reduce(64, False))
        c.reduce()  # the group goes on
        return found

    return cell


different_op = _differ(lambda c: c.call("broadcast", torch.ones(64), 0))
different_shape = _differ(lambda c: c.call("all_reduce", torch.ones(65)))
different_dtype = _differ(lambda c: c.call("all_reduce", torch.ones(64, dtype=torch.float64)))
different_reduce_op = _differ(lambda c: c.call("all_reduce", torch.ones(64), "max"))


def different_root(c: Cell) -> Told:
    c.group.barrier()
    c.mark()
    return c.told(lambda: c.call("broadcast", torch.ones(8), int(c.inject and c.rank == c.last)))


def different_splits(c: Cell) -> Told:
    counts = [2] * c.size
    if c.inject and c.rank == c.last:
        counts[0], counts[1] = 1, 3
    c.group.barrier()
    c.mark()
    out = torch.empty(2 * c.size)
    return c.told(lambda: c.call("all_gather", out, torch.ones(counts[c.rank]), counts))


def extra_call(c: Cell) -> Told:
    """The last rank makes one call too many; at the deadline it knows who did not come, and all others hear of it."""
    c.group.barrier()
    c.mark()
    found = c.told(lambda: c.reduce(timeout_s=20.0))
    if not c.inject:
        return found
    if c.rank == c.last:
        found += c.told_for_good(lambda: c.reduce(timeout_s=0.4))
        c.word("told")
        return found
    c.await_word("told")
    return found + c.told_for_good(c.reduce)


def skipped_last_call(c: Cell) -> Told:
    """The last rank leaves out the last call; at the deadline the others know who did not come, and so does it."""
    c.group.barrier()
    c.mark()
    if c.inject and c.rank == c.last:
        c.await_word("told")
        return c.told_for_good(c.reduce)
    found = c.told_for_good(lambda: c.reduce(timeout_s=0.4 if c.inject else 20.0))
    c.word("told")
    return found


def skipped_call_before_others(c: Cell) -> Told:
    """The last rank leaves out a call and comes with the next: no numbers are mixed, and everybody is told."""
    c.group.barrier()
    c.mark()
    t, counts = torch.ones(64), [1] * c.size

    def both() -> None:
        if not (c.inject and c.rank == c.last):
            c.call("all_reduce", t)
        c.call("all_gather", torch.empty(c.size), torch.ones(1), counts)

    found = c.told(both)
    if c.inject:
        assert t.eq(1).all(), "half a call was made"
    return found


def wrong_splits(c: Cell) -> Told:
    """Local: nothing is sent, and the group goes on."""
    found: Told = []
    for counts in ([-1, *[1] * c.last], [1] * (c.size + 1), [5] * c.size) if c.inject else ([1] * c.size,):
        found += c.told(lambda counts=counts: c.call("all_gather", torch.empty(c.size), torch.ones(1), counts))
    assert len(found) == (3 if c.inject else 0), found
    c.reduce()
    return found
