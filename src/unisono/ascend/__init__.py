"""Scripts written for Ascend (torch_npu, mindspeed, mindspore.communication) on a host without NPUs, unchanged.

    torchrun --nproc-per-node=2 -m unisono.ascend test.py …    ranks made by torchrun
    python -m unisono.ascend test.py …                         scripts that spawn their own

or, in a conftest.py or at the top of a program, :func:`install`. npu tensors are host memory, their operators the
CPU's, the backend "hccl" is unisono; docs/ascend.md says what is covered and what differs.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterable

from .missing import PACKAGES, NotEmulatedError

__all__ = ["NotEmulatedError", "install", "installed"]

_SHIMS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shims")
_installed: list[str] = []


def install(packages: Iterable[str] = PACKAGES, *, force: bool = False) -> list[str]:
    """Puts the stand-ins for torch_npu, mindspeed and mindspore in place, and makes npu a device of torch.

    Returns the names of those that are in place. A real package that is installed stays what it is unless ``force`` is
    given; next to a real torch_npu nothing is put in place of mindspeed either, whose functions take its tensors. Child
    processes find the stand-ins too. Calling it again is fine.
    """
    wanted = list(packages)
    unknown = [name for name in wanted if name not in PACKAGES]
    if unknown:
        raise ValueError(f"argument 'packages' must be of {', '.join(PACKAGES)}, got {', '.join(unknown)}")
    if not force:
        real = {name for name in PACKAGES if _is_real(name)}
        if "torch_npu" in real:
            real.add("mindspeed")
        wanted = [name for name in wanted if name not in real]
    if "torch_npu" in wanted or "mindspeed" in wanted:
        from . import adapt, hccl

        adapt.adapt_torch()
        hccl.register()
    from . import missing

    missing.watch_imports()
    for name in wanted:
        if name not in _installed:
            _show(os.path.join(_SHIMS, name))
            _installed.append(name)
    os.environ["UNISONO_ASCEND"] = ",".join(_installed)  # children do the same when they import torch
    return list(_installed)


def installed() -> list[str]:
    """The names of the packages that have stand-ins in place."""
    return list(_installed)


def _is_real(name: str) -> bool:
    """Whether a package is installed, or imported, that is not our stand-in."""
    module = sys.modules.get(name)
    if module is not None:
        return not hasattr(module, "__unisono__")
    path = [entry for entry in sys.path if not entry.startswith(_SHIMS)]
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path if finder is importlib.machinery.PathFinder else None)
        if spec is not None and spec.origin is not None and not spec.origin.startswith(_SHIMS):
            return True  # no origin: a folder of that name, which is no package
    return False


def _show(folder: str) -> None:
    """Lets this process and its children import what is in a folder, before all others."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if folder not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *inherited])
