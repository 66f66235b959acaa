"""What is not emulated says so: an error with the full name, and where to ask for it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

WHERE_TO_ASK = (
    "docs/ascend.md of unisono lists what is; if your script needs it, open an issue of unisono named after it"
)

#: Packages that unisono.ascend stands in for.
PACKAGES = ("torch_npu", "mindspeed", "mindspore")


class NotEmulatedError(AttributeError, NotImplementedError):
    """A name of torch_npu, mindspeed or mindspore that has no emulation; ``hasattr`` says False."""


class NotEmulatedImportError(ModuleNotFoundError, NotImplementedError):
    """A module of torch_npu, mindspeed or mindspore that has no emulation."""


def explain(name: str) -> str:
    """The text of these errors."""
    return f"{name} is not emulated by unisono.ascend\n  {WHERE_TO_ASK}"


def refuse(name: str) -> NoReturn:
    """Raises for a way of calling something that has no emulation."""
    raise NotImplementedError(explain(name))


def attribute_of(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that stands in for another."""

    def missing(name: str) -> Any:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise NotEmulatedError(explain(f"{module}.{name}"))

    return missing


def without_effect(name: str, why: str) -> None:
    """Warns of a setting that changes nothing here, and why."""
    warnings.warn(f"{name} changes nothing on the emulated device: {why}", UserWarning, stacklevel=3)


class _Finder(importlib.abc.MetaPathFinder):
    """Asked last for a module of the packages we stand in for: nobody has it.

    It turns ``import torch_npu.contrib`` and ``from torch_npu import npu_x`` into errors that say what is missing.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.partition(".")[0]
        if package in PACKAGES and name != package and hasattr(sys.modules.get(package), "__unisono__"):
            raise NotEmulatedImportError(explain(name), name=package)
        return None


def watch_imports() -> None:
    """Puts the finder behind all others, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
