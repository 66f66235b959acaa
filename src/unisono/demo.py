"""Two ranks show an uneven all-gather and an uneven reduce-scatter, checked, then timed against gloo.

Run it with `make demo`, `unisono demo` or `python -m unisono.demo`; it starts the ranks itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import unisono
from unisono.testing import run_ranks

if TYPE_CHECKING:
    from unisono.group.group import Group

SPLITS = [2, 3]  # rows of rank 0 and rank 1
COLUMNS = 2
WIDTH = 5  # of a number in a box
SIZES = {"1 KiB": 1 << 10, "256 KiB": 1 << 18, "16 MiB": 1 << 24}
COLORS = ["36", "33"]  # of what comes from rank 0 and rank 1

NEXT = """
Next, with .venv/bin (or your own environment's) in the PATH:
  unisono doctor                                                    is this machine fit for it?
  torchrun --nproc-per-node=2 examples/tensor_parallel_block.py     tokens per second against gloo
  docs/start.md                                                     your own program, in ten minutes"""

Rows = list[list[float]]
Owners = list[list[int]]  # for each rank, the ranks that its rows belong to
Times = dict[tuple[str, str, str], list[float]]  # (verb, size, library) -> seconds of each repetition


# What runs on the ranks -------------------------------------------------------------------------------------


def gather_input(rank: int) -> torch.Tensor:
    """Rank r's rows for the all-gather: 10, 11, … on rank 0, 20, 21, … on rank 1."""
    start = 10.0 * (rank + 1)
    return torch.arange(start, start + SPLITS[rank] * COLUMNS).view(SPLITS[rank], COLUMNS)


def scatter_input(rank: int) -> torch.Tensor:
    """Rank r's rows for the reduce-scatter: 0, 1, 2, … on rank 0, a hundred times that on rank 1."""
    total = sum(SPLITS)
    return torch.arange(float(total * COLUMNS)).view(total, COLUMNS).mul(100**rank)


def show_uneven(group: Group) -> tuple[Rows, Rows]:
    """What this rank has after the all-gather and after the reduce-scatter."""
    counts = [rows * COLUMNS for rows in SPLITS]  # the group counts elements
    mine = unisono.empty(SPLITS[group.rank], COLUMNS)
    mine.copy_(gather_input(group.rank))
    gathered = unisono.empty(sum(SPLITS), COLUMNS)
    group.all_gather(gathered, mine, counts)

    everything = unisono.empty(sum(SPLITS), COLUMNS)
    everything.copy_(scatter_input(group.rank))
    scattered = unisono.empty(SPLITS[group.rank], COLUMNS)
    group.reduce_scatter(scattered, everything, counts)
    return gathered.tolist(), scattered.tolist()


def time_both(group: Group, store_path: str, seconds: float) -> Times:
    """Times of both verbs at all sizes, with unisono and with gloo on the same tensors, results compared."""
    store = dist.FileStore(store_path, group.size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    times: Times = {}
    for size, size_bytes in SIZES.items():
        times |= time_size(group, size, size_bytes // 4, seconds)
    dist.destroy_process_group()
    return times


def time_size(group: Group, size: str, count: int, seconds: float) -> Times:
    """Times of both verbs on `count` elements, split 1:3."""
    counts = [count // 4, count - count // 4]
    mine, inputs = unisono.empty(counts[group.rank]), unisono.empty(count)
    mine.normal_()
    inputs.normal_()
    gathered, gathered_by_gloo = unisono.empty(count), unisono.empty(count)
    scattered, scattered_by_gloo = unisono.empty(mine.numel()), unisono.empty(mine.numel())
    calls: dict[tuple[str, str, str], Callable[[], object]] = {
        ("all-gather", size, "unisono"): lambda: group.all_gather(gathered, mine, counts),
        ("all-gather", size, "gloo"): lambda: gloo_all_gather(gathered_by_gloo, mine, counts),
        ("reduce-scatter", size, "unisono"): lambda: group.reduce_scatter(scattered, inputs, counts),
        ("reduce-scatter", size, "gloo"): lambda: gloo_reduce_scatter(scattered_by_gloo, inputs, counts),
    }
    times = {key: time_calls(group, call, seconds) for key, call in calls.items()}
    if not torch.equal(gathered, gathered_by_gloo) or not torch.equal(scattered, scattered_by_gloo):
        raise AssertionError(f"at {size}, unisono's result differs from gloo's")
    return times


def gloo_all_gather(output: torch.Tensor, mine: torch.Tensor, counts: list[int]) -> None:
    """The fastest way found with gloo, whose all_gather refuses unequal sizes: one broadcast per rank."""
    parts = torch.split(output, counts)
    parts[dist.get_rank()].copy_(mine)
    works = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(parts)]
    for work in works:
        work.wait()


def gloo_reduce_scatter(output: torch.Tensor, inputs: torch.Tensor, counts: list[int]) -> None:
    """The fastest way found with gloo: an uneven all-to-all, then the sum of what arrived."""
    arrived = inputs.new_empty(len(counts) * output.numel())
    dist.all_to_all_single(arrived, inputs, [output.numel()] * len(counts), counts)
    torch.sum(arrived.view(len(counts), -1), 0, out=output)


def time_calls(group: Group, call: Callable[[], object], seconds: float) -> list[float]:
    """Time `call` again and again, for about `seconds`; the same number of times on every rank."""
    for _ in range(2):
        call()
    group.barrier()
    start = time.perf_counter()
    call()
    once = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    group.all_reduce(once, "max")
    times = []
    for _ in range(min(1000, max(5, int(seconds / once.item())))):
        group.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


# What is printed --------------------------------------------------------------------------------------------


def paint(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def draw_rows(title: str, rows: Rows, owners: Sequence[int], note: str) -> list[str]:
    """A box of rows, each in the colour of the rank it belongs to and with that rank's number beside it."""
    width = WIDTH * COLUMNS + 1
    lines = [f"{title:<{width + 6}}", "┌" + "─" * width + "┐    "]
    for row, owner in zip(rows, owners, strict=True):
        cells = "".join(f"{value:{WIDTH}g}" for value in row) + " "
        lines.append("│" + paint(cells, COLORS[owner]) + "│" + f"{note}{owner} ".rjust(4))
    lines.append("└" + "─" * width + "┘    ")
    return lines


def put_beside(boxes: list[list[str]]) -> str:
    blank = " " * (WIDTH * COLUMNS + 7)
    return "\n".join("  " + "  ".join(line).rstrip() for line in zip_longest(*boxes, fillvalue=blank))


def draw_call(inputs: list[Rows], given: Owners, note: str, results: list[Rows], got: Owners) -> str:
    """What both ranks give and, beside it, what they get; `given` and `got` say which ranks the rows belong to."""
    left = [draw_rows(f"rank {rank} gives", inputs[rank], given[rank], note) for rank in (0, 1)]
    return put_beside(left + [draw_rows(f"rank {rank} gets", results[rank], got[rank], "r") for rank in (0, 1)])


def check(gathered: list[Rows], scattered: list[Rows]) -> bool:
    """Compare with the same computed here, on one process."""
    whole = torch.cat([gather_input(0), gather_input(1)]).tolist()
    parts = torch.split(scatter_input(0) + scatter_input(1), SPLITS)
    return gathered == [whole, whole] and scattered == [part.tolist() for part in parts]


def format_time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def draw_times(by_rank: list[Times]) -> str:
    """A table of medians; a repetition takes as long as its slower rank."""

    def median(key: tuple[str, str, str]) -> float:
        slower = [max(a, b) for a, b in zip(by_rank[0][key], by_rank[1][key], strict=True)]
        return statistics.median(slower)

    lines = [f"  {'verb':<15}{'size':>8}{'unisono':>12}{'gloo':>12}{'gloo / unisono':>17}"]
    for verb in ("all-gather", "reduce-scatter"):
        for size in SIZES:
            ours, theirs = median((verb, size, "unisono")), median((verb, size, "gloo"))
            ratio = f"{theirs / ours:.1f} ×"
            lines.append(f"  {verb:<15}{size:>8}{format_time(ours):>12}{format_time(theirs):>12}{ratio:>17}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the pictures, the check and the times; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="unisono demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="spent on each time in the table (default 0.5)")
    parser.add_argument("--no-times", action="store_true", help="leave the table of times out")
    options = parser.parse_args(argv)
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    results = run_ranks(2, show_uneven, env=env)
    gathered, scattered = [result[0] for result in results], [result[1] for result in results]
    first, second = SPLITS
    parts = [[0] * first, [1] * second]
    whole = [parts[0] + parts[1]] * 2
    print(f"Uneven all-gather, splits {SPLITS}: rank 0 gives {first} rows, rank 1 {second}, both get all.")
    print(draw_call([gather_input(rank).tolist() for rank in (0, 1)], parts, "r", gathered, whole))
    print(f"\nUneven reduce-scatter, splits {SPLITS}: rank 0 gets {first} rows of the sum, rank 1 {second}.")
    print(draw_call([scatter_input(rank).tolist() for rank in (0, 1)], whole, "→", scattered, parts))
    if not check(gathered, scattered):
        print("\nWRONG: the results differ from the reference computed on one process.")
        return 1
    print("checked: equal to the reference on every rank")
    if options.no_times:
        print(NEXT)
        return 0

    if sys.stderr.isatty():
        print(f"measuring, about {len(SIZES) * 4 * options.seconds + 2:.0f} s …", end="\r", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="unisono-demo-") as folder:
        by_rank = run_ranks(2, time_both, os.path.join(folder, "gloo"), options.seconds, env=env, timeout_s=300.0)
    if sys.stderr.isatty():
        print("\033[2K", end="", file=sys.stderr, flush=True)
    print("\nTimes on the same float32 tensors, split 1:3, medians. For gloo, the fastest ways found:")
    print("a broadcast per rank, all at once; an uneven all-to-all followed by a sum.")
    print(draw_times(by_rank))
    print(NEXT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
