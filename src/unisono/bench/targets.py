"""What the benchmark's rows must reach, as ratios inside one run, and by how much they do or do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

LARGE_BYTES = 16 << 20
KINDS = {"heap": "heap tensors", "private": "ordinary tensors"}
TRIO = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Target:
    """One promise: `value(row)` is at most (or at least) `bound` in every row that `applies`."""

    text: str
    kind: str
    bound: float
    at_least: bool
    unit: str
    value: Callable[[Row, str], float | None]
    applies: Callable[[Row, bool], bool]  # row, more ranks than CPUs
    ops: tuple[str, ...] = TRIO

    def shortfall(self, value: float) -> float:
        """How far from the bound, as a fraction of it; 0 or less when it is met."""
        return (self.bound - value) / self.bound if self.at_least else (value - self.bound) / self.bound


def _of(row: Row, kind: str) -> float | None:
    return row[kind]["time_us"] if row.get(kind) else None


def _times_limit(row: Row, kind: str) -> float | None:
    time_us, limit = _of(row, kind), _of(row, "limit")
    return time_us / limit if time_us and limit else None


def _faster_than_gloo(row: Row, kind: str) -> float | None:
    time_us, gloo = _of(row, kind), _of(row, "gloo")
    return gloo / time_us if time_us and gloo else None


def _large(row: Row, crowded: bool) -> bool:
    return not crowded and row["ranks"] > 1 and row["size_bytes"] >= LARGE_BYTES


def _tiny(row: Row, crowded: bool) -> bool:
    return row["ranks"] == 2 and not crowded and row["size_bytes"] == 8


def _crowded(row: Row, crowded: bool) -> bool:
    return crowded


def _roomy(row: Row, crowded: bool) -> bool:
    return row["ranks"] > 1 and not crowded


TARGETS = (
    Target("(a) 16 MiB and more", "heap", 1.4, False, "x limit", _times_limit, _large),
    Target("(b) 8 bytes in place", "heap", 1.5, False, "us", _of, _tiny, ("all_reduce",)),
    Target("(b) 8 bytes in place", "private", 1.5, False, "us", _of, _tiny, ("all_reduce",)),
    Target("(c) 16 MiB and more", "private", 2.0, False, "x limit", _times_limit, _large),
    Target("(d) more ranks than CPUs", "heap", 1.0, True, "x gloo", _faster_than_gloo, _crowded),
    Target("(d) more ranks than CPUs", "private", 1.0, True, "x gloo", _faster_than_gloo, _crowded),
    Target("(e) every size", "heap", 8.0, True, "x gloo", _faster_than_gloo, _roomy),
    Target("(e) every size", "private", 8.0, True, "x gloo", _faster_than_gloo, _roomy),
)


def summarise(rows: Iterable[Row], cpus: int) -> list[dict[str, Any]]:
    """For every target and operation the worst row, and whether it keeps the promise."""
    findings = []
    plain = [row for row in rows if row["dtype"] == "float32" and row["redop"] in ("sum", "none")]
    for target in TARGETS:
        for op in target.ops:
            found: list[tuple[float, float, Row]] = []
            for row in plain:
                value = target.value(row, target.kind) if row["op"] == op else None
                if value is not None and target.applies(row, row["ranks"] > cpus):
                    found.append((target.shortfall(value), value, row))
            if not found:
                continue
            shortfall, value, row = max(found, key=lambda entry: entry[0])
            findings.append(
                {
                    "target": target.text,
                    "kind": target.kind,
                    "op": op,
                    "bound": target.bound,
                    "at_least": target.at_least,
                    "unit": target.unit,
                    "worst": value,
                    "ranks": row["ranks"],
                    "split": row["split"],
                    "size_bytes": row["size_bytes"],
                    "rows": len(found),
                    "rows_met": sum(entry[0] <= 0 for entry in found),
                    "missed_by": max(shortfall, 0.0),
                }
            )
    return findings


def summary_lines(findings: list[dict[str, Any]]) -> list[str]:
    if not findings:
        return []
    lines = ["# targets (float32, sum; the worst row of each):"]
    for f in findings:
        bound = f"{'>=' if f['at_least'] else '<='} {f['bound']:g} {f['unit']}"
        where = f"{f['ranks']} ranks, {f['split']}, {show_bytes(f['size_bytes'])}"
        verdict = "met" if f["missed_by"] == 0 else f"missed by {f['missed_by']:.0%}"
        lines.append(
            f"#   {f['target']:<25}{KINDS[f['kind']]:<17}{f['op']:<15}{bound:<15}"
            f"worst {f['worst']:>7.2f}  ({where:<26}) {verdict}, {f['rows_met']} of {f['rows']} rows"
        )
    return lines


def show_bytes(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} B"
