"""Locks of state that the whole process shares: a child made by fork finds them open.

The child has only the thread that forked. A lock that another thread held would stay locked there for ever, so every
lock here that does not belong to one group or one object is made by :func:`fork_lock` (in the core: base/fork.h). What
such a lock guards must be usable at every moment, or be put in order by ``os.register_at_fork``.
"""

from __future__ import annotations

import os
import threading

locks: list[threading.Lock] = []  # all of them: a test holds each while it forks


def fork_lock() -> threading.Lock:
    """A lock for something process-wide, which no child of fork finds held."""
    lock = threading.Lock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # as Python does with its own
    locks.append(lock)
    return lock
