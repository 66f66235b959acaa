"""The cost of a call over several hosts as a formula: fitted to rows of `unisono bench --hosts`, checked, carried on.

    python -m unisono.bench.scale --measure FOLDER              measures, fits and checks; needs root
    python -m unisono.bench.scale a.json b.json --check c.json  the same with what unisono bench --hosts -J wrote

The model, for the host that has most to do (the words are those of docs/scale.md):

    time = call + max(wire bits / (rate x share), crowd x messages x message + bytes x byte)

`call` is what every call costs, `message` what one more message costs its sender, `share` how much of the link data
gets, and `byte` what the CPUs of a host spend on each byte that they copy, reduce or push through TCP. Bytes between
hosts travel while the CPUs work on others, so the slower of the two counts. `crowd` is the number of ranks per CPU, but
at least 1. Hosts that are namespaces of one machine share its CPUs: then the ranks and bytes of all of them count;
hosts of their own have only theirs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..transport.hosts.agreement import SMALL_BYTES, most_small, most_whole
from ..transport.hosts.bulk import piece_bytes
from ..transport.hosts.engine import GLOO_EAGER_BYTES
from .table import show_bytes, show_us

OURS, RING = "unisono", "flat ring"
OPS = ("all_reduce", "all_gather", "reduce_scatter")
STEPS = 30
# Hosts and rates that are measured, the last only to check; and sizes, small ones in more rounds.
PLACES = (("2x1", "1G"), ("2x2", "1G"), ("3x1", "1G"), ("2x2", "10G"), ("3x2", "2G"))
SWEEPS = {"large": ("16M", 12), "small": ("128K", 60)}
CALLS = {
    "reduce": ("all_reduce",),
    "uneven": ("all_gather", "reduce_scatter", "--splits", "1:3", "--against", "none"),
}
PREDICTED_HOSTS = (2, 8, 64, 1024)
PREDICTED_BYTES = (8, 64 << 10, 1 << 20, 64 << 20, 1 << 30)


@dataclass(frozen=True)
class Setting:
    """One call: what is moved, and over which hosts."""

    op: str
    size_bytes: float
    hosts: int
    ranks: int  # per host
    rate: float  # bits per second
    skew: float = 1.0  # the largest host's part of the whole x hosts
    interleaved: bool = False
    shared_cpus: bool = False  # all hosts are namespaces of one machine
    cpus: int = 2  # of a host, or of the machine

    def ours(self) -> Work:
        """What unisono has the busiest host do."""
        h, size, others = self.hosts, self.size_bytes, self.hosts - 1
        largest = min(self.skew, h) * size / h
        moved = {
            "all_reduce": 2 * others / h * size,
            "all_gather": max(others * largest, size - largest),
            "reduce_scatter": max(others * largest, size - largest),
        }[self.op]
        near = self._near(self.ranks * size + moved)
        small = most_small(h, self.ranks, GLOO_EAGER_BYTES)
        if size <= small:  # one message to each other host, or of an all_reduce two, unless the first has all of it
            whole, messages = size <= most_whole(h, small), others
            if self.op == "all_reduce":
                moved, messages = (others * size, others) if whole else (moved, 2 * others)
            # Of the smallest, what the CPUs do with their bytes is nothing beside the call.
            return Work(messages, moved, near if size > SMALL_BYTES else 0.0, self.crowd)
        of_lane = math.ceil((size if self.op == "all_reduce" else largest) / self.ranks)
        pieces = math.ceil(of_lane / piece_bytes(of_lane, h, 1))
        rounds = 2 if self.op == "all_reduce" and h > 2 else 1
        return Work(others + rounds * others * pieces, moved, near, self.crowd)

    def ring(self) -> Work:
        """What a ring over all ranks has it do: 2(N-1) steps for an all_reduce, N-1 for a half of it."""
        n = self.hosts * self.ranks
        halves = 2 if self.op == "all_reduce" else 1
        # With chunks of different sizes every step takes as long as the largest.
        edge = halves * (n - 1) / n * self.size_bytes * (1.0 if self.op == "all_reduce" else self.skew)
        leaving = edge * (self.ranks if self.interleaved else 1)
        return Work(halves * (n - 1), leaving, self._near(self.ranks * edge), self.crowd)

    @property
    def crowd(self) -> float:
        return max(1.0, self.ranks * (self.hosts if self.shared_cpus else 1) / self.cpus)

    def _near(self, of_a_host: float) -> float:
        return of_a_host * (self.hosts if self.shared_cpus else 1) / self.cpus


@dataclass(frozen=True)
class Work:
    """What the busiest host does in a call."""

    messages: float
    wire_bytes: float
    near_bytes: float
    crowd: float


@dataclass(frozen=True)
class Model:
    """Times in seconds."""

    call: float
    message: float
    share: float  # of the link, for data
    byte: float

    def time(self, work: Work, rate: float) -> float:
        return self.call + max(self.wire(work, rate), self.cpu(work))

    def cpu(self, work: Work) -> float:
        return work.crowd * work.messages * self.message + work.near_bytes * self.byte

    def wire(self, work: Work, rate: float) -> float:
        return 8 * work.wire_bytes / rate / self.share

    def __str__(self) -> str:
        return (
            f"call {self.call * 1e6:.0f} us, message {self.message * 1e6:.1f} us, share {self.share:.2f} of the link, "
            f"byte {self.byte * 1e9:.3f} ns ({1e-9 / self.byte if self.byte else math.inf:.2f} GB/s and CPU)"
        )


Sample = tuple[Work, float, float]  # rate, measured seconds


def fit(samples: Sequence[Sample]) -> Model:
    """Least squares of relative errors, no constant below 0; which side of `max` a row is on follows from the fit."""
    best: tuple[float, Model] | None = None
    for start in (Model(1e-3, 1e-4, 0.9, 0.0), Model(1e-3, 1e-4, 0.9, 1e-9), Model(1e-3, 1e-4, 0.9, 1e-8)):
        model = start
        for _ in range(STEPS):
            rows = []
            for work, rate, _ in samples:
                if model.wire(work, rate) >= model.cpu(work):
                    rows.append([1.0, 0.0, 8 * work.wire_bytes / rate, 0.0])
                else:
                    rows.append([1.0, work.crowd * work.messages, 0.0, work.near_bytes])
            call, message, per_wire, byte = _solve(rows, [seconds for *_, seconds in samples])
            model = Model(call, message, 1 / per_wire if per_wire else 1.0, byte)
            error = sum(((model.time(w, r) - t) / t) ** 2 for w, r, t in samples)
            if best is None or error < best[0]:
                best = (error, model)
    assert best is not None
    return best[1]


def _solve(rows: list[list[float]], seconds: list[float]) -> list[float]:
    """The non-negative numbers that make rows x numbers relatively nearest to seconds: the best of all subsets."""
    matrix = torch.tensor(rows, dtype=torch.float64) / torch.tensor(seconds, dtype=torch.float64)[:, None]
    ones, width = torch.ones(len(rows), 1, dtype=torch.float64), len(rows[0])
    best: tuple[float, list[float]] = (math.inf, [0.0] * width)
    for used in itertools.chain.from_iterable(itertools.combinations(range(width), n) for n in range(1, width + 1)):
        part = matrix[:, list(used)]
        scale = part.abs().amax(0).clamp_min(1e-300)
        numbers = torch.linalg.lstsq(part / scale, ones, driver="gelsd").solution[:, 0] / scale
        if bool((numbers < 0).any()):
            continue
        error = float((part @ numbers - 1).square().sum())
        if error < best[0]:
            found = dict(zip(used, numbers.tolist(), strict=True))
            best = (error, [found.get(i, 0.0) for i in range(width)])
    return best[1]


def bench_runs(folder: Path) -> dict[Path, list[str]]:
    """What is measured: by the file that a run writes, the arguments of `unisono bench`; those to check come last."""
    runs = {}
    for (hosts, rate), sweep, calls in itertools.product(PLACES, SWEEPS, CALLS):
        most, rounds = SWEEPS[sweep]
        path = folder / f"{hosts}-{rate}-{calls}-{sweep}.json"
        runs[path] = [*CALLS[calls], "--hosts", hosts, "--rate", rate, "-b", "8", "-e", most, "-f", "128"]
        runs[path] += ["--rounds", str(rounds), "--ordinary", "-J", str(path)]
    return runs


def measure(folder: Path) -> tuple[list[Path], list[Path]]:
    """Runs the bench for every file that is not there yet; the files to fit to, and those to check on."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = bench_runs(folder)
    for number, (path, arguments) in enumerate(runs.items(), 1):
        if not path.exists():
            print(f"# {number} of {len(runs)}: unisono bench {' '.join(arguments)}", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "unisono.bench", *arguments], check=True, stdout=subprocess.DEVNULL)
    last = len(SWEEPS) * len(CALLS)
    return list(runs)[:-last], list(runs)[-last:]


