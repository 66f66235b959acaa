"""docs/ascend.md is true: what it lists as covered is there, what it lists as not emulated says so."""

import importlib
import pathlib
import re

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs" / "ascend.md").read_text()
NAME = re.compile(r"`((?:torch\.npu|torch\.distributed|torch_npu|mindspeed|mindspore)(?:\.\w+)*)`")


def names(heading):
    section = DOCUMENT.split(f"## {heading}\n")[1].split("\n## ")[0]
    return sorted(set(NAME.findall(section)))


def find(name):
    """The object of a dotted name, as a script would come by it."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            if not hasattr(found, "__path__"):
                raise
            found = importlib.import_module(".".join(parts[:i]))
    return found


def _find_all(group, wanted):
    for name in wanted:
        find(name)


def _miss_all(group, wanted):
    errors = {}
    for name in wanted:
        try:
            find(name)
        except (AttributeError, ImportError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def test_what_is_covered_is_there(npu_rank):
    listed = names("What is covered")
    assert len(listed) > 60
    npu_rank.run(_find_all, listed)


def test_what_is_not_emulated_says_so(npu_rank):
    listed = names("What is not emulated")
    assert len(listed) > 15
    (errors,) = npu_rank.run(_miss_all, listed)
    for name in listed:
        assert errors[name].startswith(("NotEmulatedError: ", "NotEmulatedImportError: ")), errors[name]
        assert f"{name} is not emulated by unisono.ascend" in errors[name]
        assert "docs/ascend.md" in errors[name]
