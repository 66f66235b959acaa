"""What the benchmark's rows must reach, as data: ratios and times inside one run, and by how much they are met.

`unisono bench --targets` measures the rows these need, or judges the rows it was told to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .apart.cases import OPS
from .contenders import EVEN, ON_GLOO
from .plan import MATRIX_BYTES, MATRIX_FREE, MATRIX_PINNED, MATRIX_QUOTA, MATRIX_RANKS, Item, Place, make_case
from .table import show_bytes, title_of

Row = dict[str, Any]
KIB, MIB = 1 << 10, 1 << 20
MPI = ("openmpi", "mpich", "intelmpi")
EVERYBODY = ("gloo", *MPI, "oneccl")
PAIR = ("all_gather", "reduce_scatter")
TRIO = ("all_reduce", *PAIR)
SKEWS = ("1:3", "1:15", "0:1")
WAYS_OF_TINY = ("group", "dist", "comm_func")
ON_GLOO_SIZES = (8 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)

# A quantity of one row, given all rows; None where it was not measured.
Quantity = Callable[[Row, str, Sequence[Row]], float | None]


def time_us(row: Row, who: str, rows: Sequence[Row]) -> float | None:
    result = row["results"].get(who)
    return None if result is None else float(result["time_us"])


def times_limit(row: Row, who: str, rows: Sequence[Row]) -> float | None:
    result = row["results"].get(who)
    return None if result is None else result["times_limit"]


def times_float32(row: Row, who: str, rows: Sequence[Row]) -> float | None:
    """Time ÷ that of the row of float32, among rows of about the same bytes."""
    keys = ("op", "ranks", "split")
    for other in rows:
        alike = other["dtype"] == "float32" and all(other[key] == row[key] for key in keys)
        if alike and abs(other["size_bytes"] / row["size_bytes"] - 1) < 0.01:
            mine, theirs = time_us(row, who, rows), time_us(other, who, rows)
            return mine / theirs if mine and theirs else None
    return None


def times_even(row: Row, who: str, rows: Sequence[Row]) -> float | None:
    """Time ÷ that of as many bytes in equal chunks, in the same rounds."""
    mine, even = time_us(row, who, rows), time_us(row, f"{EVEN} {who}", rows)
    return mine / even if mine and even else None


def ahead_of(names: Sequence[str]) -> Quantity:
    """The nearest peer's time ÷ ours."""

    def nearest(row: Row, who: str, rows: Sequence[Row]) -> float | None:
        ratios = [row["results"][name]["ratios"].get(who) for name in names if name in row["results"]]
        return min((ratio["ratio"] for ratio in ratios if ratio), default=None)

    return nearest


def noise_allows(row: Row, who: str) -> bool:
    """Whether nobody is clearly faster than we are in this row."""
    ratios = [row["results"][name]["ratios"].get(who) for name in EVERYBODY if name in row["results"]]
    return all(ratio["verdict"] != "faster" for ratio in ratios if ratio)


@dataclass(frozen=True)
class Target:
    """One promise: in every row it is about, `quantity` is at most (or at least) `bound`."""

    text: str
    who: str
    quantity: Quantity
    bound: float
    unit: str
    ops: tuple[str, ...] = ()  # of any, if empty; then also of any size, split, ranks
    sizes: tuple[int, ...] = ()
    splits: tuple[str, ...] = ("-",)
    ranks: tuple[int, ...] = (2,)
    dtype: str = "float32"
    places: tuple[Place, ...] = (Place(),)
    at_least: bool = False
    noise: bool = False  # met as well where the noise leaves it open

    def items(self) -> list[Item]:
        """The rows this promise is about, and those it compares them with."""
        dtypes = [self.dtype, *(["float32"] if self.quantity is times_float32 else [])]
        return [
            Item(make_case(op, size, split, ranks, dtype, "sum"), split, self._ways(size), place)
            for op in self.ops
            for split in (self.splits if OPS[op].cut else ["-"])
            for size in self.sizes
            for ranks in self.ranks
            for dtype in dtypes
            for place in self.places
        ]

    def _ways(self, size: int) -> tuple[str, ...]:
        if self.who == ON_GLOO:
            return "group", ON_GLOO
        if self.quantity is times_even:
            return "group", EVEN
        return WAYS_OF_TINY if size == 8 and self.ranks == (2,) else ("group",)

    def about(self, row: Row) -> bool:
        if "results" not in row or row["redop"] not in ("sum", "none") or row["dtype"] != self.dtype:
            return False
        if Place.of(row) not in self.places:
            return False
        if not self.ops:
            return bool(row["ranks"] > 1)
        near = any(abs(row["size_bytes"] / size - 1) < 0.01 for size in self.sizes)
        in_splits = not OPS[row["op"]].cut or row["split"] in self.splits
        return bool(row["op"] in self.ops and row["ranks"] in self.ranks and near and in_splits)

    def shortfall(self, value: float) -> float:
        """How far from the bound, as a fraction of it; 0 or less when it is met."""
        return (self.bound - value) / self.bound if self.at_least else (value - self.bound) / self.bound


def _pairs(text: str, sizes: tuple[int, ...], bounds: dict[str, tuple[float, float]]) -> list[Target]:
    """≤ (heap, ordinary) times the limit, by operation; cut operations at 1:3."""
    return [
        Target(text, kind, times_limit, bound, "x limit", (op,), sizes, ("-",) if op == "all_reduce" else ("1:3",))
        for op, both in bounds.items()
        for kind, bound in zip(("heap", "ordinary"), both, strict=True)
    ]


