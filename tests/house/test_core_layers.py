"""The folders of core/ are layers: each includes only from itself and those before it, and has no friend above it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

CORE = Path(__file__).parents[2] / "core"
# Lowest first. The yardstick measures what the product is compared with, so it may know nothing of it but base.
LAYERS = ["base", "memory", "group", "kernels", "verbs", "engine", "python"]
MAY_INCLUDE = {layer: set(LAYERS[: i + 1]) for i, layer in enumerate(LAYERS)} | {"yardstick": {"base", "yardstick"}}

INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
FRIEND = re.compile(r"\s*friend\s+(?:class|struct)\s+(?:\w+::)*(\w+)")
CLASS = re.compile(r"\s*(?:class|struct)\s+(?:alignas\([^)]*\)\s*)?(\w+)\b[^;]*$")


def lines_of(core: Path) -> Iterator[tuple[str, str, str]]:
    """Folder, file:line and text of every line."""
    for path in sorted(core.rglob("*")):
        if path.suffix in (".h", ".cc"):
            name = path.relative_to(core)
            for number, text in enumerate(path.read_text().splitlines(), 1):
                yield name.parts[0], f"core/{name}:{number}", text


def upward_includes(core: Path) -> list[str]:
    found = []
    for folder, place, text in lines_of(core):
        if match := INCLUDE.match(text):
            target = match[1].split("/")[0]
            if target not in MAY_INCLUDE.get(folder, set()):
                found.append(f"{place}: {folder} may not include {match[1]}")
    return found


def foreign_friends(core: Path) -> list[str]:
    home: dict[str, set[str]] = {}
    for folder, _, text in lines_of(core):
        if match := CLASS.match(text):
            home.setdefault(match[1], set()).add(folder)
    return [
        f"{place}: {match[1]} is a class of {', '.join(sorted(home.get(match[1], {'no folder'})))}"
        for folder, place, text in lines_of(core)
        if (match := FRIEND.match(text)) and folder not in home.get(match[1], set())
    ]


def test_every_folder_has_its_place() -> None:
    assert {path.name for path in CORE.iterdir() if path.is_dir()} == set(MAY_INCLUDE)


def test_includes_go_down() -> None:
    found = upward_includes(CORE)
    assert not found, found[0]


def test_no_friends_in_other_layers() -> None:
    found = foreign_friends(CORE)
    assert not found, found[0]


def test_both_are_noticed(tmp_path: Path) -> None:
    for folder in ("group", "verbs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "verbs/mover.h").write_text("class Mover {\n  friend class Helper;\n};\nstruct Helper {\n};\n")
    (tmp_path / "group/group.h").write_text('#include "group/call.h"\n#include "verbs/mover.h"\nfriend class Mover;\n')
    assert upward_includes(tmp_path) == ["core/group/group.h:2: group may not include verbs/mover.h"]
    assert foreign_friends(tmp_path) == ["core/group/group.h:3: Mover is a class of verbs"]
