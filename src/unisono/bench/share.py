"""What new tensors in shared memory cost and gain, both ways in one run.

    unisono bench share
    unisono bench share --width 512 --rounds 20 --json
    unisono bench share --only alone,fork

alone: one process, without communication: making and freeing a tensor, adding two, and a training step, with ordinary
tensors and with those of unisono.share_new_tensors. memory: what the heap takes beyond what is alive, of tensors of
random sizes and lifetimes. fork: what a fork costs with tensors of both kinds in use. ranks: plain torch programs on
several ranks: on gloo, on unisono with ordinary tensors, on unisono with new tensors shared. The ways take turns, round
by round; a round's time is that of the slowest rank; the numbers are medians over the rounds, and ratios those of
rounds. `staged` is what one rank copies through the stage in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import unisono
from unisono.group import names
from unisono.group.group import Group
from unisono.testing import RankPool

from .plain_programs import PROGRAMS, Step, alone
from .share_memory import measure_fork, measure_fragmentation

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
WAYS = ("gloo", "ordinary", "shared")
PARTS = ("alone", "memory", "fork", "ranks")
FORK_MIB = (64, 256, 512)  # the last one beyond UNISONO_FORK_COPY_MAX
_TURN_S = 0.01  # one turn of a short call repeats it for about as long


def measure_alone(rounds: int, width: int) -> list[dict[str, Any]]:
    """Rows of one process: microseconds of a call, with ordinary tensors and with shared ones."""
    calls: dict[str, Callable[[], Step]] = {}
    for size in SIZES:
        calls[f"empty {size >> 10} KiB"] = lambda n=size // 4: lambda: torch.empty(n)  # type: ignore[misc]
        calls[f"add {size >> 10} KiB"] = lambda n=size // 4: _adding(n)  # type: ignore[misc]
    calls["training step"] = lambda: alone(None, width)
    rows = []
    for name, make in calls.items():
        steps: dict[bool, Step] = {}
        for on in (False, True):
            with unisono.share_new_tensors(enabled=on):
                steps[on] = make()
                steps[on]()
        repeats = _repeats(steps[False])
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(rounds):
            for on in (False, True) if turn % 2 else (True, False):
                with unisono.share_new_tensors(enabled=on):
                    times[on].append(_time(steps[on], repeats))
        ordinary, shared = (statistics.median(times[on]) * 1e6 for on in (False, True))
        ratio = statistics.median(a / b for a, b in zip(times[False], times[True], strict=True))
        rows.append({"what": name, "ordinary_us": ordinary, "shared_us": shared, "ratio": ratio})
    return rows


def _adding(n: int) -> Step:
    x = torch.ones(n)
    return lambda: x + x


def _repeats(step: Step) -> int:
    return max(1, int(_TURN_S / max(_time(step, 1), 1e-7)))


def _time(step: Step, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - began) / repeats


_groups: dict[str, dist.ProcessGroup] = {}  # of this rank, by way; kept, since DTensor remembers groups by name


def _join(group: Group, path: str) -> None:
    dist.init_process_group("gloo", store=FileStore(path, group.size), rank=group.rank, world_size=group.size)
    for way in WAYS:
        _groups[way] = dist.new_group(list(range(group.size)), backend="gloo" if way == "gloo" else "unisono")


def _rank_rows(group: Group, name: str, rounds: int, width: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of each round, by way, and the bytes staged in one step."""
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        with unisono.share_new_tensors(enabled=way == "shared"):
            steps[way] = PROGRAMS[name](_groups[way], width)
            for _ in range(3):
                steps[way]()
        found[way] = {"ms": [], "staged": None}
    for turn in range(rounds):
        for i in range(len(WAYS)):
            way = WAYS[(turn + i) % len(WAYS)]
            native = names.native(_groups[way])
            before = native.staged_bytes if native else 0
            with unisono.share_new_tensors(enabled=way == "shared"):
                group.barrier()
                found[way]["ms"].append(_time(steps[way], 1) * 1e3)
            if native:
                found[way]["staged"] = native.staged_bytes - before
    return found


