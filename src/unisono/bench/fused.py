"""How fast the fused matmuls are, against what else a user could write, interleaved round by round in one run.

    python -m unisono.bench.fused
    python -m unisono.bench.fused --rows 1 8 64 --dtype float16 --rounds 50 --json

Every rank holds ``--groups`` pairs ``x [rows, k] @ weight [k, n]``; the products are summed over the ranks. Contenders:

    plain      grouped_matmul_all_reduce on the weights as they are
    prepared   the same on PreparedWeight
    tree       as plain, with order="tree"
    knowing    the best a knowing user can write: every weight turned into float32 in a buffer that stays in cache,
               torch.mm of that into shared memory that was made before, one unisono all_reduce, rounding
    sgemm      nothing but the float32 torch.mm calls, on weights and x that are float32 already
    torch      torch.mm in the given dtype, one gloo all_reduce (in 16 bit two rounds of it have to do: they take long)

A round's time is that of the slowest rank; the numbers are medians over the rounds, and ratios of these.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import unisono
from unisono.group.group import Group
from unisono.testing import RankPool

ROWS = (1, 2, 4, 8, 64, 128, 256, 512)
DTYPES = ("float16", "bfloat16", "float32")
CONTENDERS = ("plain", "prepared", "tree", "knowing", "sgemm", "torch")
_LONG_S = 0.25  # a contender that takes this long has two rounds only


@dataclass(frozen=True)
class FusedRow:
    """One row: its question and the median times in milliseconds."""

    dtype: str
    groups: int
    rows: int
    k: int
    n: int
    ranks: int
    rounds: int
    ms: dict[str, float]

    def ratio(self, slow: str, fast: str) -> float | None:
        """How many times as long one contender takes as another."""
        return self.ms[slow] / self.ms[fast] if slow in self.ms and fast in self.ms else None


def measure(
    dtypes: Sequence[str] = DTYPES,
    rows: Sequence[int] = ROWS,
    *,
    groups: int = 8,
    k: int = 512,
    n: int = 1024,
    ranks: int = 2,
    rounds: int = 30,
    contenders: Sequence[str] = CONTENDERS,
    seen: Callable[[FusedRow], None] = lambda row: None,
) -> list[FusedRow]:
    """Measures every combination; ``seen`` gets each row when it is done."""
    results = []
    with tempfile.TemporaryDirectory() as folder, RankPool(ranks, group_timeout_s=600, num_threads=1) as pool:
        pool.run(_join_gloo, f"{folder}/store")
        for dtype in dtypes:
            for m in rows:
                asked = (dtype, groups, m, k, n, rounds, tuple(contenders))
                per_rank = pool.run(_rank_times, *asked, timeout_s=600)
                slowest = {
                    name: [max(times) for times in zip(*(r[name] for r in per_rank), strict=True)]
                    for name in contenders
                }
                ms = {name: statistics.median(times) * 1e3 for name, times in slowest.items()}
                results.append(FusedRow(dtype, groups, m, k, n, ranks, rounds, ms))
                seen(results[-1])
    return results


def _join_gloo(group: Group, path: str) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=FileStore(path, group.size), rank=group.rank, world_size=group.size)


def _rank_times(
    group: Group, dtype_name: str, groups: int, m: int, k: int, n: int, rounds: int, contenders: Sequence[str]
) -> dict[str, list[float]]:
    calls = _calls(group, getattr(torch, dtype_name), groups, m, k, n)
    wanted = None
    for name in contenders:  # warm up, and see that all compute the same
        result = calls[name]()
        if result is not None:
            wanted = result.float() if wanted is None else wanted
            torch.testing.assert_close(result.float(), wanted, rtol=0.05, atol=0.05 * k**0.5)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds):
        # The same order on all ranks, and another one in every round: each leaves other things in the caches.
        for name in random.Random(i).sample(contenders, len(contenders)):
            if len(times[name]) >= 2 and times[name][1] >= _LONG_S:
                continue
            group.barrier()
            begin = time.perf_counter()
            calls[name]()
            spent = time.perf_counter() - begin
            if len(times[name]) < 2:  # all ranks must see the same, or they would go separate ways
                most = torch.tensor([spent])
                group.all_reduce(most, "max")
                spent = most.item()
            times[name].append(spent)
    return times


def _calls(group: Group, dtype: torch.dtype, groups: int, m: int, k: int, n: int) -> dict[str, Callable[[], Any]]:
    chance = torch.Generator().manual_seed(group.rank)
    x = [torch.randn(m, k, generator=chance).to(dtype) for _ in range(groups)]
    weight = [torch.randn(k, n, generator=chance).to(dtype) for _ in range(groups)]
    prepared = [unisono.PreparedWeight(w) for w in weight]
    wide_x, wide_weight = [t.float() for t in x], [w.float() for w in weight]
    partial = unisono.empty(groups, m, n, dtype=torch.float32)
    scratch_x, scratch_weight = torch.empty(m, k), torch.empty(k, n)
    alone = torch.empty(groups, m, n)

    def knowing() -> torch.Tensor:
        for i in range(groups):
            if dtype is torch.float32:
                torch.mm(x[i], weight[i], out=partial[i])
            else:
                scratch_x.copy_(x[i])
                scratch_weight.copy_(weight[i])
                torch.mm(scratch_x, scratch_weight, out=partial[i])
        group.all_reduce(partial)
        return partial.to(dtype) if dtype is not torch.float32 else partial

    def sgemm() -> None:
        for i in range(groups):
            torch.mm(wide_x[i], wide_weight[i], out=alone[i])

    def by_torch() -> torch.Tensor:
        products = torch.stack([torch.mm(a, b) for a, b in zip(x, weight, strict=True)])
        dist.all_reduce(products)
        return products

    return {
        "plain": lambda: _run(x, weight, group),
        "prepared": lambda: _run(x, prepared, group),
        "tree": lambda: _run(x, weight, group, "tree"),
        "knowing": knowing,
        "sgemm": sgemm,
        "torch": by_torch,
    }


def _run(x: Any, weight: Any, group: Group, order: str | None = None) -> torch.Tensor:
    y = unisono.grouped_matmul_all_reduce(x, weight, group, split_item=2, order=order)
    return y[0].view(len(x), -1, y[0].shape[1])


HEADER = (
    f"{'dtype':>9} {'rows':>5} |"
    f" {'plain':>9} {'prepared':>9} {'tree':>9} {'knowing':>9} {'sgemm':>9} {'torch':>10}  ms |"
    f" {'torch/plain':>11} {'know/plain':>10} {'know/prep':>9} {'plain/sgemm':>11} {'prep/sgemm':>10}"
    f" {'tree/plain':>10}"
)


def line(row: FusedRow) -> str:
    """A row as people read it."""
    pairs = (
        ("torch", "plain", 11),
        ("knowing", "plain", 10),
        ("knowing", "prepared", 9),
        ("plain", "sgemm", 11),
        ("prepared", "sgemm", 10),
        ("tree", "plain", 10),
    )
    ratios = [f"{'-' if (r := row.ratio(a, b)) is None else f'{r:.2f}':>{width}}" for a, b, width in pairs]
    times = [f"{row.ms[c]:>{10 if c == 'torch' else 9}.3f}" if c in row.ms else f"{'-':>9}" for c in CONTENDERS]
    return f"{row.dtype:>9} {row.rows:>5} | {' '.join(times)}     | {' '.join(ratios)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m unisono.bench.fused", description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="rows per group")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--json", action="store_true", help="a line of JSON per row instead of the table")
    args = parser.parse_args(arguments)
    if not args.json:
        print(f"# {args.groups} groups, k {args.k} per rank, n {args.n}, {args.ranks} ranks of one thread\n{HEADER}")
    measure(
        args.dtype,
        args.rows,
        groups=args.groups,
        k=args.k,
        n=args.n,
        ranks=args.ranks,
        rounds=args.rounds,
        contenders=args.contenders,
        seen=lambda row: print(json.dumps(asdict(row)) if args.json else line(row), flush=True),
    )


if __name__ == "__main__":
    main()
