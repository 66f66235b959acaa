"""Which CPUs the ranks of a run have."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def pin_to_one(rank: int) -> None:
    """Bind this process to one CPU, round robin over the ranks."""
    cpus = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):  # what this thread starts later follows it
        os.sched_setaffinity(int(thread), {cpus[rank % len(cpus)]})


@contextlib.contextmanager
def using(cpus: set[int]) -> Iterator[None]:
    """What is started inside, processes and threads, may use these CPUs."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # where that is forbidden, they share what this rank has
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
