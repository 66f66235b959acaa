"""Medians, and ratios of medians with the range they may really lie in.

Contenders take turns round by round, so times of the same round met the same noise. The range comes from a bootstrap
over rounds: draw rounds again and again, the same for both contenders, and see how the ratio moves. Noise lasts longer
than a round (another program runs for a while), so rounds are drawn in blocks of neighbours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

DRAWS = 1000
CONFIDENCE = 0.95
FEWEST_ROUNDS = 8  # with fewer no range is given, and nothing is called faster or slower


@dataclass(frozen=True)
class Ratio:
    """How many times as long one takes as the other; `low` and `high` are None when there were too few rounds."""

    ratio: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """'slower', 'faster', or 'noise' when the range holds 1."""
        if self.low is None or self.high is None or self.low <= 1.0 <= self.high:
            return "noise"
        return "slower" if self.low > 1.0 else "faster"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def short(value: float) -> str:
    """Three digits that count: 0.98, 12.3, 456."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def compare(of: Sequence[float], to: Sequence[float], seed: int = 0) -> Ratio:
    """Median of `of` ÷ median of `to`, both by round.

    >>> compare([2.0] * 10, [1.0] * 10)
    Ratio(ratio=2.0, low=2.0, high=2.0)
    """
    if len(of) != len(to) or not of:
        raise ValueError(f"expected as many rounds of both, at least 1, got {len(of)} and {len(to)}")
    ratio = statistics.median(of) / statistics.median(to)
    rounds = len(of)
    if rounds < FEWEST_ROUNDS:
        return Ratio(ratio, None, None)
    block = math.isqrt(rounds)
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(rounds, (DRAWS, -(-rounds // block)), generator=random)
    drawn = ((starts[..., None] + torch.arange(block)) % rounds).reshape(DRAWS, -1)[:, :rounds]
    both = torch.tensor([list(of), list(to)], dtype=torch.float64)[:, drawn]
    medians = both.quantile(0.5, dim=2)
    ratios = medians[0] / medians[1]
    tail = (1.0 - CONFIDENCE) / 2
    low, high = ratios.quantile(torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return Ratio(ratio, low, high)


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, least and 95th percentile, in microseconds, with the rounds they come from."""
    ordered = sorted(seconds)
    return {
        "time_us": statistics.median(ordered) * 1e6,
        "min_us": ordered[0] * 1e6,
        "p95_us": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] * 1e6,
        "rounds_us": [float(f"{value * 1e6:.5g}") for value in seconds],
    }
