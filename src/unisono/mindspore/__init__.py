"""MindSpore on CPUs: ``mindspore.communication.comm_func`` on real ``mindspore.Tensor``s, through shared memory.

    from unisono.mindspore import comm_func       # the functions, beside MindSpore's own

    unisono.mindspore.install()                   # or in their place; ``python -m unisono.mindspore script.py`` does it

Needs MindSpore 2.10 (its CPU build, with a NumPy below 2); nothing else of unisono imports this.
"""

from __future__ import annotations

from . import comm_func
from .install import install

__all__ = ["comm_func", "install"]
