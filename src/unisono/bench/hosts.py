"""`--hosts 2x2`: the ranks in several hosts, made of network namespaces, with a limited link between them.

Turns are given over Unix sockets in a folder, which all namespaces share, so nothing but the measured calls uses the
links.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unisono.testing.hosts import INTERFACE, HostPool, Hosts, place_ranks, read_rate, why_not

from . import rows
from .apart.cases import Case
from .contenders import KINDS, ON_GLOO, Order
from .cpus import pin_to_one
from .host_bytes import FORMULAS, must_leave
from .ratios import compare, short
from .table import ratio_text, show_bytes, show_us

if TYPE_CHECKING:
    from unisono.group.group import Group

ROW_LIMIT_S = 600.0
OPS = ("all_reduce", "all_gather_uneven", "reduce_scatter_uneven", "broadcast", "all_to_all")
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
SPLITS = ("1:3",)


@dataclass(frozen=True)
class Layout:
    """Where the ranks are, and what is between the hosts."""

    ranks: tuple[int, ...]  # by host
    interleaved: bool
    rate: int | None  # bits per second that each host can send

    @property
    def host_of(self) -> list[int]:
        return place_ranks(self.ranks, self.interleaved)

    def __str__(self) -> str:
        same = len(set(self.ranks)) == 1
        ranks = f"{len(self.ranks)} hosts x {self.ranks[0]} ranks" if same else f"hosts of {self.ranks} ranks"
        order = "interleaved" if self.interleaved else "contiguous"
        return f"{ranks}, {order}, {'no limit' if self.rate is None else f'{self.rate / 1e9:g} Gbit/s'}"


def parse_hosts(text: str) -> tuple[int, ...]:
    """Ranks by host: 2x3 is two hosts of three, 2,1 one of two and one of one."""
    if found := re.fullmatch(r"(\d+)x(\d+)", text):
        ranks = (int(found[2]),) * int(found[1])
    else:
        ranks = tuple(int(part) for part in text.split(",")) if re.fullmatch(r"\d+(,\d+)+", text) else ()
    if not ranks or min(ranks) < 1:
        raise argparse.ArgumentTypeError(f"expected hosts and ranks such as 2x2, or ranks by host 2,1, got {text!r}")
    return ranks


def parse_rate(text: str) -> int | None:
    try:
        return None if text == "none" else read_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several hosts, in network namespaces of this machine (needs root)").add_argument
    add("--hosts", type=parse_hosts, metavar="HxL", help="H hosts with L ranks each, or ranks by host such as 2,1")
    add("--rate", type=parse_rate, default=10**9, metavar="BITS", help="what a host can send per second (default 1G)")
    add("--interleaved", action="store_true", help="ranks go around the hosts (default: host by host)")


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Also fills in what --hosts measures unless told."""
    if args.hosts is None:
        return
    if args.ranks is not None or any(args.quota or []) or any(args.busy or []):
        parser.error("--hosts says how many ranks there are, and goes with neither --quota nor --busy")
    if args.against not in ([], ["gloo"]):
        parser.error(f"--hosts compares with gloo only, got {','.join(args.against)}")
    if why := why_not():
        parser.error(f"--hosts: {why}")
    args.ranks = [sum(args.hosts)]
    args.ops = args.ops or list(OPS)
    args.splits = args.splits or list(SPLITS)


class HostRanks:
    """Ranks of our own in hosts of our own."""

    leads = True

    def __init__(self, layout: Layout, gloo: bool, backend: bool, pin: bool = False) -> None:
        self.layout, self.size = layout, sum(layout.ranks)
        with contextlib.ExitStack() as ending:
            folder = tempfile.mkdtemp(prefix="unisono-bench-")
            ending.callback(shutil.rmtree, folder, ignore_errors=True)
            hosts = ending.enter_context(Hosts(len(layout.ranks), layout.rate))
            env = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
            pool = HostPool(layout.ranks, interleaved=layout.interleaved, hosts=hosts, env=env)
            self._pool = ending.enter_context(pool)
            self._pool.run(_join_group, pin, timeout_s=120.0)
            every = range(hosts.size)
            between = rows.Between(layout.host_of, [*map(hosts.namespace, every)], [*map(hosts.address, every)])
            self.facts: dict[str, Any] = self.call(rows.join, folder, gloo, backend, [], between)[0]
            self._ending = ending.pop_all()

    def call(self, fn: Any, *args: Any) -> list[Any]:
        return self._pool.run(_on_group, fn, *args, timeout_s=ROW_LIMIT_S)

    def measure(self, case: Case, order: Order) -> dict[str, Any] | None:
        row: dict[str, Any] | None = self.call(rows.measure, case, order)[0]
        if row is not None:
            host_of = self.layout.host_of
            row["hosts"] = {**asdict(self.layout), "host_of": host_of, "must_leave": must_leave(case, host_of)}
        return row

    def close(self) -> None:
        with self._ending:
            self.call(rows.leave)
            self._pool.run(_leave_group)


_group: Group | None = None  # of this rank


def _join_group(pin: bool) -> None:
    global _group
    from unisono.group.group import Group

    if pin:  # before the group is made, which looks at its CPUs then
        pin_to_one(int(os.environ["RANK"]))
    _group = Group.from_env()


def _on_group(fn: Any, *args: Any) -> Any:
    return fn(_group, *args)


def _leave_group() -> None:
    global _group
    group, _group = _group, None
    if group is not None:
        group.barrier()
        group.close()


def host_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Times of both and their ratio, and bytes that leave each host beside those that must."""
    measured = [row for row in rows if "hosts" in row and "results" in row]
    if not measured:
        return []
    layout = Layout(*(measured[0]["hosts"][name] for name in ("ranks", "interleaved", "rate")))
    lines = [
        f"# {layout}: median us; times as fast as gloo's best, with its 95 % range; time / the link's,",
        "# which is plain sockets that carry what must go; what leaves each host in a call, counted on its interface",
        "# with headers, beside what must go",
        f"# {'operation':<20}{'size':>8}  {'who':<10}{'us':>9}  {'x gloo':<17} {'x link':>7}  {'leaves hosts':<22} "
        f"{'must':<22} how",
    ]
    for row in measured:
        gloo = row["results"].get("gloo")
        must = row["hosts"]["must_leave"]
        name = row["op"] if row["split"] in ("-", "even") else f"{row['op']} {row['split']}"
        for who, result in row["results"].items():
            faster = "-"
            if gloo is not None and who != "gloo":
                both = min(len(gloo["rounds_us"]), len(result["rounds_us"]))
                faster = ratio_text(compare(gloo["rounds_us"][:both], result["rounds_us"][:both]).to_json())
            formula = FORMULAS.get(row["op"], "") if who.split()[-1] in (*KINDS, ON_GLOO) else result["variant"]
            limit = short(result["times_limit"]) if result.get("times_limit") else "-"
            lines.append(
                f"# {name:<20}{show_bytes(row['size_bytes']):>8}  {who:<10}{show_us(result['time_us']):>9}  "
                f"{faster:<17} {limit:>7}  {_each(result.get('sent')):<22} {_each(must):<22} {formula}".rstrip()
            )
    return lines


def _each(sent: list[float] | None) -> str:
    return "-" if sent is None else ", ".join(map(show_bytes, sent))
