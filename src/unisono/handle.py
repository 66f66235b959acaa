"""Handles of calls that are under way."""

from __future__ import annotations

from typing import Any

from . import _core
from .errors import CollectiveTimeoutError, UnisonoError


class Handle:
    """One asynchronous call. Dropping it without waiting is safe; waiting twice is fine."""

    __slots__ = ("_op", "_outputs", "_pending")

    def __init__(self, pending: _core.Pending, op: str, outputs: Any) -> None:
        self._pending = pending
        self._op = op
        self._outputs = outputs

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

    @property
    def source(self) -> int:
        """For a receive that is over: the rank the message came from."""
        return self._pending.source

    def __repr__(self) -> str:
        state = "done" if self.is_completed() else "under way"
        return f"<unisono.Handle {self._op} {state}>"
