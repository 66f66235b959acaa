"""A limit of CPU time for the ranks, as containers have one: a control group of Linux, made and removed again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 100_000
NAME = "unisono-bench-"
EMPTY_S = 5.0  # processes that ended may stay in it for a moment


class NoQuota(Exception):
    """It cannot be made here; the text says why."""


@contextmanager
def cpu_quota(percent: int) -> Iterator[str]:
    """The list of tasks of a new control group, into which processes write their ids; they may use so much of one CPU.

    The processes have to end before the body does.
    """
    folder = _make(percent)
    try:
        yield str(folder / "cgroup.procs")
    finally:
        _remove(folder)


def why_no_quota() -> str | None:
    """Why there can be none here, or None if there can."""
    try:
        with cpu_quota(100):
            return None
    except NoQuota as why:
        return str(why)


def _make(percent: int) -> Path:
    parents = list(_parents())
    if not parents:
        raise NoQuota("no control group for CPU time is mounted")
    problem: OSError | None = None
    for parent, version in parents:
        folder = parent / f"{NAME}{os.getpid()}"
        try:
            _remove_left_over(parent)
            if version == 2:
                (parent / "cgroup.subtree_control").write_text("+cpu")
            folder.mkdir(exist_ok=True)
            if version == 2:
                (folder / "cpu.max").write_text(f"{percent * PERIOD_US // 100} {PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(percent * PERIOD_US // 100))
            return folder
        except OSError as error:
            problem = problem or error
            with contextlib.suppress(OSError):
                folder.rmdir()
    raise NoQuota(f"a control group cannot be made (it needs root, and cgroups that may be written): {problem}")


def _parents() -> Iterator[tuple[Path, int]]:
    """Where a control group may be made, with the version of its files: in this process's own, else further up."""
    own: dict[str, str] = {}  # path by controller; "" is version 2
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        top = Path(mount)
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in own:
            version, here = 1, top / own["cpu"].lstrip("/")
        elif kind == "cgroup2" and "cpu" in (top / "cgroup.controllers").read_text().split():
            version, here = 2, top / own[""].lstrip("/")
        else:
            continue
        for folder in (here, *here.parents):
            if folder.is_relative_to(top) and folder.is_dir():
                yield folder, version


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + EMPTY_S
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _remove_left_over(parent: Path) -> None:
    """Those of runs that were killed."""
    for folder in parent.glob(f"{NAME}*"):
        if not Path("/proc", folder.name.removeprefix(NAME)).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
