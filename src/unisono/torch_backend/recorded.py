"""Calls in the dump of torch's flight recorder, in the form that torch's own tools read (``torchfrtrace``).

torch's recorder is in C++ and takes entries from groups in C++ only. With ``TORCH_FR_BUFFER_SIZE`` set, each group of
ours notes its calls here, and the two functions by which Python dumps the recorder, ``_dump_fr_trace`` and
``_dump_fr_trace_json`` of ``torch._C._distributed_c10d``, add them to what torch has. Dumps that C++ writes itself, on
a time-out of NCCL, do not have them. Entries are as gloo's: never "started" or "completed", but ``retired`` once over;
messages, which gloo leaves out, are there too.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ..base.fork import fork_lock
from ..base.work import FINISHED, Work
from .refusals import RefusedLayoutError, RefusedTypeError, RefusedValueError

if TYPE_CHECKING:
    from .adapter import ProcessGroupAdapter

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_DTYPES = {
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.int8: "Char", torch.uint8: "Byte", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.bool: "Bool", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip
_NAMES = {"all_reduce_coalesced": "allreduce_coalesced"}  # ours -> the tools'
_lock = fork_lock()
_entries: deque[dict[str, Any]] = deque()
_recorders: list[Recorder] = []
_next_id = 0


def capacity() -> int:
    """How many entries torch's recorder is asked to keep; 0: nobody asked."""
    text = os.environ.get("TORCH_FR_BUFFER_SIZE") or os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or "0"
    return int(text) if text.isdigit() else 0


class Recorder:
    """What one group has called."""

    def __init__(self, adapter: ProcessGroupAdapter) -> None:
        group = adapter.unisono_group
        self._adapter = weakref.ref(adapter)  # hold the group weakly, or it never closes
        self.ranks = str(list(group.ranks))
        self.size, self.rank = group.size, group.rank
        self.begun = self.over = self.messages = 0
        self.name, self.desc = "", ""
        self.number = len(_recorders)

    def run(
        self, call: Callable[..., Work], verb: str, arguments: tuple[Any, ...], opts: Any, *more: Any, **named: Any
    ) -> Work:
        """Notes a call of the adapter's ``_run``."""
        name = named.get("name") or verb
        return self._noted(lambda: call(verb, arguments, opts, *more, **named), name, [arguments], verb, opts)

    def run_all(
        self, call: Callable[..., Work], verb: str, name: str, calls: Sequence[tuple[Any, ...]], opts: Any, *more: Any
    ) -> Work:
        """Notes a call of the adapter's ``_run_all``."""
        return self._noted(lambda: call(verb, name, calls, opts, *more), name, calls, verb, opts)

    def message(
        self, call: Callable[..., Work], verb: str, name: str, tensor: Tensor, peer: int | None, *more: Any
    ) -> Work:
        """Notes a call of the adapter's ``_message``."""
        begin = partial(call, verb, name, tensor, peer, *more)
        if peer is None:  # from anyone: not known before it comes
            return begin()
        arrow = f"send {self.rank}->{peer}" if verb == "send" else f"recv {self.rank}<-{peer}"
        return self._noted(begin, arrow, [(tensor,)], verb, None)

    def _noted(
        self, begin: Callable[[], Work], name: str, calls: Sequence[tuple[Any, ...]], verb: str, opts: Any
    ) -> Work:
        entry = self._entry(_NAMES.get(name, name), calls, verb, opts)
        try:
            work = begin()
        except (RefusedValueError, RefusedTypeError, RefusedLayoutError):  # nothing was called
            self._forget(entry)
            raise
        handles = () if work is FINISHED else work._handles
        if handles:
            handles[-1].when_done(lambda: self._retire(entry))
        else:
            self._retire(entry)
        return work

    def _entry(self, name: str, calls: Sequence[tuple[Any, ...]], verb: str, opts: Any) -> dict[str, Any]:
        global _next_id
        adapter = self._adapter()
        assert adapter is not None
        self.name = adapter.group_name
        self.desc = "" if adapter.group_desc == "undefined" else adapter.group_desc
        limit_s = (0.0 if opts is None else adapter.timeout_of(opts)) or adapter.unisono_group.timeout_s
        inputs = [shape for arguments in calls for shape in _shapes(verb, arguments, self.size, 1)]
        outputs = [shape for arguments in calls for shape in _shapes(verb, arguments, self.size, 0)]
        is_message = verb in ("send", "recv")
        thread = threading.current_thread()
        with _lock:
            if is_message:
                self.messages += 1
            else:
                self.begun += 1
            entry = {
                "frames": _frames(),
                "record_id": _next_id,
                "pg_id": self.number,
                "process_group": (self.name, self.desc),
                "thread_name": thread.name,
                "thread_id": str(thread.ident),
                "collective_seq_id": self.begun,
                "p2p_seq_id": self.messages if is_message else 0,
                "op_id": self.begun + self.messages,
                "profiling_name": f"gloo:{name}",  # the tools know no other names of backends on CPU
                "time_created_ns": time.time_ns(),
                "input_sizes": [shape for shape, _ in inputs],
                "input_dtypes": [dtype for _, dtype in inputs],
                "output_sizes": [shape for shape, _ in outputs],
                "output_dtypes": [dtype for _, dtype in outputs],
                "state": "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": False,
                "timeout_ms": int(limit_s * 1000),
                "is_p2p": is_message,
            }
            _next_id += 1
            _entries.append(entry)
            while len(_entries) > capacity():
                _entries.popleft()
        return entry

    def _forget(self, entry: dict[str, Any]) -> None:
        global _next_id
        with _lock:
            _next_id -= entry["record_id"] == _next_id - 1
            if entry in _entries:
                _entries.remove(entry)
            if entry["is_p2p"]:
                self.messages -= 1
            else:
                self.begun -= 1

    def _retire(self, entry: dict[str, Any]) -> None:
        entry["retired"] = True
        if not entry["is_p2p"]:
            self.over = max(self.over, entry["collective_seq_id"])