LARGE = "64 MiB"
MIDDLE = "256 KiB and 1 MiB"
TARGETS: tuple[Target, ...] = (
    *_pairs(LARGE, (64 * MIB,), {"all_reduce": (1.25, 1.7), "all_gather": (1.25, 1.5), "reduce_scatter": (1.25, 1.7)}),
    *_pairs(MIDDLE, (256 * KIB, MIB), dict.fromkeys(TRIO, (1.6, 2.2))),
    *(
        Target("8 B in place", f"{way} {kind}".strip(), time_us, bound, "us", ("all_reduce",), (8,))
        for way, bound in (("", 1.0), ("comm_func", 2.5), ("dist", 6.0))
        for kind in ("heap", "ordinary")
    ),
    Target("8 B, 4 ranks", "heap", time_us, 12.0, "us", ("all_reduce",), (8,), ranks=(4,)),
    Target("1 MiB, 4 ranks", "heap", times_limit, 1.6, "x limit", ("all_reduce",), (MIB,), ranks=(4,)),
    Target("8 B, 8 ranks", "heap", time_us, 35.0, "us", ("all_reduce",), (8,), ranks=(8,)),
    Target("1 MiB, 8 ranks", "heap", times_limit, 2.0, "x limit", ("all_reduce",), (MIB,), ranks=(8,)),
    Target("bfloat16 64 MiB", "heap", times_float32, 1.2, "x float32", ("all_reduce",), (64 * MIB,), dtype="bfloat16"),
    *(
        Target(
            "uneven, 16 MiB and up", "heap", times_limit, 1.3, "x limit", (op,), (16 * MIB, 64 * MIB), ("even", *SKEWS)
        )
        for op in PAIR
    ),
    *(
        Target("skewed against even", "heap", times_even, 1.1, "x even", (op,), (16 * MIB, 64 * MIB), SKEWS)
        for op in PAIR
    ),
    *(
        Target("against MPI", "heap", ahead_of(MPI), bound, "x faster", (op,), (64 * MIB,), ("1:3",), at_least=True)
        for op, bound in (("all_gather", 1.5), ("reduce_scatter", 4.0))
    ),
    *(
        Target(
            "on gloo, its best",
            ON_GLOO,
            ahead_of(("gloo",)),
            1.0,
            "x faster",
            (op,),
            ON_GLOO_SIZES,
            ("1:3",),
            at_least=True,
            noise=True,
        )
        for op in PAIR
    ),
    *(
        Target(
            text,
            "ordinary",
            ahead_of(("gloo",)),
            1.0,
            "x faster",
            ("ddp_step",),
            (MATRIX_BYTES,),
            ranks=MATRIX_RANKS,
            places=places,
            at_least=True,
            noise=True,
        )
        for text, places in (
            ("training beside busy", MATRIX_FREE),
            ("the same, pinned", MATRIX_PINNED),
            ("training under quota", MATRIX_QUOTA),
        )
    ),
    *(
        Target("nobody is faster", kind, ahead_of(EVERYBODY), 1.0, "x faster", at_least=True, noise=True)
        for kind in ("heap", "ordinary")
    ),
)


def target_items() -> list[Item]:
    """The rows that all targets need; a row asked for twice has the ways of both."""
    merged: dict[tuple[Any, str, Place], Item] = {}
    for target in TARGETS:
        for item in target.items():
            key = item.case, item.split, item.place
            old = merged.get(key)
            ways = tuple(dict.fromkeys([*(old.ways if old else ()), *item.ways]))
            merged[key] = Item(item.case, item.split, ways, item.place)
    return sorted(merged.values(), key=lambda item: (item.case.ranks, *item.table, item.case.count))


def judge(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """For every target and operation the worst row, and whether it keeps the promise."""
    all_rows = [row for row in rows if "results" in row]
    findings = []
    for target in TARGETS:
        found: list[tuple[float, float, Row]] = []
        for row in all_rows:
            value = target.quantity(row, target.who, all_rows) if target.about(row) else None
            if value is not None:
                excused = target.noise and noise_allows(row, target.who)
                found.append((0.0 if excused else target.shortfall(value), value, row))
        worst = max(found, key=lambda entry: (entry[0], target.shortfall(entry[1])), default=None)
        findings.append(
            {
                "target": target.text,
                "who": target.who,
                "ops": list(target.ops) or ["all"],
                "bound": target.bound,
                "at_least": target.at_least,
                "unit": target.unit,
                "rows": len(found),
                "rows_met": sum(entry[0] <= 0 for entry in found),
                "worst": worst[1] if worst else None,
                "where": f"{title_of(worst[2])}, {show_bytes(worst[2]['size_bytes'])}" if worst else None,
                "missed_by": max(worst[0], 0.0) if worst else None,
                "verdict": "not measured" if worst is None else "met" if worst[0] <= 0 else "missed",
            }
        )
    return findings


def judgement_lines(findings: list[dict[str, Any]]) -> list[str]:
    lines = ["# targets, the worst row of each:"]
    for f in findings:
        bound = f"{'>=' if f['at_least'] else '<='} {f['bound']:g} {f['unit']}"
        what = f"#   {f['target']:<22} {'/'.join(f['ops']):<15} {f['who']:<18} {bound:<14}"
        if f["worst"] is None:
            lines.append(f"{what} not measured")
            continue
        verdict = "met" if f["verdict"] == "met" else f"MISSED by {f['missed_by']:.0%}"
        lines.append(f"{what} {f['worst']:>8.2f}  {verdict}, {f['rows_met']} of {f['rows']} rows; {f['where']}")
    met = sum(f["verdict"] == "met" for f in findings)
    missed = sum(f["verdict"] == "missed" for f in findings)
    lines.append(f"# {met} targets met, {missed} missed, {len(findings) - met - missed} not measured")
    return lines
