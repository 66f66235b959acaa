"""Which rank is on which host, and which bytes each lane carries: numbers only, the same on every rank.

There are as many lanes as the largest host has ranks, and on each host its ranks take them in turns: lane i is rank
i modulo their number. What a host sends, and what it gets, is cut by elements into equal shares, one for each lane,
whatever the ranks' own counts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ..spans import Span, joined


class Layout:
    """The hosts of a group, ordered by their lowest rank, as one rank sees them."""

    def __init__(self, rank: int, hosts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        order = sorted(range(len(hosts)), key=lambda h: min(hosts[h]))
        self.hosts = [sorted(hosts[h]) for h in order]
        self.names = [names[h] for h in order]
        self.rank = rank
        self.size = sum(map(len, hosts))
        self.host_of = [0] * self.size
        for h, ranks in enumerate(self.hosts):
            for r in ranks:
                self.host_of[r] = h
        self.host = self.host_of[rank]
        self.mine = self.hosts[self.host]  # the ranks of this host
        self.local = self.mine.index(rank)
        self.is_alone = len(self.mine) == 1  # no other rank on this host
        self.lanes = max(map(len, self.hosts))
        self.turns = -(-self.lanes // len(self.mine))  # lanes of one rank here
        self.most_turns = -(-self.lanes // min(map(len, self.hosts)))  # and on the smallest host
        self.others = [h for h in range(len(self.hosts)) if h != self.host]

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return len(self.hosts)

    @property
    def is_leader(self) -> bool:
        return self.local == 0

    def lane_peer(self, lane: int, host: int) -> int:
        """The rank of a host that is in a lane."""
        return self.hosts[host][lane % len(self.hosts[host])]

    def leader(self, host: int) -> int:
        return self.hosts[host][0]

    def words(self, rank: int) -> str:
        """``rank 3 on host 1 (node7)``."""
        h = self.host_of[rank]
        return f"rank {rank} on host {h} ({self.names[h]})"

    def host_words(self, host: int) -> str:
        ranks = ", ".join(map(str, self.hosts[host]))
        return f"host {host} ({self.names[host]}, rank{'s' if len(self.hosts[host]) > 1 else ''} {ranks})"

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the hosts' ranks follow one another."""
        return [r for ranks in self.hosts for r in ranks] == list(range(self.size))


def lane_pieces(spans: Sequence[Span], lanes: int, piece: int) -> list[list[Span]]:
    """The pieces of each lane: equal shares of all the spans together, each in parts of at most ``piece`` elements.

    A piece is one span: it ends where the memory has a gap.
    """
    runs = joined(spans)
    total = sum(end - start for start, end in runs)
    edges = [total * i // lanes for i in range(lanes + 1)]
    shares: list[list[Span]] = [[] for _ in range(lanes)]
    at = 0
    for start, end in runs:
        for lane, pieces in enumerate(shares):
            first, last = max(edges[lane], at), min(edges[lane + 1], at + end - start)
            for a in range(first, last, piece):
                pieces.append((start + a - at, start + min(a + piece, last) - at))
        at += end - start
    return shares
