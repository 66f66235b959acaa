"""What torch calls when it is imported (entry point group ``torch.backends``): makes the backend's name known.

It runs in every process that imports torch, so it imports nothing of unisono and never raises.
"""

from __future__ import annotations


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
