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

Times = dict[tuple[str, str], list[float]]  # medians by row and contender, turn by turn


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
            times.setdefault(key, []).append(result["time_us"])


def build_lines(first: Times, second: Times, names: Sequence[str]) -> list[str]:
    """One line for each row and contender that both have."""
    lines = [
        f"# A: {names[0]}",
        f"# B: {names[1]}",
        "# medians over turns, in us; B / A with its 95 % range, ~ is noise",
    ]
    lines.append(f"#{'A':>9}{'B':>10}  {'B / A':<19} {'who':<18} row")
    for key, mine in first.items():
        if len(theirs := second.get(key, [])) != len(mine):
            continue
        a, b = (show_us(statistics.median(values)) for values in (mine, theirs))
        ratio = ratio_text(compare(theirs, mine).to_json())
        lines.append(f"{a:>10}{b:>10}  {ratio:<19} {key[1]:<18} {key[0]}")
    return lines
