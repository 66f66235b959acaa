"""The stubs of the C++ modules name what the modules have, with the same parameters."""

import ast
import importlib
import pathlib
import re

import pytest

import unisono

STUBS = pathlib.Path(unisono.__file__).parent


def stub_of(module):
    """Names of a stub: functions and Class.method with their parameters, everything else with None."""
    found = {}

    def visit(node, prefix):
        if isinstance(node, ast.FunctionDef):
            a = node.args
            is_property = any(getattr(d, "id", "") == "property" for d in node.decorator_list)
            names = [arg.arg for arg in a.posonlyargs + a.args + a.kwonlyargs if arg.arg != "self"]
            found[prefix + node.name] = None if is_property else (names, bool(a.posonlyargs))
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
            for inner in node.body:
                visit(inner, f"{node.name}.")
        elif isinstance(node, ast.AnnAssign):
            found[prefix + node.target.id] = None

    for node in ast.parse((STUBS / f"{module}.pyi").read_text()).body:
        visit(node, "")
    return found


def names_of(module):
    """The same of the module itself; nanobind's functions carry their signatures as text."""
    found = {}

    def add(name, value):
        if hasattr(value, "__nb_signature__"):
            text = value.__nb_signature__[0][0]
            inside = re.search(r"\((.*)\) ->", text, re.S)[1]
            flat = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", inside)))
            names = [part.split(":")[0].split("=")[0].strip() for part in flat.split(",")]
            found[name] = [n for n in names if n not in ("self", "*", "/", "")]
        else:
            found[name] = None

    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            add(name, None)
            for inner, member in vars(value).items():
                has_constructor = inner == "__init__" and hasattr(member, "__nb_signature__")
                if has_constructor or not inner.startswith("_"):
                    add(f"{name}.{inner}", member)
        elif not name.startswith("_"):
            add(name, value)
    return found


@pytest.mark.parametrize("module", ["_core", "_yardstick"])
def test_stub(module):
    stub, real = stub_of(module), names_of(importlib.import_module(f"unisono.{module}"))
    assert {name for name in stub if not name.startswith("_")} == set(real)
    for name, parameters in real.items():
        if stub[name] is not None:
            names, positional = stub[name]
            assert parameters is not None, name
            assert len(parameters) == len(names) if positional else parameters == names, name
