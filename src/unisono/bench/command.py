"""The command line of `unisono bench`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .apart.cases import FLOATS, ITEM_BYTES, OPS, REDOPS
from .contenders import EVEN, KINDS, WAYS, Order
from .neighbours import busy_neighbours
from .peers import PEERS
from .plan import (
    ALIASES,
    DEFAULT_OPS,
    UNEVEN_SPLITS,
    Item,
    make_items,
    op_names,
    parse_bytes,
    parse_ranks,
    parse_splits,
    sizes_between,
)
from .ranks import BenchRanks, GivenRanks, StartedRanks, given_size
from .scaling import SCALING_RANKS, SCALING_SIZES, group_memory, scaling_lines
from .setup_peers import setup_peers
from .table import Progress, add_ratios, header, machine_facts, show_bytes, standing_lines, table_head, table_lines
from .targets import judge, judgement_lines, target_items

FORMAT = "unisono-bench/2"
AGAINST = ("gloo", *PEERS)

EPILOG = f"""\
operations:
  {", ".join(OPS)};
  {" and ".join(ALIASES)}: the same at splits {" ".join(UNEVEN_SPLITS)};
  all: every one of them; scaling: a table by number of ranks, with the memory a group costs
  (without any: {" ".join(DEFAULT_OPS)})

examples:
  unisono bench                                                     the usual tables, against gloo
  unisono bench all_reduce -b 8 -e 64M -f 8 -n 2                    one operation, some sizes
  unisono bench all_gather_uneven --splits 1:3,zipf -n 4            uneven chunks
  unisono bench all_reduce -b 8 -e 8 --calls group,dist,comm_func   what each layer costs
  unisono bench --setup-peers                                       install the peers, once
  unisono bench all_reduce --against gloo,openmpi,mpich,intelmpi,oneccl --plot all_reduce.png
  unisono bench ddp_step -b 1400K -e 1400K -n 3 --busy 2            beside two busy processes
  unisono bench --targets --against all -J targets.json             what is promised, met or missed
  unisono bench scaling -n 1,2,4,8 --plot scaling.png               how cost grows
  torchrun --nproc-per-node=2 -m unisono.cli bench all_reduce       on ranks of torchrun or mpiexec
