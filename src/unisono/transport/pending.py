"""Calls under way on other torch backends: works of the backend, and calls that a thread of ours carries out."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import late

_LINGER_S = 2.0  # how long the end of the process waits for calls under way

Step = Callable[[], None]


def nothing() -> None:
    """The last step of a call that needs none."""


class WorksPending:
    """Works of a torch backend that end as one call; ``after`` runs once, when all have gone well."""

    def __init__(self, works: Sequence[dist.Work | None], after: Step = nothing) -> None:
        self._works: list[Any] = list(works)
        self._first: Any = works[0] if works else None
        self._after = after
        self._error: Exception | None = None
        self._over = False
        self._turn = threading.Lock()

    def done(self) -> bool:
        """Says whether the call is over; some backends know only after a wait."""
        if not self._over and all(work.is_completed() for work in list(self._works)):
            self.wait(0.0)  # for what is left to do after the works
        return self._over

    def wait(self, timeout_s: float) -> bool:
        """Waits; False if the call is not over after ``timeout_s``."""
        end = time.monotonic() + timeout_s
        # One thread at a time: gloo's receive would take a second wait for that of another message.
        if not self._turn.acquire(timeout=timeout_s or -1):
            return False
        try:
            while not self._over:
                if not self._advance(max(end - time.monotonic(), 1e-3) if timeout_s else 0.0):
                    return False
            return True
        finally:
            self._turn.release()

    def _advance(self, timeout_s: float) -> bool:
        """Waits for the next work, or ends the call when there is none; False if the time was not enough."""
        work = self._works[0] if self._works else None
        try:
            if work is None:
                self._after()
                self._over = True
                return True
            if timeout_s:
                work.wait(timedelta(seconds=timeout_s))  # torch counts milliseconds, and 0 is no limit
            else:
                with late.waiting("a call on another backend"):
                    work.wait()
            self._works.pop(0)
        except Exception as error:
            if work is not None and timeout_s and not work.is_completed():
                return False
            self._error, self._over = error, True
        return True

    def error(self) -> Exception | None:
        """What went wrong, None if nothing did or the call still runs."""
        self.done()
        return self._error

    def on_done(self, callback: Step, /) -> None:
        """Calls back from a thread that waits: not every backend has a future for every call."""

        def watch() -> None:
            self.wait(0.0)
            callback()

        threading.Thread(target=watch, name="unisono-work", daemon=True).start()

    @property
    def source(self) -> int:
        """For a receive that is over: the rank the message came from."""
        return int(self._first._source_rank())


class MessagesPending(WorksPending):
    """Sends and receives of CPU tensors: when a wait of gloo for one times out, it closes the group's connections.

    So a thread waits, until gloo's own time limit, and whoever has a shorter one waits for the thread.
    """

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        super().__init__(works)
        self._starting = threading.Lock()
        self._ended: threading.Event | None = None

    def wait(self, timeout_s: float) -> bool:
        """Waits; False if the call is not over after ``timeout_s``."""
        if not timeout_s or self._over:
            return super().wait(0.0)
        with self._starting:
            if self._ended is None:
                ended = threading.Event()
                self.on_done(ended.set)
                self._ended = ended
        return self._ended.wait(timeout_s)


class ThreadPending(Future[None]):
    """A call whose rest is carried out by a :class:`ProgressThread`."""

    source = -1
    has_callback = False

    def wait(self, timeout_s: float) -> bool:
        """Waits; False if the call is not over after ``timeout_s``."""
        try:
            self.exception(timeout_s or None)
        except NotDone:
            return False
        return True

    def error(self) -> Exception | None:
        """What went wrong, None if nothing did or the call still runs."""
        return self.exception() if self.done() else None  # type: ignore[return-value]

    def on_done(self, callback: Step, /) -> None:
        """Calls back from the progress thread, or now if the call is over."""
        self.has_callback = True
        self.add_done_callback(lambda _: callback())


class ProgressThread:
    """Carries calls out in the order they were begun; the thread lives while there are any.

    A callback may make calls and wait for them: before it is called, another thread takes over what is left to do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[tuple[Step, ThreadPending]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return self._thread is None and not self._calls

    def carry_out(self, rest: Step) -> ThreadPending:
        """Has the rest of a call done by the thread."""
        pending = ThreadPending()
        with self._lock:
            self._calls.append((rest, pending))
            if self._thread is None:
                self._start()
        return pending

    def _start(self) -> None:
        # A daemon, so that a peer that never answers does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="unisono-progress", daemon=True)
        _running.add(self._thread)
        self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._lock:
                if self._thread not in (me, None) or not self._calls:
                    _running.discard(me)
                    self._thread = None if self._thread is me else self._thread
                    return
                self._thread = me
                rest, pending = self._calls.popleft()
            error = None
            try:
                rest()
            except BaseException as raised:
                error = raised
            if pending.has_callback:
                with self._lock:
                    self._thread = None
                    if self._calls:
                        self._start()
            if error is None:
                pending.set_result(None)
            else:
                pending.set_exception(error)
            del rest, pending, error  # the tensors are the caller's again, also while this thread lives on


_running: set[threading.Thread] = set()


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + _LINGER_S
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
