"""Runs the whole fault matrix and writes docs/faults.md: what was raised, and how soon. ``make faults``."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.faults import matrix

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
KEPT = PAGE.parents[1] / "build" / "faults.json"  # what pieces of a run gave

LATE_S, TRIES = 0.1, 3  # beyond the promise, and how often: other programs take the processors now and then

HEAD = """# Faults, and what is told

Written by `make faults`, which injects each fault below into fresh ranks: {combinations}. *Told* is
what the ranks that must learn of it got, *worst* the longest time from the fault to the exception on any, *promise*
the bound; where that is a deadline, the time includes it. A run that is more than 100 ms later than its promise is
tried again; after three such tries `make faults` fails. A cell without a time raises nothing: the results are right on
all ranks, or the error is local and comes before anything is sent. Where calls are asynchronous anyway, or the fault is
in none, there is one run instead of a synchronous and an asynchronous one.

Tests run a diagonal of it (`tests/faults/matrix.py`): each cell but the slowest once, in one combination, and that
again without its fault, when nobody may be told anything. `make injected` proves that every cell can fail: it takes the
defence away that the cell needs, in a core that was built for it, or plants what the cell must find
(`tests/faults/proofs.py`).

{where}

| fault | when | runs | told | worst | promise |
|---|---|---|---|---|---|
"""


def rows_of(rows: Sequence[matrix.Row]) -> list[tuple[str, str]]:
    """The first two columns of the page."""
    return [(row.fault, moment.name) for row in rows for moment in row.moments] + [
        (row.fault, "") for row in rows if not row.moments
    ]


def cpu_name() -> str:
    """The processor, as the system calls it."""
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in facts.items()}.get("model name", "unknown")


def words(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e3 * seconds:.0f} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def run_cases(cases: Sequence[matrix.Case]) -> tuple[list[dict[str, Any]], int]:
    """What each case gave, and how many failed, or were late whenever they were tried."""
    done, failed = [], 0
    for case in cases:
        began = time.monotonic()
        tries = 0
        try:
            late_s = math.inf
            while late_s > LATE_S and tries < TRIES:
                tries += 1
                told = matrix.run(case)
                late_s = case.lateness_s(told)
        except AssertionError as error:
            failed += 1
            print(f"FAILED {case}: {error}", flush=True)
            continue
        if late_s > LATE_S:
            failed += 1
            print(f"LATE {case}: {words(late_s)} after its promise, in each of {tries} tries", flush=True)
        done.append(
            {"case": str(case), "row": case.row.fault, "moment": case.moment.name, "told": told, "tries": tries}
        )
        print(f"{time.monotonic() - began:6.1f} s  {case}" + (f", {tries} tries" if tries > 1 else ""), flush=True)
    return done, failed


def table(done: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the page's table."""
    lines = []
    for row in matrix.MATRIX:
        for moment in row.moments:
            runs = [run for run in done if (run["row"], run["moment"]) == (row.fault, moment.name)]
            told = [one for run in runs for one in run["told"]]
            kinds = ", ".join(f"`{kind}`" for kind in sorted({kind for kind, _, _ in told})) or "right results"
            kinds = kinds if runs else "not run"
            shown = words(max((seconds for _, _, seconds in told), default=None)) if moment.bound_s is not None else ""
            lines.append(f"| {row.fault} | {moment.name} | {len(runs)} | {kinds} | {shown} | {words(moment.bound_s)} |")
    return lines + [f"| {row.fault} |  | – | {row.elsewhere} |  |  |" for row in matrix.MATRIX if not row.moments]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--diagonal", action="store_true", help="each cell once: to try the command out")
    parser.add_argument("--no-slow", action="store_true", help="without cells that take gigabytes or many ranks")
    parser.add_argument(
        "--piece", default="1/1", help="K/N: every N-th case from the K-th on; the page has all pieces run so far"
    )
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    piece, of = (int(n) for n in options.piece.split("/"))
    product = matrix.diagonal(slow=True) if options.diagonal else matrix.product()
    cases = [case for case in product if not (options.no_slow and case.moment.slow)]
    done, failed = run_cases(cases[piece - 1 :: of])
    if of > 1:  # of earlier pieces
        kept = json.loads(KEPT.read_text()) if KEPT.exists() and piece > 1 else []
        mine = {run["case"] for run in done}
        done += [run for run in kept if run["case"] not in mine]
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(done))
    where = f"Here: {os.cpu_count()} processors ({cpu_name()}), torch {torch.__version__}; {len(done)} runs"
    again = sum(run.get("tries", 1) > 1 for run in done)
    where += f", {again} of them tried again." if again else ", none tried again."
    combinations = "each cell once"
    if not options.diagonal:
        combinations = "2, 3 and 4 ranks, synchronous and asynchronous, on all processors and on one"
    options.out.write_text(HEAD.format(where=where, combinations=combinations) + "\n".join(table(done)) + "\n")
    print(f"{len(done)} runs, {failed} failed: {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
