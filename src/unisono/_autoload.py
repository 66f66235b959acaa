"""What torch calls when it is imported (entry point group ``torch.backends``): makes the backend's name known.

It runs in every process that imports torch, so it imports nothing of unisono and never raises; except in children of
a process with unisono.ascend installed, which want the same.
"""

from __future__ import annotations

import os
import sys


def _create(opts: object, backend_options: object = None) -> object:
    from .torch_backend import create

    return create(opts, backend_options)


def register() -> None:
    """Registers "unisono" with torch.distributed; the package itself is imported when the first group is made."""
    try:
        import torch.distributed as dist

        if dist.is_available() and "UNISONO" not in dist.Backend._plugins:
            dist.Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu"])
    except Exception:
        pass  # `import unisono` registers again, and says what is wrong
    if os.environ.get("UNISONO_ASCEND"):
        _install_ascend(os.environ["UNISONO_ASCEND"].split(","))


def _install_ascend(packages: list[str]) -> None:
    spec = sys.modules["unisono"].__spec__
    if not getattr(spec, "_initializing", False):  # not on the way from `import unisono`, which needs torch first
        from .ascend import install

        install(packages, force=True)
