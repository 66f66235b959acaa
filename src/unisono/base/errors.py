"""What unisono raises, and how a failure in the core becomes one of these.

Programs read ``.op``, ``.seq``, ``.group``, ``.rank`` and ``.peers``; people read the text: type, op and number,
group, one fact, then a line per rank where ranks differ. All derive from torch's ``DistBackendError``, so an
``except`` clause written for torch.distributed catches them. Errors in arguments are plain ``TypeError`` and
``ValueError``, raised before anything is sent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch.distributed import DistBackendError


class UnisonoError(DistBackendError):
    """Base of all errors of a group. ``peers`` are the ranks it is about."""

    op: str = ""
    seq: int = 0
    group: str = ""
    rank: int = -1
    peers: tuple[int, ...] = ()


class MismatchError(UnisonoError):
    """Ranks made calls that do not fit together. Nothing was moved and the group can still be used."""


class PeerLostError(UnisonoError):
    """A rank died or left while others needed it."""


class CollectiveTimeoutError(UnisonoError, TimeoutError):
    """A call did not end before its deadline."""


class AbortedError(UnisonoError):
    """The group was given up, by this rank or by another."""


class ClosedError(UnisonoError):
    """The group was closed on this rank."""


class ForkedError(UnisonoError):
    """A group was used in a child of the process that made it."""


class HeapMemoryError(UnisonoError, MemoryError):
    """The heap cannot grow: too little memory on the machine or in its cgroup."""


class SystemCallError(UnisonoError):
    """The operating system refused something, or shared memory holds something impossible."""


# In the order of `Code` in core/base/status.h.
_BY_CODE: tuple[type[UnisonoError], ...] = (
    UnisonoError,
    MismatchError,
    PeerLostError,
    CollectiveTimeoutError,
    AbortedError,
    AbortedError,
    ClosedError,
    ForkedError,
    HeapMemoryError,
    UnisonoError,
    SystemCallError,
)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH_DISTRIBUTED = os.sep + os.path.join("torch", "distributed") + os.sep


def call_site() -> str:
    """File and line of the nearest caller outside of unisono and torch.distributed: ``train.py:88``."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        inside = name.startswith(_PACKAGE) and not name.endswith("demo.py")
        if not inside and _TORCH_DISTRIBUTED not in name:
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def make_error(
    code: int,
    op: str,
    seq: int,
    group: str,
    rank: int,
    peers: Sequence[int],
    text: str,
    lines: Sequence[str],
    first_cause: bool,
) -> UnisonoError:
    """Builds the exception for a failure of the core; called by ``_core`` only."""
    kind = _BY_CODE[code]
    if rank < 0:
        head = text
    elif seq == 0:
        head = f'group "{group}": {text}'
    else:
        head = f'{op} #{seq} in group "{group}": {text}'
    if first_cause and kind is not ClosedError and kind is not ForkedError:
        head += "\n  the group was given up by this error; make a new group to go on"
    if kind is MismatchError and lines:
        for r, line in enumerate(lines):
            head += f"\n  rank {r}   {line}" + ("   <- differs" if r in peers else "")
    else:
        for line in lines:
            head += "\n  " + line
    error = kind(head)
    error.op, error.seq, error.group, error.rank, error.peers = op, seq, group, rank, tuple(peers)
    return error
