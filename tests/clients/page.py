"""The table of docs/clients.md. Lines of programs that did not run this time stay as they are."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from tests.clients.environments import ROOT

if TYPE_CHECKING:
    from tests.clients.run import Row

PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEAD = [
    "| program | packages | what | ranks | results | gloo, ms | unisono, ms |",
    "|---|---|---|---|---|---|---|",
]


def line(row: Row) -> str:
    """A row as Markdown."""
    cells = [row.program, row.versions, row.title, row.ranks, row.outcome]
    cells += [_number(row.milliseconds.get(backend)) for backend in ("gloo", "unisono")]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def write(rows: list[Row], programs: list[str]) -> None:
    """Puts the rows of these programs into the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    kept = [text for text in old.splitlines() if text.startswith("| ") and _program(text) not in [*programs, "program"]]
    lines = sorted(kept + [line(row) for row in rows], key=_program)
    PAGE.write_text("\n".join([before + BEGIN, _machine(), "", *HEAD, *lines, END + after]))


def _program(text: str) -> str:
    return text.split("|")[1].strip()


def _machine() -> str:
    """Where the newest lines were measured, and what else the machine did."""
    return f"{cpu()}, {os.cpu_count()} cores; load average {os.getloadavg()[0]:.0f} at the end of the last run."


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def cpu() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(one.partition(":")[2].strip() for one in file if one.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
