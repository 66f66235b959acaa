"""What new tensors in shared memory cost in memory and at a fork, for `unisono.bench.share`."""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import Any

import torch

import unisono
from unisono import _core

MIB = 1 << 20


def churn(steps: int, live_bytes: int, least: int, most: int, seed: int = 0) -> dict[str, float]:
    """Makes and frees tensors of random sizes and lifetimes, and returns what the heap took beyond what was alive.

    Sizes are as likely in every doubling from ``least`` to ``most``, and half of them are powers of two; every quarter
    of the steps the largest size changes by a factor of eight. About ``live_bytes`` are alive, and what is freed is as
    often the newest as any. ``peak`` is the most that the heap held over the most that was alive, ``end`` the same at
    the end, ``rounding`` what is lost inside of the blocks.
    """
    rng, alive, total = random.Random(seed), list[torch.Tensor](), 0
    most_alive = most_held = 0
    for step in range(steps):
        largest = most if step * 4 // steps % 2 == 0 else most // 8
        size = int(least * (largest / least) ** rng.random())
        if rng.random() < 0.5:
            size = 1 << (size - 1).bit_length()
        while alive and total + size > live_bytes:
            i = rng.choice((-1, rng.randrange(len(alive))))
            alive[i], alive[-1] = alive[-1], alive[i]
            total -= alive.pop().numel()
        alive.append(torch.empty(size, dtype=torch.uint8))
        total += size
        most_alive = max(most_alive, total)
        most_held = max(most_held, _core.heap_usage()["reserved"])
    usage = _core.heap_usage()
    return {
        "peak": most_held / most_alive,
        "end": usage["reserved"] / total,
        "rounding": usage["in_use"] / total,
        "shared": statistics.mean(map(unisono.is_shared, alive)),
    }


def measure_fragmentation() -> dict[str, float]:
    """The churn of a large program, compressed: 256 MiB alive in tensors of 64 KiB to 16 MiB."""
    unisono.trim()
    with unisono.share_new_tensors():
        found = churn(20_000, 256 * MIB, 64 << 10, 16 * MIB)
    unisono.trim()
    return found


def measure_fork(mib: int, rounds: int = 7) -> dict[str, Any]:
    """Milliseconds of a fork with that much memory in use, ordinary and shared: until the child is there and gone."""
    found: dict[str, Any] = {"mib": mib}
    for name, on in (("ordinary", False), ("shared", True)):
        with unisono.share_new_tensors(enabled=on):
            tensors = [torch.ones(MIB // 4) for _ in range(mib)]
        assert all(unisono.is_shared(t) == on for t in tensors)
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
            times.append((time.perf_counter() - began) * 1e3)
        found[f"{name}_ms"] = statistics.median(times)
        found[f"{name}_first_ms"] = times[0]  # in which tensors beyond UNISONO_FORK_COPY_MAX become private
        found[f"{name}_kept"] = statistics.mean(map(unisono.is_shared, tensors))
        del tensors
        unisono.trim()
    return found
