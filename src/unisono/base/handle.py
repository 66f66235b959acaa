"""The handle of a call that is under way, whatever moves its data: one class over one kind of pending thing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, Protocol

from .errors import CollectiveTimeoutError
from .fork import fork_lock

_lock = fork_lock()  # for lists of callbacks; held for an append only
_CALLED: list[Callable[[], None]] = []  # stands where a list of callbacks was that have been called


class Pending(Protocol):
    """What a handle asks: the core's ticket, works of another backend, or a call that a thread carries out."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...  # 0: as long as it takes; False: not done by then
    def error(self) -> Exception | None: ...
    def on_done(self, callback: Callable[[], None], /) -> None: ...
    @property
    def source(self) -> int: ...


class Handle:
    """One asynchronous call. Dropping it without waiting is safe; waiting twice is fine.

    In asyncio, ``await handle`` gives what :meth:`result` gives, and other tasks run meanwhile.
    """

    __slots__ = ("_callbacks", "_op", "_outputs", "_pending")

    def __init__(self, pending: Pending, op: str, outputs: Any) -> None:
        self._pending = pending
        self._op = op
        self._outputs = outputs
        self._callbacks: list[Callable[[], None]] | None = None

    def _withdraw(self) -> None:
        """Gives up a receive that nothing has come for; other backends than unisono cannot."""
        withdraw = getattr(self._pending, "withdraw", None)
        if withdraw is not None:
            withdraw()

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Returns when the call is over, or raises what went wrong.

        With ``timeout``, in seconds or as a timedelta, raises CollectiveTimeoutError after that time; the call itself
        goes on and can be waited for again.
        """
        if self._pending.__class__ is Finished:
            return
        limit_s = 0.0
        if timeout is not None:
            limit_s = max(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout, 1e-9)
        if not self._pending.wait(limit_s):
            raise CollectiveTimeoutError(f"{self._op}: not done after {limit_s:g} s of waiting; the call goes on")
        error = self._pending.error()
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame: with it here, the group would live until the collector runs

    def is_completed(self) -> bool:
        """Says whether the call is over, well or not."""
        return self._pending.done()

    def exception(self) -> Exception | None:
        """The error of a call that is over, None if it went well or still runs."""
        return self._pending.error()

    def result(self) -> Any:
        """Waits, then returns the tensor or tensors the call has written."""
        self.wait()
        return self._outputs

    @property
    def outputs(self) -> Any:
        """What the call writes, which may not be read before it is over."""
        return self._outputs

    def of(self, outputs: Any) -> Handle:
        """The handle of the same call, with its outputs in another form.

        Args:
            outputs: what :meth:`result` shall return

        Returns:
            A handle.
        """
        return Handle(self._pending, self._op, outputs)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.is_completed():
            loop = asyncio.get_running_loop()
            over = loop.create_future()

            def wake() -> None:
                if not over.done():  # else the task was cancelled
                    over.set_result(None)

            def tell() -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
                    loop.call_soon_threadsafe(wake)

            self.when_done(tell)
            yield from over
        return self.result()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called when the call is over, by the thread that ends it, or now if it is over already.

        Args:
            callback: takes nothing; should be quick
        """
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


class Finished:
    """A call that was over before its handle was made."""

    __slots__ = ("source",)

    def __init__(self, source: int = -1) -> None:
        self.source = source

    def done(self) -> bool:
        """True."""
        return True

    def wait(self, timeout_s: float) -> bool:
        """True."""
        return True

    def error(self) -> Exception | None:
        """None."""
        return None

    def on_done(self, callback: Callable[[], None], /) -> None:
        """Calls back now."""
        callback()
