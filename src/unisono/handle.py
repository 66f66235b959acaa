"""Handles of calls that are under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from . import _core
from .errors import CollectiveTimeoutError, UnisonoError

_lock = threading.Lock()  # for lists of callbacks; held for an append only
_CALLED: list[Callable[[], None]] = []  # stands where a list of callbacks was that have been called


class Handle:
    """One asynchronous call. Dropping it without waiting is safe; waiting twice is fine."""

    __slots__ = ("_callbacks", "_op", "_outputs", "_pending")

    def __init__(self, pending: _core.Pending, op: str, outputs: Any) -> None:
        self._pending = pending
        self._op = op
        self._outputs = outputs
        self._callbacks: list[Callable[[], None]] | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the call is over, or raises what went wrong.

        With ``timeout_s``, raises CollectiveTimeoutError after that time; the call itself goes on and can be waited
        for again.
        """
        if timeout_s is not None and timeout_s <= 0:
            timeout_s = 1e-9
        if not self._pending.wait(timeout_s or 0.0):
            raise CollectiveTimeoutError(f"{self._op}: not done after {timeout_s} s of waiting; the call goes on")
        error = self._pending.error()
        if error is not None:
            raise error

    def is_completed(self) -> bool:
        """Says whether the call is over, well or not."""
        return self._pending.done()

    def exception(self) -> UnisonoError | None:
        """The error of a call that is over, None if it went well or still runs."""
        return self._pending.error()

    def result(self) -> Any:
        """Waits, then returns the tensor or tensors the call has written."""
        self.wait()
        return self._outputs

    def when_done(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called when the call is over, by the thread that ends it, or now if it is over already."""
        with _lock:
            first = self._callbacks is None
            if first:
                self._callbacks = [callback]
            elif self._callbacks is not _CALLED:
                self._callbacks.append(callback)  # type: ignore[union-attr]
                return
        if first:
            self._pending.on_done(self._call_back)
        else:
            callback()

    def _call_back(self) -> None:
        with _lock:
            callbacks, self._callbacks = self._callbacks or [], _CALLED
        for callback in callbacks:
            callback()

    @property
    def source(self) -> int:
        """For a receive that is over: the rank the message came from."""
        return self._pending.source

    def __repr__(self) -> str:
        state = "done" if self.is_completed() else "under way"
        return f"<unisono.Handle {self._op} {state}>"
