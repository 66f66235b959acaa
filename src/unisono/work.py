"""torch.distributed's face of calls that are under way; their futures are completed by the progress thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .handle import Handle

_NO_LIMIT = timedelta(0)  # torch's word for: wait as long as it takes


class Work(dist.Work):
    """One call, or several that were asked for together, in the order in which they run."""

    def __init__(self, handles: Sequence[Handle], outputs: Any, before_end: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._handles = handles
        self._outputs = outputs
        self._future: torch.futures.Future[Any] | None = None
        if before_end is not None:
            handles[-1].when_done(before_end)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Returns True when the call is over, or raises what went wrong; CollectiveTimeoutError after ``timeout``."""
        limit_s = timeout.total_seconds() if timeout > _NO_LIMIT else None
        for handle in self._handles:
            handle.wait(limit_s)
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`; there are no streams on a CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Says whether the call is over, well or not."""
        return all(handle.is_completed() for handle in self._handles)

    def is_success(self) -> bool:
        """Says whether the call is over and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of a call that is over, None if it went well or still runs."""
        return next((e for e in (handle.exception() for handle in self._handles) if e is not None), None)

    def result(self) -> list[torch.Tensor]:
        """Waits, then returns the tensors the call has written."""
        self.wait()
        return _flat(self._outputs)

    def source_rank(self) -> int:
        """For a receive that is over: the group rank the message came from."""
        return self._handles[0].source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors, completed by the thread that ends the call.

        Torch's C++ code reads a list of tensors out of it and does not survive anything else, so an error travels as
        the exception of a callback, the one way that torch turns into an error of the future.
        """
        if self._future is None:
            over: torch.futures.Future[Any] = torch.futures.Future()
            self._future = over.then(lambda _: self._result_or_raise())
            if self._handles:
                self._handles[-1].when_done(lambda: over.set_result(True))
            else:
                over.set_result(True)
        return self._future

    def _result_or_raise(self) -> Any:
        error = self.exception()
        if error is not None:
            raise error
        return self._outputs


def _flat(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [tensor for part in outputs for tensor in _flat(part)]


#: What a synchronous call returns: it is over.
FINISHED = Work((), [])
