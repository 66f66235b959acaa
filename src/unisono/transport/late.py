"""Warnings about calls on other torch backends that wait long; the core sees to its own.

A backend's wait cannot be asked how long it lasts, nor ended, so a thread looks at those under way. It lives while
there are any. What a backend does not tell is not known here either: for whom it waits is named where a rank's request
is awaited, which comes before its data.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType

from .. import _core
from ..base import log
from ..base.fork import fork_lock

_LOOK_EVERY_S = 0.5

_lock = fork_lock()
_waits: dict[int, waiting] = {}
_watched = False  # there is a thread, and it will look once more


class waiting:
    """A wait for a backend; ``words`` and ``values``, as in a log record, say for what."""

    __slots__ = ("_since", "_site", "_values", "_words")

    def __init__(self, words: str, *values: object) -> None:
        self._words = words
        self._values = values

    def __enter__(self) -> None:
        self._since = time.monotonic()
        self._site = _core.call_site()
        with _lock:
            _waits[id(self)] = self
            _start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _waits.pop(id(self), None)

    def warn(self, now: float) -> None:
        """Logs it."""
        at = f" at {self._site}" if self._site else ""
        log.warn(f"{self._words % self._values}{at}: has waited {now - self._since:.0f} s")


def _start() -> None:  # under the lock
    global _watched
    if not _watched:
        _watched = True
        threading.Thread(target=_watch, name="unisono-late", daemon=True).start()


def _watch() -> None:
    global _watched
    warned: dict[int, waiting] = {}
    while True:
        time.sleep(_LOOK_EVERY_S)
        now = time.monotonic()
        with _lock:
            if not _waits:
                _watched = False
                return
            late = [w for w in _waits.values() if now - w._since >= log.WARN_AFTER_S and warned.get(id(w)) is not w]
        for wait in late:
            warned[id(wait)] = wait
            wait.warn(now)


def _after_fork() -> None:
    global _watched
    _waits.clear()
    _watched = False


os.register_at_fork(after_in_child=_after_fork)
