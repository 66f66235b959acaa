"""Measure collectives as nccl-tests does, against the memory's limit and against gloo, in one run.

    $ python -m unisono.bench all_reduce -b 8 -e 64M -f 8 -n 2

Without arguments it measures everything the package promises, and says at the end which promises hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from unisono.bench_ops import DTYPES, OPS, REDOPS, Case
from unisono.bench_rows import Order, join, leave, measure
from unisono.bench_targets import show_bytes, summarise, summary_lines
from unisono.testing import RankPool

DEFAULT_OPS = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
CROWDED_SIZES = (8, 16 << 10, 1 << 20, 16 << 20)  # with more ranks than CPUs, unless sizes are given
MEMORY_SHARE = 0.7  # of what is free may be taken by one row

TIME_NOTE = """\
# time: median over rounds; a round's time is that of its slowest rank, per call, over a batch of calls
# after an untimed call and a barrier. Contenders take turns round by round. gc is off while timing.
# limit: the least memory traffic of the operation, float32, done by plain threads (one per rank, at most
# one per CPU) on shared memory between flag barriers. gloo: its own operation; where it has none (uneven
# all_gather, gather, scatter) the fastest workaround found.
# algbw = size / time; busbw = algbw x the share of each byte that must cross between ranks (nccl-tests)."""


def parse_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([kKmMgG]?)(?:i?[bB])?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"expected bytes such as 8, 64K, 256M, got {text!r}")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2].lower()]


def parse_ranks(text: str) -> list[int]:
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        ranks = []
    if not ranks or min(ranks) < 1:
        raise argparse.ArgumentTypeError(f"expected rank counts such as 2 or 2,4,8, got {text!r}")
    return ranks


def parse_splits(text: str) -> list[str]:
    splits = text.split(",")
    for split in splits:
        if split != "even" and not re.fullmatch(r"\d+(:\d+)*", split):
            raise argparse.ArgumentTypeError(f"expected even, 1:3, 0:1 and the like, got {split!r}")
        if split != "even" and not any(int(part) for part in split.split(":")):
            raise argparse.ArgumentTypeError(f"at least one share must be above 0, got {split!r}")
    return splits


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unisono bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("ops", nargs="*", metavar="op", help=f"of {' '.join(OPS)} (default: {' '.join(DEFAULT_OPS)})")
    add("-b", dest="least", type=parse_bytes, help="smallest size (default 8)")
    add("-e", dest="most", type=parse_bytes, help="largest size (default 256M)")
    add("-f", dest="factor", type=int, help="between sizes (default 4)")
    add(
        "-n",
        dest="ranks",
        type=parse_ranks,
        default=[2, 4, 8],
        help="ranks, several by comma (default 2,4,8)",
    )
    add(
        "--splits",
        type=parse_splits,
        default=["even", "1:3"],
        help="chunks per rank: even, 1:3, 0:1, ..., repeated over the ranks; several by comma",
    )
    add("--dtype", choices=list(DTYPES), default="float32")
    add("--redop", choices=list(REDOPS), default="sum")
    add("--rounds", type=int, help="rounds per row (default: as many as fit into --seconds, at least 15)")
    add("--seconds", type=float, default=0.6, help="time per row (default 0.6)")
    add(
        "-c",
        dest="check",
        type=int,
        choices=(0, 1),
        default=1,
        help="check results before timing (default 1)",
    )
    add("--heap", action="store_true", help="only tensors in shared memory (default: both kinds)")
    add("--private", action="store_true", help="only ordinary tensors")
    add("--against", choices=("gloo", "none"), default="gloo")
    add("-J", dest="json", type=Path, metavar="FILE", help="write all numbers as JSON")
    return parser


