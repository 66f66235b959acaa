"""Spans of elements in a tensor: of the chunk of each rank, and what two have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

Span = tuple[int, int]  # first element, and one after the last


def spans_of(counts: Sequence[int]) -> list[Span]:
    """Where each rank's chunk is in the whole."""
    ends = list(accumulate(counts))
    return list(zip([0, *ends], ends, strict=False))


def joined(spans: Sequence[Span]) -> list[Span]:
    """The spans without empty ones, those that touch put together."""
    runs: list[Span] = []
    for start, end in spans:
        if start == end:
            continue
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs


def overlap(one: Span, other: Span) -> Span:
    start, end = max(one[0], other[0]), min(one[1], other[1])
    return (start, end) if start < end else (start, start)
