"""`--builds`: the same run by turns with two installed builds of unisono, and the second's times ÷ the first's."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .ratios import compare
from .table import ratio_text, show_bytes, show_us, title_of

TURNS = 8  # as many as a range needs

Times = dict[tuple[str, str], list[tuple[float, float]]]  # median and least by row and contender, turn by turn


def compare_builds(pythons: Sequence[str], turns: int, args: list[str]) -> int:
    """Runs `unisono bench` with `args` by turns in both; exit code 1 if a run fails."""
    times: list[Times] = [{}, {}]
    with tempfile.TemporaryDirectory(prefix="unisono-builds-") as folder:
        path = Path(folder, "out.json")
        for turn in range(turns):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                command = [pythons[which], "-m", "unisono.bench", *args, "-J", str(path)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
                if done.returncode:
                    print(f"{done.stdout[-2000:]}\n# {pythons[which]} ended with {done.returncode}", file=sys.stderr)
                    return 1
                _add(times[which], json.loads(path.read_text())["rows"])
            print(f"# turn {turn + 1} of {turns} done", file=sys.stderr, flush=True)
    print("\n".join(build_lines(times[0], times[1], pythons)))
    return 0


def _add(times: Times, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for name, result in row.get("results", {}).items():
            key = f"{title_of(row)}, {show_bytes(row['size_bytes'])}", name
            times.setdefault(key, []).append((result["time_us"], result["min_us"]))


def build_lines(first: Times, second: Times, names: Sequence[str]) -> list[str]:
    """One line for each row and contender that both have."""
    lines = [
        *(f"# {letter}: {name}" for letter, name in zip("AB", names, strict=True)),
        "# us, medians over turns: of a turn's median, then of its least round, which foreign load disturbs less;",
        "# B / A with its 95 % range, ~ means within the noise, ? that there were too few turns to tell",
        f"#{'A':>9}{'B':>10}  {'B / A':<19}{'least A':>10}{'least B':>10}  {'B / A':<19} {'who':<18} row",
    ]
    for (row, who), mine in first.items():
        theirs = second.get((row, who), [])
        if len(theirs) != len(mine):
            continue
        cells = ""
        for a, b in zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True):  # medians, then least
            times = "".join(f"{show_us(statistics.median(values)):>10}" for values in (a, b))
            cells += f"{times}  {ratio_text(compare(b, a).to_json()):<19}"
        lines.append(f"{cells} {who:<18} {row}")
    return lines