"""


def parse_names(kind: str, known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        if text == "none":
            return []
        names = list(known) if text == "all" else text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected {kind} of {', '.join(known)}, got {name!r}")
        return list(dict.fromkeys(names))

    return parse


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unisono bench",
        description="Measure collectives as nccl-tests does, against the memory's limit and against peers, in one run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ops", nargs="*", metavar="op", help="operations, see below")
    what = parser.add_argument_group("what is measured").add_argument
    what("-b", dest="least", type=parse_bytes, metavar="BYTES", help="smallest size (default 8)")
    what("-e", dest="most", type=parse_bytes, metavar="BYTES", help="largest size (default 256M)")
    what("-f", dest="factor", type=int, metavar="N", help="factor between sizes (default 4)")
    what("-n", "--ranks", type=parse_ranks, metavar="N[,N...]", help="ranks, several by comma (default 2)")
    what("--dtype", choices=list(ITEM_BYTES), default="float32")
    what("--redop", choices=REDOPS, default="sum")
    what(
        "--splits",
        type=parse_splits,
        metavar="S[,S...]",
        help="chunks per rank: even, zipf, or weights such as 1:3 or 0:1, repeated over the ranks (default: even, and "
        f"{' '.join(UNEVEN_SPLITS)} for the uneven pair)",
    )
    what("--heap", action="store_true", help="only tensors in shared memory (default: both kinds)")
    what("--private", "--ordinary", dest="ordinary", action="store_true", help="only ordinary tensors")
    what(
        "--calls",
        type=parse_names("ways to call", WAYS),
        default=["group"],
        metavar="W[,W...]",
        help=f"ways to call unisono, of {', '.join(WAYS)} (default group: its methods)",
    )
    what(
        "--against",
        type=parse_names("peers", AGAINST),
        default=["gloo"],
        metavar="P[,P...]",
        help=f"peers in the same run, of {', '.join(AGAINST)}; all or none (default gloo)",
    )
    what("--busy", type=int, default=0, metavar="N", help="with N busy processes on the same CPUs (default 0)")
    what("--targets", action="store_true", help="say what is met and missed; without op: measure just what that needs")
    how = parser.add_argument_group("how").add_argument
    how("-c", dest="check", type=int, choices=(0, 1), default=1, help="check results before timing (default 1)")
    how("--rounds", type=int, metavar="N", help="rounds per row (default: as many as fit, at least 15)")
    how("--seconds", type=float, default=0.6, metavar="S", help="time per row (default 0.6)")
    how("--setup-peers", action="store_true", help="install the peers named by --against (default: all), then end")
    output = parser.add_argument_group("output").add_argument
    output("-J", dest="json", type=Path, metavar="FILE", help="write all numbers as JSON")
    output("--from", dest="source", type=Path, metavar="FILE", help="measure nothing; show what -J wrote earlier")
    output("--plot", type=Path, metavar="FILE", help="draw a picture (.png, .svg, .pdf); needs unisono[plot]")
    output("--html", type=Path, metavar="FILE", help="write a page with tables and pictures that needs nothing else")
    return parser


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    known = [*op_names(), "all", "scaling"]
    for op in args.ops:
        if op not in known:
            parser.error(f"expected an operation of {', '.join(known)}, got {op!r}")
    if args.factor is not None and args.factor < 2:
        parser.error(f"-f: expected a factor of at least 2, got {args.factor}")
    if args.busy < 0:
        parser.error(f"--busy: expected 0 or more, got {args.busy}")
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    if args.least and args.most and args.least > args.most:
        parser.error(f"-b {args.least} is more than -e {args.most}")
    if args.redop in ("band", "bor", "bxor") and args.dtype in FLOATS:
        parser.error(f"--redop {args.redop} needs an integer --dtype, got {args.dtype}")
    given = given_size()
    if given is not None and args.ranks not in (None, [given]):
        parser.error(f"-n {','.join(map(str, args.ranks))}: the launcher has started {given} ranks")
    if args.plot is not None:
        from . import picture

        if not picture.available():
            parser.error("--plot needs matplotlib: pip install 'unisono[plot]'")
    for path in (args.json, args.plot, args.html):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")


def plan(args: argparse.Namespace) -> dict[int, list[Item]]:
    """Rows by number of ranks."""
    given = given_size()
    if args.targets and not args.ops:
        planned = target_items()
        return {n: items for n, items in planned.items() if n == given} if given is not None else planned
    scaling = "scaling" in args.ops
    ops = [op for op in args.ops if op != "scaling"] or (["all_reduce"] if scaling else list(DEFAULT_OPS))
    if "all" in ops:
        ops = op_names()
    ranks = args.ranks or ([given] if given is not None else list(SCALING_RANKS) if scaling else [2])
    if scaling and args.least is None and args.most is None and args.factor is None:
        sizes = list(SCALING_SIZES)
    else:
        sizes = sizes_between(
            args.least or min(8, args.most or 8), args.most or max(256 << 20, args.least or 0), args.factor or 4
        )
    ways = tuple(args.calls) or ("group",)
    if EVEN in ways and "group" not in ways:
        ways = ("group", *ways)  # what it is compared with
    return {n: make_items(ops, sizes, args.splits, n, args.dtype, args.redop, ways, args.busy) for n in ranks}


@contextmanager
def opened(args: argparse.Namespace, size: int, items: list[Item]) -> Iterator[BenchRanks]:
    gloo = "gloo" in args.against
    backend = any(item.case.op == "ddp_step" or any(way != "group" for way in item.ways) for item in items)
    peers = [name for name in args.against if name in PEERS]
    ranks: BenchRanks
    if given_size() is not None:
        ranks = GivenRanks(gloo, backend, peers)
    else:
        ranks = StartedRanks(size, gloo, backend, peers)
    try:
        yield ranks
    finally:
        ranks.close()


def run(args: argparse.Namespace, planned: dict[int, list[Item]]) -> dict[str, Any] | None:
    """All rows, printed as they come; what JSON would hold, or None on a rank that does not lead."""
    facts = machine_facts()
    kinds = tuple(kind for kind in KINDS if getattr(args, kind)) or KINDS
    document: dict[str, Any] = {"format": FORMAT, "machine": facts, "command": sys.argv[1:], "peers": {}, "rows": []}
    progress: Progress | None = None
    scaling = "scaling" in args.ops
    memory: dict[int, dict[str, Any]] = {}
    for size, items in planned.items():
        with opened(args, size, items) as ranks:
            say = print if ranks.leads else _nothing
            if progress is None:
                progress = Progress(sum(map(len, planned.values())) if ranks.leads else 0)
                say(header(facts), flush=True)
            document["peers"] |= ranks.facts["libraries"]
            for name, library in ranks.facts["libraries"].items():
                say(f"# {name}: {library}")
            for name, why in ranks.facts["lacks"].items():
                say(f"# {name} lacking: {why}")
            if scaling:
                memory[size] = ranks.call(group_memory)[0]
            table, told = None, set[str]()
            for item in items:
                case = item.case
                if item.table != table:
                    say(table_head(case.op, item.split, case.ranks, item.busy), flush=True)
                    table, told = item.table, set()
                if ranks.leads:
                    progress.show(f"{case.op} {show_bytes(case.size_bytes)}, {case.ranks} ranks")
                used = kinds if case.op != "barrier" else kinds[:1]
                order = Order(used, item.ways, "gloo" in args.against, bool(args.check), args.rounds, args.seconds)
                with busy_neighbours(item.busy if ranks.leads else 0):
                    row = ranks.measure(case, order)
                if row is None:
                    continue
                row["split"], row["busy"] = item.split, item.busy
                if "results" in row:
                    add_ratios(row)
                document["rows"].append(row)
                progress.step()
                say("\n".join(table_lines(row, told)), flush=True)
            leads = ranks.leads
    if scaling:
        document["memory"] = {str(size): facts for size, facts in memory.items()}
    return document if leads else None


def recall(path: Path) -> dict[str, Any]:
    """An earlier run, printed as it was then."""
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("format") != FORMAT:
        raise SystemExit(f"unisono bench: {path}: expected format {FORMAT}, got {document.get('format')}")
    print(header(document["machine"]))
    table, told = None, set[str]()
    for row in document["rows"]:
        if (row["busy"], row["op"], row["split"], row["ranks"], row["dtype"]) != table:
            table, told = (row["busy"], row["op"], row["split"], row["ranks"], row["dtype"]), set()
            print(table_head(row["op"], row["split"], row["ranks"], row["busy"]))
        print("\n".join(table_lines(row, told)))
    return document


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What ranks that do not lead print."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.setup_peers:
        named = [name for name in args.against if name in PEERS]
        return 1 if setup_peers(named or list(PEERS)) else 0
    check_args(parser, args)
    start = time.monotonic()
    try:
        document = recall(args.source) if args.source is not None else run(args, plan(args))
    except KeyboardInterrupt:
        print("\n# interrupted", file=sys.stderr)
        return 130
    if document is None:
        return 0
    rows = document["rows"]
    wrong = sum(result["wrong"] or 0 for row in rows for result in row.get("results", {}).values())
    print("#")
    if "memory" in document:
        print("\n".join(scaling_lines(document)))
    if standing := standing_lines(rows):
        print("\n".join(standing))
    if args.targets:
        document["targets"] = judge(rows)
        print("\n".join(judgement_lines(document["targets"])))
    checked = f"wrong elements: {wrong}" if args.check else "results not checked"
    print(f"# {len(rows)} rows in {time.monotonic() - start:.0f} s, {checked}")
    write(args, document)
    return 1 if wrong else 0


def write(args: argparse.Namespace, document: dict[str, Any]) -> None:
    """The files asked for."""
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1))
    if args.plot is not None:
        from . import picture

        picture.draw(document, args.plot)
    if args.html is not None:
        from . import page

        args.html.write_text(page.make(document))


if __name__ == "__main__":
    sys.exit(main())
