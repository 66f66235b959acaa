"""What the flight recorder costs: the same small calls with and without it, in turns.

    unisono bench recorder
    unisono bench recorder -n 2 --rounds 400 --json

A turn is some calls of 8 bytes; every other one runs with the recorder switched off, which only this command does. The
time of a turn is that of the slowest rank; `least` compares the fastest turns, `median` the usual ones. With one rank a
call waits for nobody, so nothing hides the recorder; with several it works while the others' requests are on their way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from unisono import _core
from unisono.group.group import Group
from unisono.testing import RankPool

_CALLS = 500  # of a turn
# The source line of a call is looked for in files that are not the package's own; so this is not in one of them.
_PROGRAM = """
def turn(group, x, calls, clock):
    began = clock()
    for _ in range(calls):
        group.all_reduce(x)
    return clock() - began
"""


def _turns(group: Group, rounds: int) -> dict[bool, list[float]]:
    """Microseconds of a call in each turn, with and without the recorder."""
    found: dict[bool, list[float]] = {True: [], False: []}
    x = torch.ones(2)
    program: dict[str, Any] = {}
    exec(compile(_PROGRAM, "program.py", "exec"), program)
    for turn in range(2 * rounds + 20):
        on = turn % 2 == 0
        _core.record_calls(on)
        group.barrier()
        took_s = program["turn"](group, x, _CALLS, time.perf_counter)
        if turn >= 20:
            found[on].append(took_s / _CALLS * 1e6)
    _core.record_calls(True)
    return found


def measure(ranks: int, rounds: int) -> dict[str, Any]:
    """One row."""
    with RankPool(ranks, num_threads=1) as pool:
        per_rank = pool.run(_turns, rounds, timeout_s=600)
    slowest = {on: [max(turn) for turn in zip(*(rank[on] for rank in per_rank), strict=True)] for on in (True, False)}
    row: dict[str, Any] = {"ranks": ranks}
    for name, of in (("least", min), ("median", statistics.median)):
        with_it, without = of(slowest[True]), of(slowest[False])
        row |= {f"{name}_with_us": with_it, f"{name}_without_us": without, f"{name}_ratio": with_it / without}
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="unisono bench recorder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", default="1,2", help="how many, separated by commas (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    args = parser.parse_args(argv)
    rows = [measure(int(n), args.rounds) for n in args.ranks.split(",")]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(
        f"{'ranks':<8}{'least us with':>15}{'without':>10}{'ratio':>8}{'median us with':>17}{'without':>10}{'ratio':>8}"
    )
    for row in rows:
        print(
            f"{row['ranks']:<8}{row['least_with_us']:>15.3f}{row['least_without_us']:>10.3f}{row['least_ratio']:>8.3f}"
            f"{row['median_with_us']:>17.3f}{row['median_without_us']:>10.3f}{row['median_ratio']:>8.3f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
