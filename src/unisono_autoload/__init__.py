"""What torch calls when it is imported (entry point group ``torch.backends``): makes the name "unisono" known.

A package of its own, because it runs in every process that imports torch: it imports nothing of unisono before the
first group is made, and never raises, whatever is wrong with unisono; except where the environment asks for more: in
children of a process that has unisono.ascend installed, which want the same, and with UNISONO_GLOO
and UNISONO_SHARE, which only say it when they fail.
"""

from __future__ import annotations

import os
import sys

# Variables that ask for unisono in any program -> what happens if it cannot be had.
_WISHES = {
    "UNISONO_GLOO": 'groups that ask for "gloo" get gloo',
    "UNISONO_SHARE": "new tensors stay ordinary",
}


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
    for name, otherwise in _WISHES.items():
        if os.environ.get(name, "0") not in ("", "0") and not _is_importing():
            try:
                import unisono  # noqa: F401  # does the rest, if it is a yes
            except Exception as error:
                print(f"{name}: {otherwise}: import unisono: {error}", file=sys.stderr)


def _is_importing() -> bool:
    """Whether `import unisono` is under way, which needs torch first."""
    return getattr(getattr(sys.modules.get("unisono"), "__spec__", None), "_initializing", False)


def _install_ascend(packages: list[str]) -> None:
    if not _is_importing():
        from unisono.ascend import install

        install(packages, force=True)
