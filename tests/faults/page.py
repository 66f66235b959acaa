"""Runs the whole fault matrix and writes docs/faults.md: what was raised, and how soon. ``make faults``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.faults import matrix

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"

HEAD = """# Faults, and what is told

Written by `make faults`, which injects each fault below into fresh ranks: {combinations}. *Told* is
what the ranks that must learn of it got, *worst* the longest time from the fault to the exception on any, *promise*
the bound; where that is a deadline, the time includes it. A cell without a time raises nothing: the results are
right on all ranks, or the error is local and comes before anything is sent. Tests run a diagonal of it, and every cell
also without its fault (`tests/faults/matrix.py`).

{where}

| fault | when | runs | told | worst | promise |
|---|---|---|---|---|---|
"""


def rows_of(rows: Sequence[matrix.Row]) -> list[tuple[str, str]]:
    """The first two columns of the page."""
    return [(row.fault, moment.name) for row in rows for moment in row.moments] + [
        (row.fault, "") for row in rows if not row.moments
    ]


def words(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e3 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--diagonal", action="store_true", help="each cell once: to try the command out")
    parser.add_argument("--no-slow", action="store_true", help="without cells that take gigabytes or many ranks")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    cases = list(matrix.diagonal() if options.diagonal else matrix.product())
    results: dict[matrix.Moment, list[tuple[str, str, float]]] = {}
    runs: dict[matrix.Moment, int] = {}
    failed = 0
    for case in cases:
        if case.moment.slow and options.no_slow:
            continue
        began = time.monotonic()
        try:
            results.setdefault(case.moment, []).extend(matrix.run(case))
        except AssertionError as error:
            failed += 1
            print(f"FAILED {case}: {error}", flush=True)
            continue
        runs[case.moment] = runs.get(case.moment, 0) + 1
        print(f"{time.monotonic() - began:6.1f} s  {case}", flush=True)
    lines = []
    for row in matrix.MATRIX:
        for moment in row.moments:
            told = results.get(moment, [])
            kinds = ", ".join(f"`{kind}`" for kind in sorted({kind for kind, _, _ in told})) or "right results"
            kinds = kinds if runs.get(moment) else "not run"
            worst = max((seconds for _, _, seconds in told), default=None)
            shown = words(worst) if moment.bound_s is not None else ""
            lines.append(
                f"| {row.fault} | {moment.name} | {runs.get(moment, 0)} | {kinds} | {shown} | {words(moment.bound_s)} |"
            )
    for row in matrix.MATRIX:
        if not row.moments:
            lines.append(f"| {row.fault} |  | – | {row.elsewhere} |  |  |")
    where = f"Here: {os.cpu_count()} processors, torch {torch.__version__}."
    combinations = "each cell once"
    if not options.diagonal:
        combinations = "2, 3 and 4 ranks, synchronous and asynchronous, on all processors and on one"
    options.out.write_text(HEAD.format(where=where, combinations=combinations) + "\n".join(lines) + "\n")
    print(f"{sum(runs.values())} runs, {failed} failed: {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
