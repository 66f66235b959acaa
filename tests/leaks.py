"""What a process holds: fds, threads, children, /dev/shm. Compared before and after every test."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unisono.group.group import _open_groups

# Python's own servants live until the process ends, once something has asked for them.
SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "fork_server.py")


@dataclass(frozen=True)
class Holdings:
    fds: dict[int, str]
    threads: int
    python_threads: tuple[str, ...]
    children: dict[int, str]
    shm: frozenset[str]


def holdings() -> Holdings:
    """What this process holds now."""
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            fds[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own fd
    shm = frozenset(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else frozenset()
    names = tuple(sorted(thread.name for thread in threading.enumerate()))
    return Holdings(fds, threads(), names, children(os.getpid()), shm)


def thread_names() -> list[str]:
    """The system's names of all threads of this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue
    return names


def threads() -> int:
    """Threads of this process, without those that an open group may have for its progress.

    There is one more for each callback that was running when another call ended: few, but on a busy machine not one.
    Nor does the one count that gives memory back: it ends on its own, some seconds after the last call.
    """
    names = thread_names()
    progress = names.count("unisono")
    trimming = names.count("unisono-trim")
    return len(names) - min(progress, 4 * len(_open_groups)) - min(trimming, 1)


def children(pid: int) -> dict[int, str]:
    """Living and unreaped children of a process, with their command lines, without Python's servants."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, pids):
            try:
                raw = Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:
                continue
            command = raw.replace(b"\0", b" ").decode(errors="replace")
            if not any(servant in command for servant in SERVANTS):
                found[child] = command.strip() or "(ended, not waited for)"
    return found


def growth(before: Holdings, after: Holdings) -> list[str]:
    """One line per thing that was not there before."""
    lines = []
    if len(after.fds) > len(before.fds):
        fresh = sorted(f"{fd} -> {to}" for fd, to in after.fds.items() if before.fds.get(fd) != to)
        lines.append(f"fds: {len(before.fds)} -> {len(after.fds)}; new: {', '.join(fresh)}")
    if after.threads > before.threads:
        names = ", ".join(after.python_threads)
        every = ", ".join(sorted(thread_names()))
        lines.append(f"threads: {before.threads} -> {after.threads}; Python's: {names}; all now: {every}")
    for pid in sorted(set(after.children) - set(before.children)):
        lines.append(f"child {pid}: {after.children[pid]}")
    if after.shm - before.shm:
        lines.append(f"/dev/shm: {', '.join(sorted(after.shm - before.shm))}")
    return lines


def settled_growth(before: Holdings, look: Callable[[], Holdings] = holdings, limit_s=5.0) -> list[str]:
    """Growth that is still there after `limit_s`: what ends on its own may take a moment."""
    deadline = time.monotonic() + limit_s
    while lines := growth(before, look()):
        if time.monotonic() > deadline:
            return lines
        time.sleep(0.02)
    return []
