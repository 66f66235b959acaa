"""What tensors born shared cost and gain, both ways in one run.

    unisono bench born
    unisono bench born --width 512 --rounds 20 --json

First one process, without communication: making and freeing a tensor, adding two, and a training step, with ordinary
tensors and with those of unisono.share_new_tensors. Then plain torch programs on several ranks: on gloo, on unisono
with ordinary tensors, on unisono with tensors born shared. The ways take turns, round by round; a round's time is that
of the slowest rank; the numbers are medians over the rounds. `staged` is what one rank copies through the stage in a
step.
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

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
WAYS = ("gloo", "ordinary", "born")
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
        ordinary, born = (statistics.median(times[on]) * 1e6 for on in (False, True))
        rows.append({"what": name, "ordinary_us": ordinary, "born_us": born, "ratio": ordinary / born})
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
        with unisono.share_new_tensors(enabled=way == "born"):
            steps[way] = PROGRAMS[name](_groups[way], width)
            for _ in range(3):
                steps[way]()
        found[way] = {"ms": [], "staged": None}
    for turn in range(rounds):
        for i in range(len(WAYS)):
            way = WAYS[(turn + i) % len(WAYS)]
            native = names.native(_groups[way])
            before = native.staged_bytes if native else 0
            with unisono.share_new_tensors(enabled=way == "born"):
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
            for way in WAYS:
                slowest = [max(times) for times in zip(*(rank[way]["ms"] for rank in per_rank), strict=True)]
                row[f"{way}_ms"] = statistics.median(slowest)
                row[f"{way}_staged"] = per_rank[0][way]["staged"]
            rows.append(row)
    return rows


def _show_alone(rows: list[dict[str, Any]]) -> None:
    print(f"{'one process':<20}{'ordinary us':>13}{'born us':>13}{'ordinary / born':>18}")
    for row in rows:
        print(f"{row['what']:<20}{row['ordinary_us']:>13.2f}{row['born_us']:>13.2f}{row['ratio']:>18.2f}")


def _show_ranks(rows: list[dict[str, Any]], ranks: int) -> None:
    head = f"{f'{ranks} ranks':<20}{'gloo ms':>10}{'ordinary ms':>13}{'born ms':>10}{'gloo / born':>13}"
    print(f"\n{head}{'ordinary / born':>17}{'staged ordinary':>17}{'staged born':>13}")
    for row in rows:
        gloo, ordinary, born = (row[f"{way}_ms"] for way in WAYS)
        print(
            f"{row['what']:<20}{gloo:>10.2f}{ordinary:>13.2f}{born:>10.2f}{gloo / born:>13.2f}"
            f"{ordinary / born:>17.2f}{row['ordinary_staged']:>17}{row['born_staged']:>13}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="unisono bench born", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=512, help="of the models' layers")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    one = measure_alone(args.rounds, args.width)
    if not args.json:
        _show_alone(one)
    several = measure_ranks(args.ranks, args.rounds, args.width)
    if args.json:
        print(json.dumps({"one_process": one, "ranks": several}, indent=1))
    else:
        _show_ranks(several, args.ranks)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
