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


def must_go(case: Case, host_of: Sequence[int]) -> list[list[float]] | None:
    """From host to host; the root is in the first rank's host. None for operations without a formula.

    >>> must_go(Case("all_gather", 8, (1, 1, 2, 4), "int8"), [0, 0, 1, 1])
    [[0.0, 2.0], [6.0, 0.0]]
    """
    if case.op not in FORMULAS:
        return None
    hosts, whole, root = max(host_of) + 1, float(case.size_bytes), host_of[0]
    parts = [0.0] * hosts
    for count, host in zip(case.counts, host_of, strict=True):
        parts[host] += count * ITEM_BYTES[case.dtype]

    def between(a: int, b: int) -> float:
        by_op = {
            "all_reduce": 2 / hosts * whole,
            "reduce": whole if b == (a + 1) % hosts and a != root else 0.0,  # a chain that ends at the root's
            "broadcast": whole if b == (a + 1) % hosts and b != root else 0.0,  # the last one sends it no further
            "all_gather": parts[a],
            "reduce_scatter": parts[b],
            "gather": parts[a] if b == root else 0.0,
            "scatter": parts[b] if a == root else 0.0,
            "all_to_all": host_of.count(a) * parts[b],
        }
        return by_op[case.op]

    return [[0.0 if a == b else between(a, b) for b in range(hosts)] for a in range(hosts)]


def must_leave(case: Case, host_of: Sequence[int]) -> list[float] | None:
    """By host, to all others together.

    >>> must_leave(Case("all_gather", 8, (1, 1, 2, 4), "int8"), [0, 0, 1, 1])
    [2.0, 6.0]
    """
    table = must_go(case, host_of)
    return None if table is None else [sum(row) for row in table]


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
