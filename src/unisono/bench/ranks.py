"""The ranks a run is measured on: started here, or those of a torchrun or mpiexec that started this program."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from unisono.group.group import Group
from unisono.testing import RankPool

from . import rows
from .apart.cases import Case
from .contenders import Order
from .quota import cpu_quota

ROW_LIMIT_S = 1800.0
MEETING_S = 60.0
# Rank and size, as MPI launchers tell them.
MPI_NAMES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


class BenchRanks(Protocol):
    """`size` ranks ready to measure rows; `leads` in the process that prints."""

    size: int
    leads: bool
    facts: dict[str, Any]

    def call(self, fn: Any, *args: Any) -> list[Any]:
        """fn(group, *args) on every rank; the results this process knows, rank 0's first if it leads."""

    def measure(self, case: Case, order: Order) -> dict[str, Any] | None:
        """One row, where it is known."""

    def close(self) -> None: ...


class StartedRanks:
    """Ranks of our own, each a process."""

    leads = True

    def __init__(
        self, size: int, gloo: bool, backend: bool, peers: list[str], pin: bool = False, quota: int = 0
    ) -> None:
        self.size = size
        with contextlib.ExitStack() as ending:
            self._folder = tempfile.mkdtemp(prefix="unisono-bench-")
            ending.callback(shutil.rmtree, self._folder, ignore_errors=True)
            tasks = ending.enter_context(cpu_quota(quota)) if quota else None
            env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            self._pool = ending.enter_context(RankPool(size, env=env, group_timeout_s=300.0))
            if pin or quota:  # before the group is made, which looks at its CPUs then
                self._pool.run(rows.settle, pin, tasks, own_group=True)
            self.facts: dict[str, Any] = self.call(rows.join, self._folder, gloo, backend, peers)[0]
            self._ending = ending.pop_all()

    def call(self, fn: Any, *args: Any) -> list[Any]:
        return self._pool.run(fn, *args, timeout_s=ROW_LIMIT_S)

    def measure(self, case: Case, order: Order) -> dict[str, Any] | None:
        row: dict[str, Any] | None = self.call(rows.measure, case, order)[0]
        return row

    def close(self) -> None:
        with self._ending:
            self.call(rows.leave)


class GivenRanks:
    """One rank each of a torchrun or mpiexec: every process runs the same rows, rank 0 prints."""

    def __init__(self, gloo: bool, backend: bool, peers: list[str]) -> None:
        import torch

        torch.set_num_threads(1)
        self._folder: str | None = None
        self.group, folder = _meet()
        self.size, self.leads = self.group.size, self.group.rank == 0
        if self.leads:
            self._folder = folder
        self.facts: dict[str, Any] = rows.join(self.group, folder, gloo, backend, peers)

    def call(self, fn: Any, *args: Any) -> list[Any]:
        return [fn(self.group, *args)]

    def measure(self, case: Case, order: Order) -> dict[str, Any] | None:
        return rows.measure(self.group, case, order)

    def close(self) -> None:
        rows.leave(self.group)
        self.group.barrier()
        self.group.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def given_size() -> int | None:
    """How many ranks a launcher has started with this one; None if no launcher has."""
    if "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return int(os.environ["WORLD_SIZE"])
    for rank_name, size_name in MPI_NAMES:
        if rank_name in os.environ and size_name in os.environ:
            return int(os.environ[size_name])
    return None


def _meet() -> tuple[Group, str]:
    """The launcher's ranks in a group, and a folder of theirs for sockets."""
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        group = Group.from_env()
        store = group._store
        assert store is not None
        if group.rank == 0:
            store.set("unisono/bench/folder", tempfile.mkdtemp(prefix="unisono-bench-"))
        return group, store.get("unisono/bench/folder").decode()
    rank, size = next((int(os.environ[rank]), int(os.environ[size])) for rank, size in MPI_NAMES if rank in os.environ)
    folder = _folder_of_launcher(rank)
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    return Group.from_store(FileStore(os.path.join(folder, "store"), size), rank, size, name="bench"), folder


def _folder_of_launcher(rank: int) -> str:
    """A folder all ranks of one mpiexec find: named after their common parent, which rank 0 makes."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    folder = Path(tempfile.gettempdir()) / f"unisono-bench-{os.getuid()}-{parent}-{started}"
    if rank == 0:
        folder.mkdir(mode=0o700)
        return str(folder)
    deadline = time.monotonic() + MEETING_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to somebody else")
            return str(folder)
        time.sleep(0.01)
    raise TimeoutError(f"rank 0 did not make {folder} within {MEETING_S:g} s")