def measure_ranks(ranks: int, rounds: int, width: int) -> list[dict[str, Any]]:
    """Rows of programs on several ranks."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, RankPool(ranks, group_timeout_s=600, num_threads=1) as pool:
        pool.run(_join, f"{folder}/store")
        for name in PROGRAMS:
            per_rank = pool.run(_rank_rows, name, rounds, width, timeout_s=600)
            row: dict[str, Any] = {"what": name, "ranks": ranks}
            rounds_of: dict[str, list[float]] = {}
            for way in WAYS:
                slowest = [max(times) for times in zip(*(rank[way]["ms"] for rank in per_rank), strict=True)]
                row[f"{way}_ms"] = statistics.median(slowest)
                row[f"{way}_staged"] = per_rank[0][way]["staged"]
                rounds_of[way] = slowest
            for way in WAYS[:-1]:
                pairs = zip(rounds_of[way], rounds_of["shared"], strict=True)
                row[f"{way}_ratio"] = statistics.median(a / b for a, b in pairs)
            rows.append(row)
    return rows


def _show_alone(rows: list[dict[str, Any]]) -> None:
    print(f"{'one process':<20}{'ordinary us':>13}{'shared us':>13}{'ordinary / shared':>20}")
    for row in rows:
        print(f"{row['what']:<20}{row['ordinary_us']:>13.2f}{row['shared_us']:>13.2f}{row['ratio']:>20.2f}")


def _show_memory(found: dict[str, float]) -> None:
    print(f"\nheap / alive: {found['peak']:.2f} at the peak, {found['end']:.2f} at the end", end="")
    print(f", {found['rounding']:.2f} in blocks; {100 * found['shared']:.0f} % of the tensors shared")


def _show_fork(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'fork':<20}{'ordinary ms':>13}{'shared ms':>13}{'the first ms':>14}{'ms / MiB':>11}{'still shared':>14}")
    for row in rows:
        each = (row["shared_ms"] - row["ordinary_ms"]) / row["mib"]
        print(
            f"{row['mib']:>4} MiB in use     {row['ordinary_ms']:>13.2f}{row['shared_ms']:>13.2f}"
            f"{row['shared_first_ms']:>14.2f}{each:>11.2f}{100 * row['shared_kept']:>12.0f} %"
        )


def _show_ranks(rows: list[dict[str, Any]], ranks: int) -> None:
    head = f"{f'{ranks} ranks':<20}{'gloo ms':>10}{'ordinary ms':>13}{'shared ms':>11}{'gloo / shared':>15}"
    print(f"\n{head}{'ordinary / shared':>19}{'staged ordinary':>17}{'staged shared':>15}")
    for row in rows:
        gloo, ordinary, shared = (row[f"{way}_ms"] for way in WAYS)
        print(
            f"{row['what']:<20}{gloo:>10.2f}{ordinary:>13.2f}{shared:>11.2f}{row['gloo_ratio']:>15.2f}"
            f"{row['ordinary_ratio']:>19.2f}{row['ordinary_staged']:>17}{row['shared_staged']:>15}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="unisono bench share", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--width", type=int, default=512, help="of the models' layers")
    parser.add_argument("--only", default=",".join(PARTS), help="parts of it, with commas")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    args = parser.parse_args(argv)
    if unknown := set(args.only.split(",")) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    ways: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "alone": (lambda: measure_alone(args.rounds, args.width), _show_alone),
        "memory": (measure_fragmentation, _show_memory),
        "fork": (lambda: [measure_fork(mib) for mib in FORK_MIB], _show_fork),
        "ranks": (
            lambda: measure_ranks(args.ranks, args.rounds, args.width),
            lambda rows: _show_ranks(rows, args.ranks),
        ),
    }
    found = {}
    for part in PARTS:
        if part in args.only.split(","):
            measure, show = ways[part]
            found[part] = measure()
            if not args.json:
                show(found[part])
    if args.json:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
