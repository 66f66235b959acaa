"""Python imports only go down: a module uses its own folder and floors below. docs/architecture.md has the picture."""

import ast
from pathlib import Path

import pytest

import unisono

PACKAGE = Path(unisono.__file__).parent

# From the ground up; what stands in one line does not use its neighbours.
FLOORS = [
    {"_core", "version"},
    {"base"},
    {"group"},
    {"transport"},
    {"calls"},
    {"uneven", "comm_func", "fused", "torch_backend", "fsdp"},
    {"ascend", "mindspore", "serving", "torchcomms"},
    {"testing", "_yardstick"},
    {"trace"},
    {"bench", "demo", "doctor", "run", "top"},
    {"cli", "__init__"},
    {"__main__"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def modules():
    return [p for p in sorted(PACKAGE.rglob("*.py")) if "shims" not in p.parts]


def part_of(dotted):
    """The floor's name of a module given from the package on: "base" of "base.errors"."""
    return dotted.split(".")[0] if dotted else "__init__"


def imports(path):
    """(line, part of the package) for every import of the package's own modules, wherever it stands."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    package = here[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                whole = ".".join([*base, *([node.module] if node.module else [])])
            elif node.module and node.module.split(".")[0] == "unisono":
                whole = node.module.partition(".")[2]
            else:
                continue
            names = [whole] if whole else [alias.name if alias.name in FLOOR else "" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == "unisono"]
        for name in names:
            yield node.lineno, part_of(name)


def upward(path):
    mine = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for line, other in imports(path):
        if other == mine or FLOOR[other] < FLOOR[mine]:
            continue
        if other == "__init__" and FLOOR[mine] >= FLOOR["testing"]:
            continue  # tools use the package as users do
        yield f"{path.relative_to(PACKAGE)}:{line} of {mine} imports {other}"


def test_every_part_has_a_floor():
    parts = {p.relative_to(PACKAGE).with_suffix("").parts[0] for p in modules()}
    assert parts <= set(FLOOR), f"no floor for {parts - set(FLOOR)}"


# What the binding has for reading what users write, and the files that may use it.
READERS = {
    "are_exchanged", "cut_by_matrix", "cut_exchange", "cut_matrix", "cut_rows", "cut_tensor", "is_exchange", "is_part",
    "read_op",
}  # fmt: skip
MAY_READ = ("calls/", "base/ops.py")


def nodes(path, exempt):
    """The place and the syntax node of everything in a module, unless it is one of those that may."""
    name = str(path.relative_to(PACKAGE))
    if not name.startswith(exempt):
        for node in ast.walk(ast.parse(path.read_text())):
            yield f"{name}:{getattr(node, 'lineno', 0)}", node


def reads(path):
    """Lines that read splits, counts, matrices or ops by themselves."""
    for place, node in nodes(path, MAY_READ):
        names = set()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "_core":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.endswith("_core"):
            names = {alias.name for alias in node.names}
        for name in names & READERS:
            yield f"{place} {name}"


# Classes of groups and of transports, and the files that may ask for one; all others call the same verb of any.
KINDS = {
    "Group", "Communicator", "HostsTransport", "BackendTransport", "GlooTransport", "ListsTransport", "AscendTransport",
}  # fmt: skip
MAY_BRANCH = ("group/names.py", "transport/find.py")


def branches(path):
    """Lines that ask what kind of group or transport they have."""
    for place, node in nodes(path, MAY_BRANCH):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            named = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            named |= {n.attr for n in ast.walk(node.args[1]) if isinstance(n, ast.Attribute)}
            if named & KINDS:
                yield place


def held_at_fork(path):
    """Lines that make a lock for the whole process, which a child may find held: use base/fork.py."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and path.name != "fork.py":
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute) and node.attr in ("Lock", "RLock", "Condition", "Semaphore"):
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
@pytest.mark.parametrize("breaches", [upward, reads, branches, held_at_fork])
def test_the_house_is_in_order(breaches, path):
    assert next(breaches(path), None) is None


@pytest.mark.parametrize(
    ("breaches", "text", "found"),
    [
        (
            upward,
            "from ..base import errors\n\n\ndef later():\n    from ..group.group import Group\n",
            ["base/wrong.py:5 of base imports group"],
        ),
        (
            reads,
            "from . import _core\nfrom ._core import is_part\n\ncounts = _core.cut_rows([1], 1, 1, 1)\n",
            ["base/wrong.py:2 is_part", "base/wrong.py:4 cut_rows"],
        ),
        (
            branches,
            "isinstance(3, int)\nisinstance(g, Group)\nisinstance(t, (str, _core.Communicator))\n",
            ["base/wrong.py:2", "base/wrong.py:3"],
        ),
        (
            held_at_fork,
            "import threading as t\n\nlocks = {1: t.RLock()}\n\n\ndef inside():\n    return t.Lock()\n",
            ["base/wrong.py:3"],
        ),
    ],
)
def test_a_breach_is_found(breaches, text, found, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "base").mkdir()
    path = tmp_path / "base" / "wrong.py"
    path.write_text(text)
    assert sorted(breaches(path)) == found