def attach(adapter: ProcessGroupAdapter) -> None:
    """Has a group note its calls from now on."""
    recorder = Recorder(adapter)
    _recorders.append(recorder)
    for method, noted in (("_run", recorder.run), ("_run_all", recorder.run_all), ("_message", recorder.message)):
        setattr(adapter, method, partial(noted, getattr(adapter, method)))
    if c10d._dump_fr_trace is not _dump:  # type: ignore[attr-defined]
        c10d._dump_fr_trace, c10d._dump_fr_trace_json = _dump, _dump_json  # type: ignore[attr-defined]


def _shapes(verb: str, arguments: tuple[Any, ...], size: int, which: int) -> list[tuple[list[int], str]]:
    """Sizes and dtypes of a call's outputs (0) or inputs (1), as gloo notes them: a list of tensors as one of them."""
    if verb == "barrier":
        return []
    apart = verb in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
    value = arguments[which if apart else 0]
    if isinstance(value, Tensor):
        shape = list(value.shape)
        if verb == "all_gather" and which == 0:
            shape = [size, *arguments[1].shape]
        return [(shape, _DTYPES.get(value.dtype, str(value.dtype)))]
    if not value:
        return []
    first = value[0]
    return [([len(value), *first.shape], _DTYPES.get(first.dtype, str(first.dtype)))]


def _frames() -> list[dict[str, Any]]:
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            found.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back
    return found


_torchs = getattr(c10d, "_dump_fr_trace", None), getattr(c10d, "_dump_fr_trace_json", None)


def _dump(
    includeCollectives: bool | None = None, includeStackTraces: bool | None = None, onlyActive: bool | None = None
) -> bytes:
    """torch's dump with our calls, as pickled plain data."""
    found = pickle.loads(_torchs[0](includeCollectives, includeStackTraces, onlyActive))
    _add(found, includeCollectives is not False, includeStackTraces is not False)
    return pickle.dumps(found, protocol=2)


def _dump_json(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes:
    """torch's dump with our calls, as JSON, which has no frames and zeros for times that are not known."""
    found = json.loads(_torchs[1](includeCollectives, onlyActive))
    _add(found, includeCollectives is not False, False)
    for status in found["pg_status"].values():
        status.update({key: str(value) for key, value in status.items()})
    for entry in found.get("entries", []):
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[key] = entry[key] or 0
    return json.dumps(found).encode()


def _add(found: dict[str, Any], calls: bool, frames: bool) -> None:
    with _lock:
        first = 1 + max((int(number) for number in found["pg_status"]), default=-1)
        for recorder in _recorders:
            if recorder.begun + recorder.messages == 0:
                continue
            about = {"name": recorder.name, "desc": recorder.desc, "ranks": recorder.ranks}
            found["pg_config"][recorder.name] = about
            found["pg_status"][str(first + recorder.number)] = {
                "last_enqueued_collective": recorder.begun,
                "last_started_collective": -1,
                "last_completed_collective": recorder.over,
            }
        if calls:
            ours = [{**entry, "pg_id": first + entry["pg_id"]} for entry in _entries]
            for entry in ours if not frames else ():
                del entry["frames"]
            both = [*found.get("entries", []), *ours]
            found["entries"] = sorted(both, key=lambda entry: entry["time_created_ns"])[-capacity() :]
