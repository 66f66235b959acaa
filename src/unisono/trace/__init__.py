"""The flight recorder's reader: ``unisono trace``, and what ``unisono top`` builds on.

Every process keeps its last operations in shared memory. They are read here from the files that ranks write when a
group fails, or out of the memory of live processes, without their help and without their GIL.
"""

from __future__ import annotations

from .command import main

__all__ = ["main"]
