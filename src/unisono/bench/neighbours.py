"""Processes that only compute, on the same CPUs as the ranks: what data loaders and other people's jobs are to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# It ends with its parent, however that ends.
_SPIN = "import os\nparent = {}\nwhile os.getppid() == parent:\n    sum(range(100_000))"


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """`count` busy processes while the body runs.

    >>> with busy_neighbours(2):
    ...     pass
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen([sys.executable, "-S", "-c", _SPIN.format(os.getpid())]))
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
