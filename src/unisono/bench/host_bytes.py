"""Bytes that leave a host in a call: what must go, by formula, and what was counted on its interface.

S is the size of the whole, C the part of it that belongs to the host's ranks, L their number, H the number of hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.testing.hosts import sent_by

from .apart.cases import ITEM_BYTES, Case

FORMULAS = {
    "all_reduce": "2(H-1)/H S",
    "reduce": "S of every host but the root's",
    "broadcast": "S, from host to host",
    "all_gather": "(H-1) C",
    "reduce_scatter": "S - C",
    "gather": "C of every host but the root's",
    "scatter": "S - C of the root's host",
    "all_to_all": "L (S - C)",
}


def must_leave(case: Case, host_of: Sequence[int]) -> list[float] | None:
    """By host; the root is in the first rank's host. None for operations without a formula.

    >>> must_leave(Case("all_gather", 8, (1, 1, 2, 4), "int8"), [0, 0, 1, 1])
    [2.0, 6.0]
    """
    hosts, whole = max(host_of) + 1, float(case.size_bytes)
    found = []
    for host in range(hosts):
        mine = [count for count, place in zip(case.counts, host_of, strict=True) if place == host]
        part = float(sum(mine) * ITEM_BYTES[case.dtype])
        has_root = host == host_of[0]
        by_op = {
            "all_reduce": 2 * (hosts - 1) / hosts * whole,
            "reduce": 0.0 if has_root else whole,
            "broadcast": 0.0 if host == (host_of[0] - 1) % hosts else whole,  # the last one sends it no further
            "all_gather": (hosts - 1) * part,
            "reduce_scatter": whole - part,
            "gather": 0.0 if has_root else part,
            "scatter": whole - part if has_root else 0.0,
            "all_to_all": len(mine) * (whole - part),
        }
        if case.op not in by_op:
            return None
        found.append(by_op[case.op])
    return found


def count_sent(namespaces: Sequence[str], turn: Callable[[int, int], float], case: Case) -> list[float]:
    """Bytes per call that leave each host, with headers and acknowledgements.

    A turn holds a barrier besides its calls: the difference of a long and a short turn does not.
    """
    calls = 1 if case.size_bytes >= 16 << 20 else 4 if case.size_bytes >= 1 << 20 else 20
    totals = []
    for number in (1, 1 + calls):
        before = sent_by(namespaces)
        turn(0, number)
        totals.append([after - start for after, start in zip(sent_by(namespaces), before, strict=True)])
    return [max(0.0, (long - short) / calls) for short, long in zip(*totals, strict=True)]
