"""Handles as torch's Work; their futures are completed by the thread that ends the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.graph import _engine_run_backward

from .handle import Handle

_NO_LIMIT = timedelta(0)  # torch's word for: wait as long as it takes


class Work(dist.Work):
    """One call, or several that were asked for together, in the order in which they run."""

    def __init__(
        self,
        handles: Sequence[Handle],
        outputs: Any,
        before_end: Callable[[], None] | None = None,
        after: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__()
        self._handles = handles
        self._outputs = outputs
        self._after = after  # steps for when the call has gone well, each done once whoever waits
        self._future: torch.futures.Future[Any] | None = None
        if before_end is not None:
            handles[-1].when_done(before_end)

    @classmethod
    def joined(cls, works: Sequence[Work]) -> Work:
        """Several as one."""
        return cls(
            [handle for work in works for handle in work._handles],
            [work._outputs for work in works],
            after=[step for work in works for step in work._after],
        )

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Returns True when the call is over, or raises what went wrong; CollectiveTimeoutError after ``timeout``."""
        limit_s = timeout.total_seconds() if timeout > _NO_LIMIT else None
        for handle in self._handles:
            handle.wait(limit_s)
        for step in self._after:
            step()
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`; there are no streams on a CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Says whether the call is over, well or not."""
        if not all(handle.is_completed() for handle in self._handles):
            return False
        if self._after and self.exception() is None:
            self.wait()
        return True

    def is_success(self) -> bool:
        """Says whether the call is over and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of a call that is over, None if it went well or still runs."""
        return next((e for e in (handle.exception() for handle in self._handles) if e is not None), None)

    def result(self) -> list[torch.Tensor]:
        """Waits, then returns the tensors the call has written."""
        self.wait()
        return tensors_in(self._outputs)

    def source_rank(self) -> int:
        """For a receive that is over: the group rank the message came from."""
        return self._handles[0].source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors, completed by the thread that ends the call.

        Torch's C++ code reads a list of tensors out of it and does not survive anything else, so an error travels as
        the exception of a callback, the one way that torch turns into an error of the future.
        """
        if self._future is None and self._is_for_compress_hook():
            self.wait()
            self._future = cast("torch.futures.Future[Any]", torch._C.fork(lambda: tensors_in(self._outputs)))
        elif self._future is None:
            over: torch.futures.Future[Any] = torch.futures.Future()
            self._future = over.then(lambda _: self._result_or_raise())
            self._when_over(0, lambda: over.set_result(True))
        return self._future

    def _when_over(self, i: int, callback: Callable[[], None]) -> None:
        """Has ``callback`` called when the calls from the i-th on are over; messages may end in any order."""
        while i < len(self._handles) and self._handles[i].is_completed():
            i += 1
        if i == len(self._handles):
            callback()
        else:
            self._handles[i].when_done(lambda: self._when_over(i + 1, callback))

    def _is_for_compress_hook(self) -> bool:
        """Whether DDP's C++ FP16_COMPRESS hook may be asking.

        It takes nothing but a list of tensors in C++, which Python can put into a future only when it has the result.
        """
        outputs = self._outputs
        if not (len(outputs) == 1 and isinstance(outputs[0], torch.Tensor) and outputs[0].dtype is torch.float16):
            return False
        asking = sys._getframe(1).f_back
        while asking is not None and asking.f_code.co_filename == __file__:
            asking = asking.f_back
        return asking is None or asking.f_code is _engine_run_backward.__code__

    def _result_or_raise(self) -> Any:
        error = self.exception()
        if error is not None:
            raise error
        self.wait()
        return self._outputs


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of lists of lists; anything else in them is passed over."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (list, tuple)) else []


class _Finished(Work):
    """A call that was over before its Work was made; torch waits for it all the same, so that takes no time."""

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """True."""
        return True


#: What a synchronous call returns: it is over.
FINISHED = _Finished((), [])
