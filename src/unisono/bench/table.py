"""The text a run prints: nccl-tests' columns first, one line per contender, and `#` before whatever is not a number.

The first nine columns are those of nccl-tests, in its order: size, count, type, redop, root, time, algbw, busbw,
#wrong.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .apart.cases import OPS
from .contenders import KINDS, LIMIT, ON_GLOO, OURS
from .plan import Place
from .ratios import compare, short
from .rows import free_bytes

NOTE = """\
# time: median over rounds, in us; a round's time is its slowest rank's, per call, over a batch of calls after an
# untimed call and a barrier; min and p95 are over the same rounds. Contenders take turns round by round.
# algbw = size / time; busbw = algbw x the share of each byte that must cross between ranks (docs/bench.md).
# limit: the least memory traffic of the operation, float32, done by plain threads (one per rank, at most one per CPU)
# on shared memory between flag barriers, in the same rounds; with --hosts plain sockets that carry what must leave
# each host. x limit: time / limit.
# x heap, x ordinary: how many times as long as unisono on such tensors, with its 95 % range; ~ means within the noise,
# ? that there were too few rounds to tell."""
LINE_EVERY_S = 30.0
SHORT_S = 2.0  # runs that end sooner show no progress
NAMES = ("count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "min", "p95", "limit")
UNITS = ("(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)", "(us)")
COLUMNS = (12, 11, 8, 7, 6, 9, 7, 7, 6, 9, 9, 9, 7)  # widths; the last columns are words


def show_bytes(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.4g} B"


def show_us(value: float | None) -> str:
    """At least three digits that count: 0.452, 12.34, 10533."""
    if value is None:
        return "-"
    return f"{value:.{3 if value < 1 else 2 if value < 1000 else 0}f}"


def machine_facts() -> dict[str, Any]:
    import unisono

    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    return {
        "unisono": getattr(unisono, "__version__", "unknown"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "caches": [path.read_text().strip() for path in sorted(caches.glob("index*/size"))],
        "load": list(os.getloadavg()),
        "memory_free": free_bytes(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def header(facts: dict[str, Any], command: list[str]) -> str:
    return (
        f"# unisono bench {shlex.join(command)}".rstrip() + "\n"
        f"# unisono {facts['unisono']} bench, {facts['date']}: torch {facts['torch']}, "
        f"python {facts['python']}, {facts['system']}\n"
        f"# {facts['cpu']}, {facts['cpus']} CPUs for us, caches {' '.join(facts['caches'])}, "
        f"{show_bytes(facts['memory_free'])} free, load {facts['load'][0]:.2f}\n" + NOTE
    )


def add_ratios(row: dict[str, Any]) -> None:
    """Completes a row from rows.measure(): bandwidths, time ÷ limit, and everybody's ratio to unisono."""
    limit, bus = row[LIMIT], OPS[row["op"]].bus(row["ranks"])
    for result in [*row["results"].values(), *([limit] if limit else [])]:
        result["algbw"] = row["size_bytes"] / result["time_us"] * 1e-3
        result["busbw"] = result["algbw"] * bus
        result["times_limit"] = result["time_us"] / limit["time_us"] if limit else None
    for name, result in row["results"].items():
        result["ratios"] = {}
        for kind in (*KINDS, ON_GLOO) if name == "gloo" else KINDS:
            base = row["results"].get(kind)
            if base is not None and kind != name:
                together = min(len(base["rounds_us"]), len(result["rounds_us"]))  # fewer, if one of them is very slow
                ratio = compare(result["rounds_us"][:together], base["rounds_us"][:together])
                result["ratios"][kind] = ratio.to_json()


def title_of(row: dict[str, Any]) -> str:
    """What one table, or one panel of a picture, is about."""
    words = [row["op"], f"{row['ranks']} rank" + ("s" if row["ranks"] != 1 else "")]
    if row["split"] not in ("-", "even"):
        words.append(f"split {row['split']}")
    if row["dtype"] != "float32":
        words.append(row["dtype"])
    if place := str(Place.of(row)):
        words.append(place)
    return ", ".join(words)


class Table:
    """Rows as text: a head for each title, one line per contender, then what is lacking, each told once per head."""

    def __init__(self) -> None:
        self.title, self.told = "", set[str]()

    def lines(self, row: dict[str, Any]) -> list[str]:
        lines = []
        if (title := title_of(row)) != self.title:
            self.title, self.told = title, set()
            lines += ["#", f"# {title}: {OPS[row['op']].about}", *HEAD]
        if "left_out" in row:
            return [*lines, f"# {show_bytes(row['size_bytes'])} left out: needs {show_bytes(row['left_out'])}"]
        lines += [_line(row, name) for name in row["results"]]
        lacking = [f"#   {name} lacking: {why}" for name, why in row["lacks"].items()]
        lines += [line for line in lacking if line not in self.told]
        self.told.update(lacking)
        return lines


def _line(row: dict[str, Any], name: str) -> str:
    result = row["results"][name]
    limit = row[LIMIT]["time_us"] if row[LIMIT] else None
    wrong = result["wrong"]
    cells = [
        *(str(row["size_bytes"]), str(row["count"]), row["dtype"], row["redop"], str(row["root"])),
        *(show_us(result["time_us"]), f"{result['algbw']:.2f}", f"{result['busbw']:.2f}"),
        *("N/A" if wrong is None else str(wrong), show_us(result["min_us"]), show_us(result["p95_us"])),
        *(show_us(limit), short(result["times_limit"]) if limit else "-"),
    ]
    ratios = [ratio_text(result["ratios"].get(kind)) for kind in KINDS]
    return f"{_columns(cells)}  {name:<18} {ratios[0]:<19} {ratios[1]:<19} {result['variant']}".rstrip()


def _columns(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS, strict=True))


HEAD = [
    f"#{_columns(('size', *NAMES, 'x limit'))[1:]}  who                x heap              x ordinary          how",
    f"#{_columns(('(B)', *UNITS, ''))[1:]}".rstrip(),
]


def ratio_text(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return "-"
    if ratio["low"] is None:
        return f"?{short(ratio['ratio'])}"
    mark = "~" if ratio["verdict"] == "noise" else ""
    return f"{mark}{short(ratio['ratio'])} [{short(ratio['low'])},{short(ratio['high'])}]"


def standing_lines(rows: list[dict[str, Any]]) -> list[str]:
    """For every peer: in how many cells unisono is ahead, behind, or too close to tell."""
    counts: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        for name, result in row.get("results", {}).items():
            if name.split()[-1] in OURS:
                continue
            for kind, ratio in result["ratios"].items():
                cell = f"{title_of(row)}, {show_bytes(row['size_bytes'])}"
                counts.setdefault((name, kind), {}).setdefault(ratio["verdict"], []).append(cell)
    lines = ["# unisono against the others, in cells (size by operation):"] if counts else []
    for (name, kind), cells in counts.items():
        numbers = [len(cells.get(verdict, [])) for verdict in ("slower", "faster", "noise")]
        text = (
            f"#   {name:<10} {kind:<9} ahead in {numbers[0]}, behind in {numbers[1]}, within the noise in {numbers[2]}"
        )
        behind = cells.get("faster", [])
        if behind:
            text += f"; behind: {'; '.join(behind[:4])}{' ...' if len(behind) > 4 else ''}"
        lines.append(text)
    return lines


class Progress:
    """How far a run is and when it may end, on standard error: one line on a terminal, else a line now and then."""

    def __init__(self, total: int, start: float) -> None:
        self.total, self.done, self.start, self.told = total, 0, start, start
        self.terminal = sys.stderr.isatty()

    def show(self, what: str) -> None:
        """Before a row; nothing in a run that ends soon."""
        now = time.monotonic()
        left = f", about {(now - self.start) / self.done * (self.total - self.done):.0f} s left" if self.done else ""
        text = f"{self.done}/{self.total} rows{left}; now {what}"
        if self.terminal and now - self.start > SHORT_S:
            filled = 24 * self.done // self.total
            sys.stderr.write(f"\r\x1b[K[{'#' * filled}{'.' * (24 - filled)}] {text}")
            sys.stderr.flush()
        elif not self.terminal and now - self.told > LINE_EVERY_S:
            self.told = now
            print(f"# {text}", file=sys.stderr, flush=True)

    def step(self) -> None:
        """After a row: room for what is printed about it."""
        self.done += 1
        if self.terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
