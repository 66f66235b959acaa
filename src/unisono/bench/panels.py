"""What pictures of a run show, whoever draws them: panels of lines on logarithmic axes, their colours and ticks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from .contenders import KINDS, LIMIT
from .scaling import IDLE_MEMORY_BYTES
from .table import show_bytes, title_of

# Okabe and Ito's colours, which people with colour blindness can tell apart; blue is ours.
COLOURS = {
    "heap": "#0072b2",
    "ordinary": "#56b4e9",
    "fused": "#004c78",
    "on_gloo": "#332288",
    "gloo": "#8a8a8a",
    "openmpi": "#e69f00",
    "mpich": "#d55e00",
    "intelmpi": "#cc79a7",
    "oneccl": "#009e73",
}
LABELS = {
    "heap": "unisono, in shared memory",
    "ordinary": "unisono, ordinary tensors",
    "fused": "unisono, fused",
    "on_gloo": "unisono's calls on gloo",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intelmpi": "Intel MPI",
    "oneccl": "oneCCL",
    LIMIT: "limit (least memory traffic)",
}
SIZES_COLOURS = ("#440154", "#414487", "#2a788e", "#22a884", "#a5c910", "#e69f00", "#d55e00", "#7f2704")


@dataclass
class Line:
    label: str
    colour: str
    points: list[tuple[float, float]]
    spread: list[tuple[float, float]] = field(default_factory=list)  # least and 95th percentile of each point
    bold: bool = False
    dashed: bool = False


@dataclass
class Panel:
    title: str
    lines: list[Line]
    x_is_ranks: bool = False
    y_is_bytes: bool = False


def panels_of(document: dict[str, Any]) -> list[Panel]:
    """One panel per operation, split, dtype and number of ranks; by number of ranks if the run was about that."""
    rows = [row for row in document["rows"] if row.get("results")]
    if "memory" in document:
        return _scaling_panels(document, rows)
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["size_bytes"]:
            tables.setdefault(title_of(row), []).append(row)
    return [Panel(title, _lines(found)) for title, found in tables.items()]


def _lines(rows: list[dict[str, Any]]) -> list[Line]:
    names = list(dict.fromkeys(name for row in rows for name in row["results"]))
    found = []
    if any(row[LIMIT] for row in rows):
        points = [(row["size_bytes"], row[LIMIT]["time_us"]) for row in rows if row[LIMIT]]
        found.append(Line(LABELS[LIMIT], "#222222", points, dashed=True))
    for name in names:
        having = [(row["size_bytes"], row["results"][name]) for row in rows if name in row["results"]]
        points = [(size, result["time_us"]) for size, result in having]
        spread = [(result["min_us"], result["p95_us"]) for _, result in having]
        way, _, kind = name.rpartition(" ")
        label = LABELS.get(name) or (f"unisono, {way}, {kind}" if way else name)
        found.append(Line(label, COLOURS.get(kind, "#000000"), points, spread, name in KINDS, dashed=bool(way)))
    return found


def _scaling_panels(document: dict[str, Any], rows: list[dict[str, Any]]) -> list[Panel]:
    panels: list[Panel] = []
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        tables.setdefault((row["op"], row["split"]), []).append(row)
    for (op, split), found in tables.items():
        kind = next(kind for kind in [*KINDS, *found[0]["results"]] if kind in found[0]["results"])
        sizes: dict[int, list[tuple[float, float]]] = {}
        for row in found:
            nearest = 1 << (row["size_bytes"] * 4 // 3).bit_length() - 1 if row["size_bytes"] else 0
            if kind in row["results"]:
                sizes.setdefault(nearest, []).append((row["ranks"], row["results"][kind]["time_us"]))
        shades = SIZES_COLOURS * (1 + len(sizes) // len(SIZES_COLOURS))
        lines = [
            Line(show_bytes(size), shade, sorted(sizes[size]), bold=True)
            for size, shade in zip(sorted(sizes), shades, strict=False)
        ]
        title = f"{op}{'' if split in ('-', 'even') else f', split {split}'}, {kind} tensors"
        panels.append(Panel(title, lines, x_is_ranks=True))
    costs = [(float(n), max(cost["most_bytes"], 1.0)) for n, cost in document["memory"].items()]
    promise = [(n, float(IDLE_MEMORY_BYTES)) for n, _ in costs]
    lines = [Line("one group, per rank", COLOURS["heap"], costs, bold=True)]
    lines.append(Line("promised", "#222222", promise, dashed=True))
    return [*panels, Panel("memory of an idle group", lines, x_is_ranks=True, y_is_bytes=True)]


def caption(document: dict[str, Any]) -> str:
    """Where and with what the numbers were measured."""
    facts = document["machine"]
    peers = [f"{LABELS[name]} {_version(library)}" for name, library in document["peers"].items()]
    return (
        f"{facts['cpu']}, {facts['cpus']} CPUs · unisono {facts['unisono']}, torch {facts['torch']}"
        + "".join(f", {peer}" for peer in peers)
        + f" · medians, all in one run, {facts['date'][:10]}"
    )


def _version(library: str) -> str:
    found = re.search(r"\d+(\.\d+)+", library)
    return found[0] if found else library


def show_time(us: float) -> str:
    """A tick of the time axis: 100 ns, 1 µs, 10 ms."""
    for unit, scale in (("s", 1e6), ("ms", 1e3), ("µs", 1.0)):
        if us >= scale * 0.999:
            return f"{us / scale:g} {unit}"
    return f"{us * 1e3:g} ns"


def memory_ticks(panel: Panel) -> list[float]:
    """Powers of two around what was promised."""
    values = [point[1] for line in panel.lines for point in line.points]
    low = min(16, math.floor(math.log2(min(values))))
    high = max(21, math.ceil(math.log2(max(values))))
    return [2.0**power for power in range(low, high + 1)]


def ticks_of(panels: list[Panel], axis: int, ranks: bool = False, size: bool = False) -> list[float]:
    """Powers of ten, or of two for bytes and ranks, that cover all points; not more than nine."""
    values = [point[axis] for panel in panels for line in panel.lines for point in line.points]
    base = 2 if ranks or size else 10
    low = math.floor(math.log(min(values), base) + 1e-9)
    high = math.ceil(math.log(max(values), base) - 1e-9)
    step = max(1, -(-(high - low) // 8))
    if size and step > 1:
        step = -(-step // 2) * 2 if step != 3 else 3
    return [float(base) ** power for power in range(low, high + 1, step)]
