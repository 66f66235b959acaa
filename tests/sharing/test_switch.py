"""share_new_tensors: which tensors are shared, where it begins and ends, and what happens when there is no room."""

from __future__ import annotations

import gc
import io
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

import unisono
from unisono import _core
from unisono.testing import run_ranks

MIB = 1 << 20
ROWS = (256, 1024)  # of float32: 1 MiB


def _run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


def _what_is_shared(group: unisono.Group) -> dict[str, bool]:
    before = torch.randn(ROWS)
    with unisono.share_new_tensors():
        layer = torch.nn.Linear(1024, 512)
        optimizer = torch.optim.Adam(layer.parameters())
        output = layer(torch.randn(ROWS))
        output.square().sum().backward()
        assert layer.weight.grad is not None
        optimizer.step()
        saved = io.BytesIO()
        torch.save(layer.state_dict(), saved)
        saved.seek(0)
        loaded = torch.load(saved)
        grown = torch.empty(0)
        grown.resize_(MIB)
        found = {
            "parameter": unisono.is_shared(layer.weight),
            "output": unisono.is_shared(output),
            "gradient": unisono.is_shared(layer.weight.grad),
            "optimizer": unisono.is_shared(optimizer.state[layer.weight]["exp_avg"]),
            "checkpoint": unisono.is_shared(loaded["weight"]),
            "grown": unisono.is_shared(grown),
            "copy": unisono.is_shared(before.clone()),
            "random": unisono.is_shared(torch.randn(ROWS)),
            "not small": not unisono.is_shared(torch.randn(100)),
            "not before": not unisono.is_shared(before),
        }
        assert torch.equal(loaded["weight"], layer.weight)
    found["not after"] = not unisono.is_shared(torch.randn(ROWS))
    return found


def test_what_is_shared() -> None:
    found = run_ranks(1, _what_is_shared)[0]
    assert all(found.values()), found


def _blocks(group: unisono.Group) -> None:
    def is_on(mib: int = 1) -> bool:
        return unisono.is_shared(torch.empty(mib * MIB, dtype=torch.uint8))

    with unisono.share_new_tensors():
        assert is_on()
        with unisono.share_new_tensors(min_bytes=2 * MIB):
            assert not is_on() and is_on(2)
            with unisono.share_new_tensors(enabled=False):
                assert not is_on(2)
            assert is_on(2)
        assert is_on()
    assert not is_on()
    for _ in range(5):  # each call counts, and a block gives back what was before it
        switch = unisono.share_new_tensors(min_bytes=2 * MIB)
    with unisono.share_new_tensors():
        assert is_on()
    assert not is_on() and is_on(2)
    switch.stop()
    unisono.share_new_tensors(enabled=False)
    assert not is_on(2)
    # Blocks of several threads that end in another order than they began.
    first, second = unisono.share_new_tensors(), unisono.share_new_tensors(min_bytes=2 * MIB)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not is_on() and is_on(2)
    second.__exit__(None, None, None)
    assert not is_on(2)
    with pytest.raises(ValueError, match="must not be negative"):
        unisono.share_new_tensors(min_bytes=-1)
    with pytest.raises(TypeError, match="'min_bytes' must be a whole number of bytes, got 'x'"):
        unisono.share_new_tensors(min_bytes="x")


def test_blocks() -> None:
    run_ranks(1, _blocks)


def _alignments(group: unisono.Group) -> None:
    """Views of odd sizes, and torch's own alignment."""
    with unisono.share_new_tensors(min_bytes=1):
        for n in (1, 31, 33, 1000, 1023, 5000, 100_001, 3 * MIB + 1):
            t = torch.full((n,), 7, dtype=torch.uint8)
            assert unisono.is_shared(t) and t.data_ptr() % 64 == 0
            assert int(t.sum(dtype=torch.int64)) == 7 * n


@pytest.mark.parametrize("huge", ["0", "1"])  # with 1, torch wants whole pages
def test_alignments(huge: str) -> None:
    run_ranks(1, _alignments, env={"THP_MEM_ALLOC_ENABLE": huge})


def _threads(group: unisono.Group) -> None:
    """Several threads make, keep and free tensors of all sizes, also each other's; each tensor keeps its values."""
    failures: list[str] = []
    swap: list[torch.Tensor] = [torch.full((1,), 0.0) for _ in range(8)]

    def work(seed: int) -> None:
        kept: list[tuple[torch.Tensor, float]] = []
        for i in range(600):
            n = (seed * 7919 + i * 104729) % 200_000 + 1
            value = float(seed * 10_000 + i)
            kept.append((torch.full((n,), value), value))
            if len(kept) > 10:
                t, value = kept.pop((seed + i) % len(kept))
                if not bool((t == value).all()):
                    failures.append(f"thread {seed}, turn {i}")
                swap[(seed + i) % len(swap)] = t  # freed by whoever comes next

    with unisono.share_new_tensors(min_bytes=4096):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    swap.clear()
    gc.collect()
    assert _core.heap_usage()["in_use"] < MIB  # of the group


def test_threads() -> None:
    run_ranks(1, _threads, timeout_s=110)


def _trim(group: unisono.Group) -> None:
    base = _core.heap_usage()["resident"]
    with unisono.share_new_tensors():
        tensors = [torch.ones(ROWS) for _ in range(64)]
    kept = tensors[31]
    assert _core.heap_usage()["resident"] > base + 60 * MIB
    del tensors
    assert unisono.trim() > 60 * MIB
    assert _core.heap_usage()["resident"] < base + 4 * MIB
    assert bool((kept == 1).all())
    with unisono.share_new_tensors():
        again = [torch.ones(ROWS) for _ in range(8)]
    assert all(unisono.is_shared(t) and bool((t == 1).all()) for t in again)
    del again
    deadline = time.monotonic() + 20  # by itself too, after a while
    while _core.heap_usage()["resident"] > base + 5 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _core.heap_usage()["resident"] <= base + 5 * MIB


