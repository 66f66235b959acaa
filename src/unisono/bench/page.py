"""`--html`: the run as one page that needs no other file: pictures as inline SVG, and every number in tables."""

from __future__ import annotations

import math
import shlex
from html import escape
from typing import Any

from .contenders import KINDS, LIMIT, OURS
from .panels import COLOURS, LABELS, Line, Panel, caption, memory_ticks, panels_of, show_time, ticks_of
from .ratios import short
from .scaling import scaling_lines
from .table import NOTE, show_bytes, show_us, standing_lines, title_of
from .targets import judgement_lines

WIDTH, HEIGHT = 520, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 30

STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #767676; --line: #ddd; --back: #fff; --good: #0072b2;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #9a9a9a; --line: #3a3a3a; --back: #161616;
  --good: #56b4e9; --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 1180px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
.soft, figcaption { color: var(--soft); font-size: .85rem; } p { margin: .3rem 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg .title { font-weight: 600; font-size: 13px; } svg .grid { stroke: var(--line); stroke-width: 1; }
svg .limit { stroke: var(--ink); } svg circle:hover { r: 6; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .9rem; margin: 1rem 0; }
.legend i { display: inline-block; width: 1.6rem; border-top: 3px solid; vertical-align: middle; margin-right: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; } td small { color: var(--soft); } .ahead { color: var(--good); font-weight: 600; }
.behind { color: var(--bad); font-weight: 600; } .lacking { color: var(--soft); }
pre { font-size: .78rem; overflow-x: auto; border-left: 3px solid var(--line); padding-left: .8rem; }
"""


def make(document: dict[str, Any]) -> str:
    """The whole page."""
    panels = panels_of(document)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>unisono bench, {escape(document['machine']['date'])}</title><style>{STYLE}</style></head><body>",
        f"<h1>unisono bench</h1><p class='soft'>{escape(caption(document))}</p>",
        f"<p class='soft'>unisono bench {escape(shlex.join(document['command']))}</p>",
    ]
    if panels:
        scaling = panels[0].x_is_ranks
        parts += [] if scaling else [_legend(panels)]
        drawn = "".join(_draw(panel, [panel] if scaling else panels) for panel in panels)
        parts.append(f"<div class='panels'>{drawn}</div>")
    notes = scaling_lines(document) if "memory" in document else []
    notes += standing_lines(document["rows"])
    if "targets" in document:
        notes += judgement_lines(document["targets"])
    if notes:
        parts.append(f"<h2>What it says</h2><pre>{escape(_plain(notes))}</pre>")
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        tables.setdefault(title_of(row), []).append(row)
    parts += [f"<h2>{escape(title)}</h2>{_table(rows)}" for title, rows in tables.items()]
    legend = (
        "Each cell: median in µs, and as a multiple of the limit; least and 95th percentile under the pointer. Blue: "
        "unisono is ahead of everybody here by more than the noise. Red: faster than unisono on tensors in "
        "shared memory by more than the noise."
    )
    parts.append(
        f"<h2>How to read this</h2><p>{legend}</p><pre>{escape(_plain(NOTE.splitlines()))}</pre></body></html>"
    )
    return "\n".join(parts)


def _plain(lines: list[str]) -> str:
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def _legend(panels: list[Panel]) -> str:
    seen: dict[str, Line] = {}
    for panel in panels:
        for line in panel.lines:
            seen.setdefault(line.label, line)
    items = [
        f"<span><i style='border-color:{'var(--ink)' if label == LABELS[LIMIT] else line.colour};"
        f"border-top-style:{'dashed' if line.dashed else 'solid'}'></i>{escape(label)}</span>"
        for label, line in seen.items()
    ]
    return f"<div class='legend'>{''.join(items)}</div>"


class _Scale:
    """Where a value lies, on an axis that is logarithmic between two ends."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.span = math.log(low), math.log(high / low) or 1.0
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return round(self.start + (math.log(value) - self.low) / self.span * (self.end - self.start), 1)


def _draw(panel: Panel, together: list[Panel]) -> str:
    """One panel; those drawn together share their axes."""
    xs = ticks_of(together, 0, ranks=panel.x_is_ranks, size=not panel.x_is_ranks)
    ys = memory_ticks(panel) if panel.y_is_bytes else ticks_of(together, 1)
    places = [point[0] for other in together for line in other.lines for point in line.points]
    across = _Scale(min(places), max(places), LEFT + 8, WIDTH - RIGHT - 8)
    up = _Scale(ys[0], ys[-1], HEIGHT - BOTTOM, TOP)
    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(panel.title)}'>"]
    parts.append(f"<text class='title' x='{LEFT}' y='16'>{escape(panel.title)}</text>")
    for tick in ys:
        label = show_bytes(tick) if panel.y_is_bytes else show_time(tick)
        parts.append(f"<path class='grid' d='M{LEFT} {up(tick)}H{WIDTH - RIGHT}'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{up(tick) + 4}' text-anchor='end'>{label}</text>")
    for tick in [tick for tick in xs if min(places) <= tick <= max(places)]:
        label = f"{tick:g}" if panel.x_is_ranks else show_bytes(tick)
        parts.append(f"<path class='grid' d='M{across(tick)} {TOP}V{HEIGHT - BOTTOM}'/>")
        parts.append(f"<text x='{across(tick)}' y='{HEIGHT - BOTTOM + 16}' text-anchor='middle'>{label}</text>")
    for line in sorted(panel.lines, key=lambda line: line.bold):
        parts.append(_draw_line(line, panel, across, up))
    if panel.x_is_ranks:
        for number, line in enumerate(panel.lines):
            place = f"x='{LEFT + 14}' y='{TOP + 14 + 14 * number}'"
            parts.append(f"<text {place} style='fill:{line.colour}'>{escape(line.label)}</text>")
    return "".join(parts) + "</svg>"


