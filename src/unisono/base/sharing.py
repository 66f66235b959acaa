"""New tensors in shared memory: from the switch on, what torch allocates on the CPU lies in the heap.

The switch belongs to the process, not to a thread: autograd makes gradients in threads of its own. How torch's
allocator is reached is in core/memory/sharing.h.
"""

from __future__ import annotations

import warnings
from types import TracebackType

import torch

from .. import _core
from . import settings
from .errors import SystemCallError
from .fork import fork_lock
from .tensors import is_shared

_NEVER = (1 << 64) - 1
_LIBRARY = "libc10.so"

_lock = fork_lock()
_switches: list[Sharing] = []  # the last one counts
_probed = False


class Sharing:
    """What :func:`share_new_tensors` returns: it holds until :meth:`stop`, or until the end of a ``with`` block."""

    def __init__(self, min_bytes: int, max_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self._entered = False

    def stop(self) -> None:
        """Ends it: from now on, what was asked for before counts again. Tensors that are shared stay so."""
        with _lock:
            if self in _switches:
                _switches.remove(self)
            _apply()

    def __enter__(self) -> Sharing:
        with _lock:
            self._entered = True
            if self not in _switches:
                _switches.append(self)
            _apply()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _apply() -> None:
    if _switches:
        _core.share_from(_switches[-1].min_bytes, _switches[-1].max_bytes)
    else:
        _core.share_from(_NEVER, _NEVER)


def _probe() -> None:
    """Makes sure that torch's allocator is the one that was replaced: makes a tensor and looks where it lies."""
    global _probed
    refused = _core.share_refusals()
    _core.share_from(0, _NEVER)
    try:
        found = is_shared(torch.empty(1 << 16, dtype=torch.uint8)) or _core.share_refusals() > refused
    finally:
        _apply()
    if not found:
        raise SystemCallError(f"torch does not allocate by the functions that {_LIBRARY} imports")
    _probed = True


def share_new_tensors(min_bytes: int | None = None, *, max_bytes: int | None = None, enabled: bool = True) -> Sharing:
    """Makes every CPU tensor that torch allocates from now on, in any thread, a tensor in shared memory.

    Outputs of operators, gradients, DDP's buckets, optimizer state, loaded checkpoints: collectives on them copy
    nothing, with no other change to the program.

    >>> import torch, unisono
    >>> with unisono.share_new_tensors(min_bytes=1 << 20):
    ...     large = torch.randn(512, 1024)
    ...     small = torch.randn(512)
    >>> unisono.is_shared(large), unisono.is_shared(large @ large.T), unisono.is_shared(small)
    (True, False, False)

    As a call of its own it holds until the end of the program; with ``with``, until the end of the block, where what
    was asked for before counts again.

    ``min_bytes``: smaller tensors stay ordinary (UNISONO_SHARE_MIN_BYTES, 64 KiB). ``max_bytes``: so do new ones while
    the heap holds more than that (UNISONO_SHARE_MAX_BYTES, no limit); and all for which the machine, its cgroup or the
    heap has no room: never an error. Tensors that were there before are not moved, see :func:`to_shared_`.

    Raises SystemCallError where torch's allocator cannot be replaced.

    Args:
        min_bytes: smaller tensors stay ordinary; None: UNISONO_SHARE_MIN_BYTES, 64 KiB
        max_bytes: new ones stay ordinary while the heap holds more than that; None: UNISONO_SHARE_MAX_BYTES, no limit
        enabled: False switches it off, for good or for a block

    Returns:
        A context manager, which may be ignored.
    """
    least = settings.share_min_bytes if min_bytes is None else min_bytes
    most = settings.share_max_bytes if max_bytes is None else max_bytes
    for name, value in (("min_bytes", least), ("max_bytes", most)):
        if not isinstance(value, int):
            raise TypeError(f"argument '{name}' must be a whole number of bytes, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    with _lock:
        if enabled:
            _core.replace_allocator(_LIBRARY)
            if not _probed:
                _probe()
        switch = Sharing(least, most or _NEVER) if enabled else Sharing(_NEVER, _NEVER)
        # Of calls that no block is tied to, the last two are enough: the last may yet become a block's.
        if len(_switches) > 1 and not _switches[-1]._entered and not _switches[-2]._entered:
            del _switches[-2]
        _switches.append(switch)
        _apply()
    return switch


def share_by_environment() -> None:
    """Does what UNISONO_SHARE asks for. Where it cannot be done, the program goes on with a warning."""
    try:
        share_new_tensors()
    except Exception as error:
        warnings.warn(f"UNISONO_SHARE: new tensors stay ordinary: {error}", RuntimeWarning, stacklevel=2)


def trim() -> int:
    """Gives the memory of freed tensors in the heap back to the system now, and returns how many bytes that were.

    Without it, memory that has been free for a second or two goes back, 64 MiB a second, and all at once when the
    machine or its cgroup has less than 1 GiB left.

    >>> import unisono
    >>> t = unisono.empty(1 << 22)
    >>> del t
    >>> unisono.trim() >= 1 << 24
    True

    Returns:
        The number of bytes.
    """
    return _core.trim()