def test_freed_memory_goes_back() -> None:
    run_ranks(1, _trim)


def _cap(group: unisono.Group) -> None:
    with unisono.share_new_tensors(max_bytes=10 * MIB):
        tensors = [torch.ones(ROWS) for _ in range(20)]
        shared = sum(map(unisono.is_shared, tensors))
        assert 5 <= shared <= 10
        assert all(bool((t == 1).all()) for t in tensors)
        del tensors
        assert unisono.is_shared(torch.ones(ROWS))


def test_the_cap() -> None:
    run_ranks(1, _cap)


def _full_heap(group: unisono.Group) -> None:
    """More than the heap may hold: ordinary memory, no error; and shared again as soon as there is room."""
    with unisono.share_new_tensors():
        tensors = [torch.full(ROWS, float(i)) for i in range(60)]
        assert not unisono.is_shared(torch.empty(1 << 30, dtype=torch.uint8))
        shared = sum(map(unisono.is_shared, tensors))
        assert 10 <= shared < 32
        assert _core.share_refusals() >= 60 - shared
        assert all(bool((t == i).all()) for i, t in enumerate(tensors))
        del tensors
        time.sleep(0.2)  # it is not asked for a moment after it was full
        assert unisono.is_shared(torch.ones(ROWS))
        group.all_reduce(torch.ones(ROWS))


def test_a_full_heap() -> None:
    run_ranks(1, _full_heap, env={"UNISONO_HEAP_MAX": "32M"})


def _too_much(group: unisono.Group) -> None:
    with unisono.share_new_tensors():
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(1 << 50, dtype=torch.uint8)
        assert unisono.is_shared(torch.ones(ROWS))


def test_too_much_is_torchs_own_error() -> None:
    run_ranks(1, _too_much)


def test_by_environment() -> None:
    """In a program that never imports unisono, down to the end of the interpreter with tensors alive in odd places."""
    code = """
import atexit, sys, threading, torch
assert "unisono" in sys.modules
t = torch.nn.Linear(1024, 1024)
keep = threading.local(); keep.t = torch.randn(1024, 1024)
sys.modules["odd"] = torch.randn(1024, 1024)
atexit.register(lambda: torch.randn(1024, 1024).sum())
torch.autograd.grad(t(torch.randn(64, 1024)).sum(), t.weight)
shared = sys.modules["unisono"].is_shared
print(shared(t.weight), shared(torch.randn(100, 100)), shared(torch.randn(10, 100)))
"""
    done = _run(code, UNISONO_SHARE="1", UNISONO_SHARE_MIN_BYTES="32K")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True False\n", "")
    off = _run("import torch, sys; print('unisono' in sys.modules)", UNISONO_SHARE="0")
    assert (off.returncode, off.stdout) == (0, "False\n")


def test_where_the_allocator_cannot_be_replaced() -> None:
    """A clear error, and torch goes on as before."""
    code = """
import torch, unisono
from unisono.base import sharing
for library in ("libnothing.so", "libtorch_python.so"):
    sharing._LIBRARY = library
    try:
        unisono.share_new_tensors()
    except unisono.SystemCallError as error:
        print(error)
assert not unisono.is_shared(torch.ones(1 << 20))
"""
    done = _run(code)
    assert done.returncode == 0, done.stderr
    assert "libnothing.so is not loaded in this process" in done.stdout
    assert "libtorch_python.so imports no posix_memalign" in done.stdout


def test_an_allocator_that_torch_does_not_use() -> None:
    """The entries are there, but torch's tensors come from elsewhere: an error too."""
    code = """
import unisono
from unisono.base import sharing
sharing._LIBRARY = "libtorch_cpu.so"  # it has such imports, for other things
try:
    unisono.share_new_tensors()
except unisono.SystemCallError as error:
    print(error)
"""
    done = _run(code)
    assert "torch does not allocate by the functions that libtorch_cpu.so imports" in done.stdout, done.stderr


LIBRARY = """
#include <stdlib.h>
void* make(size_t bytes) { void* p = NULL; return posix_memalign(&p, 64, bytes) ? NULL : p; }
void drop(void* p) { free(p); }
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize("flags", [["-Wl,-z,lazy"], ["-Wl,-z,now,-z,relro"], ["-fno-plt", "-Wl,-z,now,-z,relro"]])
def test_libraries_linked_in_other_ways(tmp_path: object, flags: list[str]) -> None:
    """Entries that are looked up late, or made read-only, or of calls without a linkage table."""
    source, library = f"{tmp_path}/victim.c", f"{tmp_path}/libvictim.so"
    with open(source, "w") as file:
        file.write(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", *flags, source, "-o", library], check=True, timeout=60)
    code = f"""
import ctypes, unisono
from unisono import _core
library = ctypes.CDLL({library!r})
library.make.restype = ctypes.c_void_p
library.make.argtypes, library.drop.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
before = library.make(1 << 20)
_core.replace_allocator("libvictim.so")
_core.share_from(1 << 20, 1 << 40)
shared, small = library.make(1 << 20), library.make(1000)
print(*map(_core.is_reachable, (before, shared, small)), _core.heap_usage()["in_use"] >= 1 << 20)
for p in (before, shared, small):
    library.drop(p)
print(_core.heap_usage()["in_use"])
"""
    done = _run(code)
    assert (done.returncode, done.stdout) == (0, "False True False True\n0\n"), done.stderr
