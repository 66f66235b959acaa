"""The heap under new tensors in shared memory: how much it takes, what it gives back, and who else has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import unisono
from tests.api.test_tensors import _limited_cgroup
from tests.faults.test_fork import _fork, _outcome
from unisono import _core
from unisono.bench.share_memory import churn
from unisono.testing import run_ranks

MIB = 1 << 20


def _fragmentation(group: unisono.Group) -> dict[str, float]:
    with unisono.share_new_tensors(min_bytes=4096):
        return churn(6000, 24 * MIB, 4096, 2 * MIB)


def test_fragmentation_is_bounded() -> None:
    """Tensors of random sizes and lifetimes, among them half a dozen changes of the largest size."""
    found = run_ranks(1, _fragmentation)[0]
    assert found["shared"] == 1.0
    assert found["rounding"] < 1.25 and found["peak"] < 1.8, found  # 2.0 if the heap only grows


UNDER_PRESSURE = """
import os, sys, torch, unisono
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "cgroup.procs").write_text(str(os.getpid()))
unisono.share_new_tensors()
tensors = [torch.ones(1 << 18) for _ in range(400)]
assert all(map(unisono.is_shared, tensors))
del tensors[::2]
v2 = (folder / "memory.max").exists()
limit, usage = (int((folder / name).read_text()) for name in (
    ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")))
# More than there is room for, but for the free pages between the tensors.
large = torch.ones((limit - usage + (60 << 20)) // 4)
print(unisono.is_shared(large), large.min().item(), large.max().item(), all(bool((t == 1).all()) for t in tensors))
"""


def test_free_pages_go_back_under_pressure() -> None:
    folder = _limited_cgroup(1000 * MIB)
    if folder is None:
        pytest.skip("may not make a memory cgroup here")
    try:
        command = [sys.executable, "-c", UNDER_PRESSURE, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout) == (0, "True 1.0 1.0 True\n"), done.stderr
    finally:
        folder.rmdir()


def _switching(group: unisono.Group) -> list[str]:
    """Threads make and free tensors while the switch goes on and off: each is freed where it came from."""
    stop, wrong, kinds = threading.Event(), list[str](), set[bool]()

    def work(seed: int) -> None:
        kept: list[tuple[torch.Tensor, float]] = []
        i = 0
        while not stop.is_set():
            i += 1
            kept.append((torch.full(((seed * 7919 + i * 104729) % 100_000 + 1024,), float(i)), float(i)))
            kinds.add(unisono.is_shared(kept[-1][0]))
            if len(kept) > 6:
                t, value = kept.pop((seed + i) % len(kept))
                if not bool((t == value).all()):
                    wrong.append(f"thread {seed}, turn {i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 4)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        with unisono.share_new_tensors(min_bytes=4096), unisono.share_new_tensors(enabled=False):
            pass
    while len(kinds) < 2 and threads[0].is_alive():  # until both kinds were made
        with unisono.share_new_tensors(min_bytes=4096):
            threading.Event().wait(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    if _core.heap_usage()["in_use"] >= MIB:
        wrong.append(f"{_core.heap_usage()['in_use']} bytes are left in use")
    return wrong


def test_switching_beside_threads() -> None:
    assert run_ranks(1, _switching) == [[]]


def _programs(group: unisono.Group) -> None:
    """A program that is started, though it inherits all it can, has no way to the heap; a killed child harms nobody."""
    unisono.share_new_tensors()
    tensor = torch.full((MIB,), 3.0)
    look = "import os; print(sum('memfd:unisono' in os.readlink(f'/proc/self/fd/{n}') for n in range(3, 200) "
    look += "if os.path.exists(f'/proc/self/fd/{n}')), 'memfd:unisono' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", look], close_fds=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 False\n", done.stderr

    def child() -> None:
        while True:
            tensor.add_(1.0)

    pid = _fork(child)
    tensor.add_(1.0)
    os.kill(pid, signal.SIGKILL)
    assert _outcome(pid) == "exit code -9"
    assert tensor.unique().tolist() == [4.0]
    group.all_reduce(tensor)
    assert tensor.unique().tolist() == [4.0 * group.size]


def test_programs_and_killed_children() -> None:
    run_ranks(2, _programs)
