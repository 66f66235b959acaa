"""What torch calls when it is imported (entry point group ``torch.backends``): makes the name "unisono" known.

A package of its own, because it runs in every process that imports torch: it imports nothing of unisono before the
first group is made, and never raises, whatever is wrong with unisono; except in children of a process that has
unisono.ascend installed, which want the same.
"""

from __future__ import annotations

import os
import sys


def create(opts: object, backend_options: object = None) -> object:
    """Makes the group that init_process_group asks for; importing unisono puts its own function in this one's place."""
    from unisono.torch_backend.registration import create

    return create(opts, backend_options)


def register() -> None:
    """Registers "unisono" with torch.distributed."""
    try:
        import torch.distributed as dist

        if dist.is_available() and "UNISONO" not in dist.Backend._plugins:
            dist.Backend.register_backend("unisono", create, extended_api=True, devices=["cpu"])
    except Exception:
        pass  # `import unisono` registers again, and says what is wrong
    if os.environ.get("UNISONO_ASCEND"):
        _install_ascend(os.environ["UNISONO_ASCEND"].split(","))


def _install_ascend(packages: list[str]) -> None:
    spec = getattr(sys.modules.get("unisono"), "__spec__", None)
    if not getattr(spec, "_initializing", False):  # not on the way from `import unisono`, which needs torch first
        from unisono.ascend import install

        install(packages, force=True)