def read_rows(paths: Iterable[Path]) -> list[tuple[Setting, dict[str, float]]]:
    """Settings with the measured seconds of each contender that the model knows; of the same setting the least."""
    found: dict[Setting, dict[str, float]] = {}
    for path in paths:
        document = json.loads(path.read_text())
        for row in document["rows"]:
            if "results" not in row or row["op"] not in OPS or "hosts" not in row:
                continue
            hosts = row["hosts"]
            if len(set(hosts["ranks"])) != 1 or hosts["rate"] is None:
                continue
            held = [0] * len(hosts["ranks"])
            for count, host in zip(row["counts"], hosts["host_of"], strict=True):
                held[host] += count
            setting = Setting(
                row["op"],
                row["size_bytes"],
                len(held),
                hosts["ranks"][0],
                hosts["rate"],
                max(held) * len(held) / max(sum(held), 1),
                hosts["interleaved"],
                True,
                document["machine"]["cpus"],
            )
            times = found.setdefault(setting, {})
            # The median: the least round is one that the limit of the link let through at once.
            mine = [row["results"][kind]["time_us"] for kind in ("heap", "ordinary") if kind in row["results"]]
            if mine:
                times[OURS] = min(times.get(OURS, math.inf), min(mine) * 1e-6)
            if "gloo" in row["results"] and row["op"] == "all_reduce":  # its other calls are no rings
                times[RING] = min(times.get(RING, math.inf), row["results"]["gloo"]["time_us"] * 1e-6)
    return list(found.items())