def split_counts(count: int, split: str, ranks: int) -> tuple[int, ...]:
    """Elements per rank: 8 elements as 1:3 over two ranks are (2, 6)."""
    weights = [1] * ranks if split == "even" else [int(part) for part in split.split(":")]
    weights = [weights[r % len(weights)] for r in range(ranks)]
    if not any(weights):
        weights[-1] = 1
    total = sum(weights)
    bounds = [(2 * count * sum(weights[:r]) + total) // (2 * total) for r in range(ranks + 1)]
    return tuple(last - first for first, last in pairwise(bounds))


def sizes_of(args: argparse.Namespace, ranks: int, cpus: int) -> list[int]:
    if ranks > cpus and args.least is None and args.most is None and args.factor is None:
        return list(CROWDED_SIZES)
    least, most, factor = args.least or 8, args.most or 256 << 20, args.factor or 4
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes


def sections(args: argparse.Namespace, ranks: int, cpus: int) -> Iterator[tuple[str, str, list[Case]]]:
    """Operation, split and cases of each table."""
    item = DTYPES[args.dtype].itemsize
    for op in args.ops or DEFAULT_OPS:
        for split in args.splits if OPS[op].cut else ["even"]:
            if op == "barrier":
                yield op, "-", [Case(op, 0, (0,) * ranks, args.dtype, args.redop)]
                continue
            cases: list[Case] = []
            for size in sizes_of(args, ranks, cpus):
                count = max(size // item, 1)
                if OPS[op].cut and split == "even":
                    count = -(-count // ranks) * ranks
                counts = split_counts(count, split if OPS[op].cut else "even", ranks)
                if not cases or cases[-1].count != count:
                    cases.append(Case(op, count, counts, args.dtype, args.redop))
            yield op, split, cases


def free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


def machine_facts(cpus: int) -> dict[str, Any]:
    import unisono

    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [p.read_text().strip() for p in sorted(caches.glob("index*/size"))]
    return {
        "unisono": getattr(unisono, "__version__", "unknown"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": model,
        "cpus": cpus,
        "caches": sizes,
        "load": list(os.getloadavg()),
        "memory_free": free_bytes(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def header(facts: dict[str, Any]) -> str:
    return (
        f"# unisono {facts['unisono']} bench, {facts['date']}: torch {facts['torch']}, "
        f"python {facts['python']}, {facts['system']}\n"
        f"# {facts['cpu']}, {facts['cpus']} CPUs for us, caches {' '.join(facts['caches'])}, "
        f"{show_bytes(facts['memory_free'])} free, load {facts['load'][0]:.2f}\n" + TIME_NOTE
    )


def table_head(op: str, split: str, ranks: int) -> str:
    group = f"{'time':>10} {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
    units = f"{'(us)':>10} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}"
    text = (
        f"#\n# {op}, {ranks} ranks, split {split}\n"
        f"#{'':>48} {'heap tensors':^33} {'ordinary tensors':^33} {'limit':>10} {'x limit':^13} {'gloo':>10}"
        f" {'x faster':^13}\n"
        f"#{'size':>11} {'count':>11} {'type':>8} {'redop':>7} {'root':>6}  {group} {group} {'time':>10}"
        f" {'heap':>6} {'ordin.':>6} {'time':>10} {'heap':>6} {'ordin.':>6}\n"
        f"#{'(B)':>11} {'(elements)':>11} {'':>8} {'':>7} {'':>6}  {units} {units} {'(us)':>10}"
        f" {'':>6} {'':>6} {'(us)':>10}"
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def table_row(row: dict[str, Any]) -> str:
    def number(value: float | None, width: int) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:>{width}.{2 if value < 100 else 1}f}"

    def time_of(kind: str) -> float | None:
        return row[kind]["time_us"] if row.get(kind) else None

    def ratio(top: float | None, bottom: float | None) -> str:
        return number(top / bottom if top is not None and bottom else None, 6)

    parts = [f"{row['size_bytes']:>12} {row['count']:>11} {row['dtype']:>8} {row['redop']:>7} {row['root']:>6} "]
    heap, private, limit, gloo = (time_of(kind) for kind in ("heap", "private", "limit", "gloo"))
    for kind in ("heap", "private"):
        entry = row.get(kind) or {}
        wrong = row["wrong"].get(kind)
        parts.append(
            f"{number(time_of(kind), 10)} {number(entry.get('algbw'), 7)} {number(entry.get('busbw'), 7)}"
            f" {'N/A' if wrong is None else wrong:>6}"
        )
    parts += [number(limit, 10), ratio(heap, limit), ratio(private, limit)]
    parts += [number(gloo, 10), ratio(gloo, heap), ratio(gloo, private)]
    return " ".join(parts)


def add_bandwidths(row: dict[str, Any]) -> None:
    for kind in ("heap", "private", "gloo", "limit"):
        if row.get(kind):
            row[kind]["algbw"] = row["size_bytes"] / row[kind]["time_us"] * 1e-3
            row[kind]["busbw"] = row[kind]["algbw"] * OPS[row["op"]].bus(row["ranks"])


def run_ranks_of(args: argparse.Namespace, ranks: int, cpus: int, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """All tables for one number of ranks, printed as they come."""
    gloo = args.against == "gloo"
    rows: list[dict[str, Any]] = []
    folder = tempfile.mkdtemp(prefix="unisono-bench-")
    try:
        with RankPool(ranks, env={"GLOO_SOCKET_IFNAME": "lo"}) as pool:
            pool.run(join, folder, gloo, timeout_s=300)
            for op, split, cases in sections(args, ranks, cpus):
                print(table_head(op, split, ranks), flush=True)
                for case in cases:
                    used = kinds if op != "barrier" else kinds[:1]
                    need = (len(used) + 1) * OPS[op].buffers(ranks) * case.size_bytes
                    if need > MEMORY_SHARE * free_bytes():
                        print(f"# {show_bytes(case.size_bytes)} left out: needs {show_bytes(need)}", flush=True)
                        continue
                    order = Order(used, gloo, bool(args.check), args.rounds, args.seconds)
                    row = pool.run(measure, case, order, timeout_s=900)[0]
                    assert row is not None
                    row["split"] = split
                    add_bandwidths(row)
                    rows.append(row)
                    print(table_row(row), flush=True)
                    if row["gloo_lacks"]:
                        print(f"# gloo: {row['gloo_lacks']}", flush=True)
            pool.run(leave)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    for op in args.ops:
        if op not in OPS:
            parser.error(f"expected an operation of {', '.join(OPS)}, got {op!r}")
    if args.factor is not None and args.factor < 2:
        parser.error(f"-f: expected a factor of at least 2, got {args.factor}")
    if args.redop in ("band", "bor", "bxor") and DTYPES[args.dtype].is_floating_point:
        parser.error(f"--redop {args.redop} needs an integer --dtype, got {args.dtype}")
    cpus = len(os.sched_getaffinity(0))
    kinds = tuple(kind for kind in ("heap", "private") if getattr(args, kind)) or ("heap", "private")
    facts = machine_facts(cpus)
    start = time.monotonic()
    print(header(facts), flush=True)
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        rows += run_ranks_of(args, ranks, cpus, kinds)
    findings = summarise(rows, cpus)
    wrong = sum(count or 0 for row in rows for count in row["wrong"].values())
    print("#", *summary_lines(findings), sep="\n")
    checked = f"wrong elements: {wrong}" if args.check else "results not checked"
    print(f"# {len(rows)} rows in {time.monotonic() - start:.0f} s, {checked}")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": facts, "rows": rows, "targets": findings}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
