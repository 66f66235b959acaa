"""A barrier that names who is missing: every rank tells rank 0 that it is here, rank 0 answers when all are."""

from __future__ import annotations

import time

import torch

from ..base.errors import CollectiveTimeoutError, with_facts
from ..base.handle import Handle
from ..group.group import Group

_LONGER_S = 10.0  # a receive that reaches its own time limit ends the group, so it is withdrawn before


def barrier(group: Group, limit_s: float, wait_all_ranks: bool, tag: int) -> None:
    """Passes when every rank has called it; ``tag`` is a new one each time, the same on all ranks.

    Rank 0 raises an error naming the first rank that did not come within ``limit_s``, or with ``wait_all_ranks`` all of
    them; the others learn only that rank 0 did not answer. Unlike a barrier that times out, the group stays usable.
    """
    word = torch.zeros(1, dtype=torch.uint8)
    if group.rank != 0:
        here = group.recv(word, 0, tag, async_op=True, timeout_s=limit_s + _LONGER_S)
        group.send(word.clone(), 0, tag)
        assert isinstance(here, Handle)
        try:
            here.wait(limit_s)
        except CollectiveTimeoutError:
            here._withdraw()
            raise CollectiveTimeoutError(
                f"[Rank {group.rank}]: Rank 0 did not answer in monitoredBarrier within {limit_s * 1000:.0f} ms; "
                "another rank may be missing, see the error of rank 0"
            ) from None
        return
    if limit_s <= 0:
        raise CollectiveTimeoutError(f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {limit_s * 1000:.0f} ms")
    arrivals = [
        (r, group.recv(torch.zeros_like(word), r, tag, async_op=True, timeout_s=limit_s + _LONGER_S))
        for r in range(1, group.size)
    ]
    end = time.monotonic() + limit_s
    missing: list[int] = []
    for r, arrival in arrivals:
        assert isinstance(arrival, Handle)
        try:
            arrival.wait(max(end - time.monotonic(), 1e-3))
        except CollectiveTimeoutError:
            missing.append(r)
            if not wait_all_ranks:
                break
    if missing:
        for _, arrival in arrivals:
            arrival._withdraw()  # type: ignore[union-attr]
        who = ("Ranks " if len(missing) > 1 else "Rank ") + ", ".join(map(str, missing))
        error = CollectiveTimeoutError(f"[Rank 0]: {who} failed to pass monitoredBarrier in {limit_s * 1000:.0f} ms")
        raise with_facts(error, "monitored_barrier", group.name, 0, missing)
    for r in range(1, group.size):
        group.send(word, r, tag)
