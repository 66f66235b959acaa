"""Streams and events of the emulated device, where every operator has run when its call returns.

So a stream has never work outstanding: waiting for one is true at once, and the order between streams is the order of
the calls. An event remembers when it was recorded; two of them give the time between.
"""

from __future__ import annotations

import itertools
import threading
import time
from types import TracebackType
from typing import Any

import torch

from . import state

_numbers = itertools.count(1)
_local = threading.local()


class Stream(torch.Stream):
    """A stream of an npu device: ``torch.npu.Stream(device=None, priority=0)``."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, device=torch.device("npu", 0))

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self._index = state.index_of(device)
        self._number = next(_numbers)
        self._priority = priority
        self._outer: list[tuple[Stream, int]] = []

    @property
    def device(self) -> torch.device:
        return torch.device("npu", self._index)

    @property
    def npu_stream(self) -> int:
        """A number for the stream; 0 is the default stream's."""
        return self._number

    stream_id = npu_stream

    @property
    def priority(self) -> int:
        return self._priority

    def query(self) -> bool:
        """Whether all that was put on the stream has run: always."""
        return True

    def synchronize(self) -> None:
        """Waits for all that was put on the stream, which has run already."""

    def wait_event(self, event: Any) -> None:
        """Lets later work wait for an event, which is over already if it was recorded."""
        _expect(event, torch.Event, "event")

    def wait_stream(self, stream: Any) -> None:
        """Lets later work wait for what is on another stream, which has run already."""
        _expect(stream, torch.Stream, "stream")

    def record_event(self, event: Any = None) -> Event:
        """Records an event, a new one unless given."""
        recorded = Event() if event is None else event
        _expect(recorded, Event, "event")
        recorded.record(self)
        return recorded

    def __enter__(self) -> Stream:
        self._outer.append((current_stream(), state.current_device()))
        state.set_device(self._index)
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        stream, index = self._outer.pop()
        set_stream(stream)
        state.set_device(index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self._index, self._number) == (other._index, other._number)

    def __hash__(self) -> int:
        return hash((self._index, self._number))

    def __repr__(self) -> str:
        return f"<torch.npu.Stream device={self.device} npu_stream={self._number:#x}>"


class Event(torch.Event):
    """An event: ``torch.npu.Event(enable_timing=False)``."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device=torch.device("npu", 0))

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise NotImplementedError("torch.npu.Event(interprocess=True) is not emulated by unisono.ascend")
        self._timed = enable_timing
        self._recorded_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        """Notes the time."""
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Lets a stream wait for the event, which is over already."""

    def query(self) -> bool:
        """Whether all before the event has run: always."""
        return True

    def synchronize(self) -> None:
        """Waits for the event, which is over already."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to another."""
        for event in (self, end):
            _expect(event, Event, "end_event")
            if not event._timed:
                raise RuntimeError("Both events must be made with enable_timing=True to measure the time between them")
            if event._recorded_ns is None:
                raise RuntimeError("Both events must be recorded to measure the time between them")
        return (end._recorded_ns - self._recorded_ns) / 1e6  # type: ignore[no-any-return]

    def recorded_time(self) -> float:
        """When it was recorded, in microseconds of a clock of its own."""
        if self._recorded_ns is None:
            raise RuntimeError("The event was not recorded")
        return self._recorded_ns / 1e3

    def __repr__(self) -> str:
        return f"<torch.npu.Event {'recorded' if self._recorded_ns is not None else 'not recorded'}>"


class StreamContext:
    """``with torch.npu.stream(s):`` makes a stream the current one; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, trace)


def stream(stream: Stream | None) -> StreamContext:
    """Makes a stream the current one for a ``with`` block."""
    return StreamContext(stream)


def default_stream(device: Any = None) -> Stream:
    """The stream a device works on unless told otherwise."""
    index = state.index_of(device)
    made = _defaults.get(index)
    if made is None:
        made = _defaults[index] = Stream(torch.device("npu", index))
        made._number = 0
    return made


def current_stream(device: Any = None) -> Stream:
    """The stream a device works on now, in this thread."""
    streams: dict[int, Stream] = getattr(_local, "streams", {})
    return streams.get(state.index_of(device)) or default_stream(device)


def set_stream(stream: Stream | None) -> None:
    """Makes a stream its device's current one; None changes nothing."""
    if stream is not None:
        if not hasattr(_local, "streams"):
            _local.streams = {}
        _local.streams[stream._index] = stream


_defaults: dict[int, Stream] = {}


def _expect(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"argument '{name}' must be a {kind.__name__}, got {type(value).__name__}")
