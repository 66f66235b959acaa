"""The text a run prints: nccl-tests' columns first, one line per contender, and `#` before whatever is not a number.

The first nine columns are those of nccl-tests, in its order: size, count, type, redop, root, time, algbw, busbw,
#wrong.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .apart.cases import OPS
from .contenders import KINDS, LIMIT, ON_GLOO, OURS
from .ratios import compare, short
from .rows import free_bytes

NOTE = """\
# time: median over rounds, in us; a round's time is its slowest rank's, per call, over a batch of calls after an
# untimed call and a barrier; min and p95 are over the same rounds. Contenders take turns round by round.
# algbw = size / time; busbw = algbw x the share of each byte that must cross between ranks (docs/bench.md).
# limit: the least memory traffic of the operation, float32, done by plain threads (one per rank, at most one per CPU)
# on shared memory between flag barriers, in the same rounds. x limit: time / limit.
# x heap, x ordinary: how many times as long as unisono on such tensors, with its 95 % range; ~ means within the noise,
# ? that there were too few rounds to tell."""
LINE_EVERY_S = 30.0
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


def header(facts: dict[str, Any]) -> str:
    return (
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
    if row["busy"]:
        words.append(f"{row['busy']} busy neighbours")
    return ", ".join(words)


def table_head(op: str, split: str, ranks: int, busy: int = 0) -> str:
    names = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "min", "p95", "limit")
    units = ("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)", "(us)")
    beside = f", {busy} busy neighbours" if busy else ""
    lines = [f"#\n# {op}, {ranks} rank{'s' if ranks != 1 else ''}, split {split}{beside}: {OPS[op].about}"]
    for texts in ((*names, "x limit"), (*units, "")):
        cells = [f"{text:>{width}}" for text, width in zip(texts, COLUMNS, strict=True)]
        words = "who                x heap              x ordinary          how" if texts[0] == "size" else ""
        lines.append(("#" + " ".join(cells)[1:] + f"  {words}").rstrip())
    return "\n".join(lines)


def table_lines(row: dict[str, Any], told: set[str]) -> list[str]:
    """A row as text: one line per contender, then what is lacking and was not `told` in this table yet."""
    if "left_out" in row:
        return [f"# {show_bytes(row['size_bytes'])} left out: needs {show_bytes(row['left_out'])}"]
    limit = row[LIMIT]["time_us"] if row[LIMIT] else None
    lines = []
    for name, result in row["results"].items():
        wrong = result["wrong"]
        cells = [
            *(str(row["size_bytes"]), str(row["count"]), row["dtype"], row["redop"], str(row["root"])),
            *(show_us(result["time_us"]), f"{result['algbw']:.2f}", f"{result['busbw']:.2f}"),
            *("N/A" if wrong is None else str(wrong), show_us(result["min_us"]), show_us(result["p95_us"])),
            *(show_us(limit), short(result["times_limit"]) if limit else "-"),
        ]
        text = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS, strict=True))
        ratios = [_ratio_text(result["ratios"].get(kind)) for kind in KINDS]
        lines.append(f"{text}  {name:<18} {ratios[0]:<19} {ratios[1]:<19} {result['variant']}".rstrip())
    lacking = [f"#   {name} lacking: {why}" for name, why in row["lacks"].items()]
    lines += [line for line in lacking if line not in told]
    told.update(lacking)
    return lines


def _ratio_text(ratio: dict[str, Any] | None) -> str:
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
    """How far a run is, on standard error: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = max(total, 1), 0, time.monotonic()
        self.shown = sys.stderr.isatty()
        self.told = self.start

    def show(self, what: str) -> None:
        if not self.shown:
            return
        filled = 24 * self.done // self.total
        bar = "#" * filled + "." * (24 - filled)
        sys.stderr.write(f"\r\x1b[K[{bar}] {self.done}/{self.total}  {what}  {self.left()}")
        sys.stderr.flush()

    def left(self) -> str:
        """The time left, at the pace so far."""
        spent = time.monotonic() - self.start
        return f"about {spent / self.done * (self.total - self.done):.0f} s left" if self.done else ""

    def step(self) -> None:
        self.done += 1
        self.clear()
        if not self.shown and time.monotonic() - self.told > LINE_EVERY_S and self.done < self.total:
            self.told = time.monotonic()
            print(f"# {self.done} of {self.total} rows, {self.left()}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
