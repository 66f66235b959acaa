"""Works of composed calls: several works that end as one, and a call that a thread of ours sees through."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_LINGER_S = 2.0  # how long the end of the process waits for calls under way


class JoinedWork(dist.Work):
    """Several works of a backend, and what is left to do after them. Everything happens in the caller's thread."""

    def __init__(self, works: Sequence[Any], output: torch.Tensor, after: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._works = list(works)
        self.output = output
        self._after = after

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        self._works.clear()
        after, self._after = self._after, None
        if after is not None:
            after()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((e for e in (work.exception() for work in self._works) if e is not None), None)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self.output]

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output. Asking for it waits: the works of a backend need not have futures themselves."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self.output])
        return future


class DrivenWork(dist.Work):
    """A call that has been posted and whose rest is done by a :class:`Driver`."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output
        self.end: Future[None] = Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            self.end.result(timeout.total_seconds() or None)
        except TimeoutError:
            raise dist.DistBackendError(f"not done after {timeout.total_seconds()} s; the call goes on") from None
        return True

    def is_completed(self) -> bool:
        return self.end.done()

    def is_success(self) -> bool:
        return self.end.done() and self.end.exception() is None

    def exception(self) -> Any:
        return self.end.exception() if self.end.done() else None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self.output]

    def get_future(self) -> torch.futures.Future[Any]:
        first: torch.futures.Future[Any] = torch.futures.Future()
        self.end.add_done_callback(lambda _: first.set_result([self.output]))
        # Errors are raised in a second step: C++ that reads a future filled by set_exception may crash.
        return first.then(lambda _: self.result())


class Driver:
    """Sees posted calls through, in the order they were posted, in a thread that lives while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[tuple[Callable[[], None], DrivenWork]] = deque()
        self._thread: threading.Thread | None = None

    def see_through(self, finish: Callable[[], None], output: torch.Tensor) -> DrivenWork:
        work = DrivenWork(output)
        with self._lock:
            self._calls.append((finish, work))
            if self._thread is None:
                # A daemon, so that a peer that never answers does not keep the process from ending.
                self._thread = threading.Thread(target=self._drive, name="unisono-driver", daemon=True)
                _running.add(self._thread)
                self._thread.start()
        return work

    def _drive(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    _running.discard(threading.current_thread())
                    self._thread = None
                    return
                finish, work = self._calls.popleft()
            try:
                finish()
            except BaseException as error:
                work.end.set_exception(error)
            else:
                work.end.set_result(None)
            del finish, work  # the tensors are the caller's again, also while this thread lives on


_running: set[threading.Thread] = set()


@atexit.register
def _see_all_through() -> None:
    deadline = time.monotonic() + _LINGER_S
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