def _draw_line(line: Line, panel: Panel, across: _Scale, up: _Scale) -> str:
    path = "M" + "L".join(f"{across(x)} {up(y)}" for x, y in line.points)
    colour = "" if line.colour == "#222222" else f"stroke='{line.colour}'"
    look = f"fill='none' {colour} stroke-width='{3 if line.bold else 1.6}' stroke-linejoin='round'"
    if line.dashed:
        return f"<path {'class=limit ' if not colour else ''}d='{path}' {look} stroke-dasharray='5 3'/>"
    dots = []
    for number, (x, y) in enumerate(line.points):
        where = f"{x:g} ranks" if panel.x_is_ranks else show_bytes(x)
        value = show_bytes(y) if panel.y_is_bytes else f"{show_us(y)} µs"
        if line.spread:
            least, most = line.spread[number]
            value += f" (least {show_us(least)}, 95 % below {show_us(most)})"
        text = escape(f"{line.label}, {where}: {value}")
        radius = 3.4 if line.bold else 2.4
        dots.append(
            f"<circle cx='{across(x)}' cy='{up(y)}' r='{radius}' fill='{line.colour}'><title>{text}</title></circle>"
        )
    return f"<path d='{path}' {look}/>" + "".join(dots)


def _table(rows: list[dict[str, Any]]) -> str:
    """Sizes down, contenders across."""
    names = list(dict.fromkeys(name for row in rows for name in [*row.get("results", {}), *row.get("lacks", {})]))
    heads = [f"<th style='color:{COLOURS.get(name.split()[-1], 'inherit')}'>{escape(name)}</th>" for name in names]
    lines = [f"<tr><th>size</th><th>limit</th>{''.join(heads)}<th>wrong</th></tr>"]
    for row in rows:
        if "left_out" in row:
            text = f"left out: needs {show_bytes(row['left_out'])}"
            lines.append(f"<tr><td>{show_bytes(row['size_bytes'])}</td><td class='lacking'>{text}</td></tr>")
            continue
        limit = show_us(row[LIMIT]["time_us"]) if row[LIMIT] else "-"
        cells = "".join(_cell(row, name) for name in names)
        counts = [result["wrong"] for result in row["results"].values()]
        wrong = "not checked" if None in counts else sum(counts)
        lines.append(f"<tr><td>{show_bytes(row['size_bytes'])}</td><td>{limit}</td>{cells}<td>{wrong}</td></tr>")
    return f"<div class='scroll'><table>{''.join(lines)}</table></div>"


def _cell(row: dict[str, Any], name: str) -> str:
    result = row["results"].get(name)
    if result is None:
        why = escape(row["lacks"].get(name, "not measured"), quote=True)
        return f"<td class='lacking' title='{why}'>lacking</td>"
    look = ""
    if name in KINDS:
        others = [r["ratios"].get(name) for other, r in row["results"].items() if other in LABELS and other not in OURS]
        if others and all(ratio and ratio["verdict"] == "slower" for ratio in others):
            look = "ahead"
    elif result["ratios"].get(KINDS[0], {}).get("verdict") == "faster":
        look = "behind"
    ratios = [
        f"{short(ratio['ratio'])} x {kind}"
        + (f" [{short(ratio['low'])}, {short(ratio['high'])}]" if ratio["low"] else "")
        for kind, ratio in result["ratios"].items()
    ]
    spread = f"least {show_us(result['min_us'])}, 95 % below {show_us(result['p95_us'])} µs"
    title = escape("; ".join([spread, *ratios, result["variant"]]), quote=True)
    multiple = "" if result["times_limit"] is None else f" <small>{short(result['times_limit'])} ×</small>"
    return f"<td class='{look}' title='{title}'>{show_us(result['time_us'])}{multiple}</td>"
