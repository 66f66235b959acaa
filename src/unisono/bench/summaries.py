"""Tables over several rows: small calls by way of calling, the README's table, training steps beside others."""

from __future__ import annotations

from typing import Any

from .contenders import KINDS
from .plan import Place
from .ratios import short
from .table import ratio_text, show_bytes, show_us

Row = dict[str, Any]


def small_lines(rows: list[Row]) -> list[str]:
    """Microseconds by verb (down) and way of calling (across)."""
    tables: dict[tuple[int, Place], list[Row]] = {}
    for row in rows:
        tables.setdefault((row["ranks"], Place.of(row)), []).append(row)
    lines: list[str] = []
    for (ranks, place), found in tables.items():
        names = list(dict.fromkeys(name for row in found for name in row.get("results", {})))
        names.sort(key=lambda name: name.split()[-1] not in KINDS)  # peers last
        both = all(kind in names for kind in KINDS)
        where = ", ".join([f"{ranks} ranks", *filter(None, [str(place)])])
        lines.append(f"# small calls, {where}: median us per call, of a message for send and recv")
        heads = [*(_way(name, both) for name in names), "gloo / dist"]
        width = max(map(len, heads)) + 2
        lines.append(f"#{'verb':>19}{'bytes':>7}" + "".join(f"{head:>{width}}" for head in heads))
        for row in found:
            results = row.get("results", {})
            verb = "send and recv" if row["op"] == "p2p_latency" else row["op"]
            verb += f" {row['split']}" if row["split"] not in ("-", "even") else ""
            times = [show_us(results[name]["time_us"]) if name in results else "-" for name in names]
            ends = [results.get(name) for name in ("gloo", f"dist {KINDS[1]}")]
            times.append(short(ends[0]["time_us"] / ends[1]["time_us"]) if ends[0] and ends[1] else "-")
            lines.append(f"#{verb:>19}{row['size_bytes']:>7}" + "".join(f"{text:>{width}}" for text in times))
    return lines


def readme_lines(rows: list[Row]) -> list[str]:
    """The README's table in Markdown: times, and what gloo takes ÷ what unisono takes."""
    heads = ["", "in shared memory", "ordinary tensors", "gloo", "gloo ÷ unisono"]
    with_others = any(_others(row.get("results", {})) for row in rows)
    if with_others:
        heads.insert(3, "best other library")
    lines = [f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|" + "---|" * len(heads)]
    for row in rows:
        times = {name: result["time_us"] for name, result in row.get("results", {}).items()}
        if not all(kind in times for kind in KINDS):
            continue
        verb = f"{row['op']} {row['split']}" if row["split"] not in ("-", "even") else row["op"]
        cells = [f"{verb}, {show_bytes(row['size_bytes'])}", *(_time(times[kind]) for kind in KINDS)]
        others = _others(times)
        if with_others:
            cells.append(_time(min(times[name] for name in others)) if others else "-")
        if "gloo" in times:
            ratios = [short(times["gloo"] / times[kind]) for kind in KINDS]
            cells += [_time(times["gloo"]), f"{ratios[0]} ×, ordinary {ratios[1]} ×"]
        else:
            cells += ["-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _others(results: dict[str, Any]) -> list[str]:
    return [name for name in results if name not in (*KINDS, "gloo")]


def _time(us: float) -> str:
    return f"{short(us)} µs" if us < 1000 else f"{short(us / 1000)} ms"


def _way(name: str, both: bool) -> str:
    """A contender's name as the head of a column: "dist ordinary" is dist if there is one kind of memory only."""
    way, _, kind = name.rpartition(" ")
    if kind not in KINDS:
        return name
    return f"{way or 'Group'} {kind}" if both else way or "Group"


def matrix_lines(rows: list[Row]) -> list[str]:
    """gloo ÷ unisono of the training step, by place (down) and ranks (across); nothing if there are not several."""
    cells: dict[tuple[Place, int], str] = {}
    for row in rows:
        if row["op"] == "ddp_step" and "gloo" in row.get("results", {}):
            cells[Place.of(row), row["ranks"]] = ratio_text(row["results"]["gloo"]["ratios"].get("ordinary"))
    if len(cells) < 2:
        return []
    ranks = sorted({n for _, n in cells})
    lines = ["# ddp_step, gloo / unisono by place and ranks: above 1 unisono is faster; ~ means within the noise"]
    lines.append(f"#{'':>30}" + "".join(f"{f'{n} ranks':>20}" for n in ranks))
    for place in sorted({place for place, _ in cells}):
        texts = [cells.get((place, n), "-") for n in ranks]
        lines.append(f"#{str(place) or 'alone':>30}" + "".join(f"{text:>20}" for text in texts))
    return lines
