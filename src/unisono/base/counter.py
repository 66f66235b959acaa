"""Counting for several threads at a time."""

from __future__ import annotations

import threading


class Counter:
    """Gives 1, 2, 3 and so on, every number once, whichever threads ask; also in a Python without a GIL."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> int:
        with self._lock:
            self._last += 1
            return self._last
