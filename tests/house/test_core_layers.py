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
LOCK = re.compile(r"(?:\s*static |inline |constinit )*std::(?:\w+_)?mutex\b")  # static, or at the margin
ONCE = re.compile(
    r".*\b(?:once_flag|call_once|pthread_once)\b"
    r"|\s+static (?!const(?:expr|init) |inline |bool |void )[^()]* = .*[({\[]"
)
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


def process_wide_locks(core: Path) -> list[str]:
    """But for parts that are only built for tests and benches."""
    tools = ("core/yardstick/", "core/base/faults.cc")
    return [place for _, place, text in lines_of(core) if LOCK.match(text) and not place.startswith(tools)]


def test_process_wide_locks_are_open_in_a_child() -> None:
    found = process_wide_locks(CORE)
    assert not found, f"{found[0]}: a child of fork may find it held; base/fork.h has a better one"


def waits_for_first_use(core: Path) -> list[str]:
    """Initialised by the first thread that comes, while others wait; but for what needs the GIL, which a fork holds.

    Not the registration in fork.cc either: it is made while the module is loaded.
    """
    spared = ("core/yardstick/", "core/python/", "core/base/fork.cc")
    return [place for _, place, text in lines_of(core) if ONCE.match(text) and not place.startswith(spared)]


def test_nothing_is_initialised_while_others_wait() -> None:
    found = waits_for_first_use(CORE)
    assert not found, f"{found[0]}: a child of fork may wait here for a thread it does not have; use an atomic"


def test_all_are_noticed(tmp_path: Path) -> None:
    for folder in ("group", "verbs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "verbs/mover.h").write_text("class Mover {\n  friend class Helper;\n};\nstruct Helper {\n};\n")
    (tmp_path / "verbs/mover.cc").write_text("std::mutex all;\nvoid move() {\n  static std::mutex here;\n}\n")
    (tmp_path / "verbs/once.cc").write_text(
        "std::once_flag looked;\nint f() {\n  static const int a = g();\n  static constinit int b{0};\n"
        "  static const B c = [] {\n  static int f(int a = 0);\n}\n"
    )
    (tmp_path / "group/group.h").write_text('#include "group/call.h"\n#include "verbs/mover.h"\nfriend class Mover;\n')
    assert upward_includes(tmp_path) == ["core/group/group.h:2: group may not include verbs/mover.h"]
    assert foreign_friends(tmp_path) == ["core/group/group.h:3: Mover is a class of verbs"]
    assert process_wide_locks(tmp_path) == ["core/verbs/mover.cc:1", "core/verbs/mover.cc:3"]
    assert waits_for_first_use(tmp_path) == [f"core/verbs/once.cc:{line}" for line in (1, 3, 5)]