def work_of(who: str, setting: Setting) -> Work:
    return setting.ours() if who == OURS else setting.ring()


def fit_rows(rows: Sequence[tuple[Setting, dict[str, float]]]) -> dict[str, Model]:
    models = {}
    for who in (OURS, RING):
        samples = [(work_of(who, s), s.rate, times[who]) for s, times in rows if who in times]
        if len(samples) >= 5:
            models[who] = fit(samples)
    return models


def errors(models: dict[str, Model], rows: Sequence[tuple[Setting, dict[str, float]]], who: str) -> list[float]:
    """Predicted ÷ measured."""
    return [models[who].time(work_of(who, s), s.rate) / times[who] for s, times in rows if who in times]


def report(models: dict[str, Model], rows: Sequence[tuple[Setting, dict[str, float]]], title: str) -> list[str]:
    lines = [f"# {title}"]
    for who in models:
        off = sorted(abs(math.log(e)) for e in errors(models, rows, who))
        if off:
            middle, worst = (100 * (math.exp(x) - 1) for x in (off[len(off) // 2], off[-1]))
            lines.append(f"#   {who:<10} {len(off)} rows: half are within {middle:.0f} %, all within {worst:.0f} %")
    return lines


def rows_text(models: dict[str, Model], rows: Sequence[tuple[Setting, dict[str, float]]]) -> list[str]:
    columns = f"{'hosts':<7}{'Gbit/s':>7}  {'who':<10}{'measured us':>12}{'model us':>10}{'÷':>6}"
    lines = [f"# {'operation':<16}{'size':>9}  {columns}"]
    for setting, times in rows:
        for who, seconds in times.items():
            if who in models:
                told = models[who].time(work_of(who, setting), setting.rate)
                lines.append(
                    f"# {setting.op:<16}{show_bytes(setting.size_bytes):>9}  "
                    f"{f'{setting.hosts}x{setting.ranks}':<7}{setting.rate / 1e9:>7g}  {who:<10}"
                    f"{show_us(seconds * 1e6):>12}{show_us(told * 1e6):>10}{told / seconds:>6.2f}"
                )
    return lines


def prediction_lines(models: dict[str, Model], base: Setting) -> list[str]:
    lines = [
        f"# all_reduce in ms; each host has {base.ranks} ranks, {base.cpus} CPUs and {base.rate / 1e9:g} Gbit/s",
        f"# {'hosts':>6}{'size':>10}{OURS:>12}{RING:>12}{'ring ÷':>9}  what takes most of ours",
    ]
    for hosts in PREDICTED_HOSTS:
        for size in PREDICTED_BYTES:
            setting = replace(base, hosts=hosts, size_bytes=size, shared_cpus=False)
            work, mine = setting.ours(), models[OURS]
            ours = mine.time(work, base.rate)
            shares = {
                "the call": mine.call,
                "messages": work.crowd * work.messages * mine.message,
                "the link": mine.wire(work, base.rate),
                "the CPUs": work.near_bytes * mine.byte,
            }
            ring = models[RING].time(setting.ring(), base.rate) if RING in models else math.nan
            lines.append(
                f"# {hosts:>6}{show_bytes(size):>10}{ours * 1e3:>12.4g}{ring * 1e3:>12.4g}{ring / ours:>9.2f}  "
                f"{max(shares, key=lambda name: shares[name])}"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m unisono.bench.scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fitted", nargs="*", type=Path, metavar="FILE", help="what unisono bench --hosts -J wrote")
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="measure first, and keep here what was measured")
    parser.add_argument("--check", nargs="+", type=Path, default=[], metavar="FILE", help="the same, not fitted to")
    parser.add_argument("--ranks", type=int, default=8, help="per host, in the predictions (default 8)")
    parser.add_argument("--cpus", type=int, default=8, help="of a host, in the predictions (default 8)")
    parser.add_argument("--rate", type=float, default=10, help="Gbit/s of a host's link, there (default 10)")
    parser.add_argument("--rows", action="store_true", help="every row, measured and by the model")
    args = parser.parse_args(argv)
    if bool(args.fitted) == bool(args.measure):
        parser.error("expected files to fit to, or --measure with a folder to write them to")
    if args.measure:
        args.fitted, args.check = measure(args.measure)
    rows, unseen = read_rows(args.fitted), read_rows(args.check)
    models = fit_rows(rows)
    if OURS not in models:
        parser.error("too few rows of all_reduce, all_gather and reduce_scatter with equal numbers of ranks and a rate")
    lines = [f"# {who}: {model}" for who, model in models.items()]
    lines += report(models, rows, "fitted to")
    if unseen:
        lines += report(models, unseen, "checked on rows it was not fitted to")
    if args.rows:
        lines += [*rows_text(models, rows), *rows_text(models, unseen)]
    lines += prediction_lines(models, Setting("all_reduce", 8, 2, args.ranks, args.rate * 1e9, cpus=args.cpus))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
