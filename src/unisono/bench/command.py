"""The command line of `unisono bench`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import recorder, share
from .apart.cases import FLOATS, ITEM_BYTES, OPS, REDOPS
from .builds import TURNS, compare_builds
from .contenders import EVEN, KINDS, WAYS, Order
from .hosts import SIZES as HOST_SIZES
from .hosts import HostRanks, Layout, add_options, check_options, host_lines
from .neighbours import busy_neighbours
from .peers import PEERS
from .plan import (
    ALIASES,
    DEFAULT_OPS,
    MATRIX_BYTES,
    MATRIX_FREE,
    MATRIX_PINNED,
    MATRIX_QUOTA,
    MATRIX_RANKS,
    UNEVEN_SPLITS,
    Item,
    Place,
    by_ranks,
    make_items,
    op_names,
    parse_bytes,
    parse_numbers,
    parse_ranks,
    parse_splits,
    readme_items,
    sizes_between,
    small_items,
)
from .quota import why_no_quota
from .ranks import BenchRanks, GivenRanks, StartedRanks, given_size
from .scaling import SCALING_RANKS, SCALING_SIZES, group_memory, scaling_lines
from .setup_peers import setup_peers
from .summaries import matrix_lines, readme_lines, small_lines
from .table import Progress, Table, add_ratios, header, machine_facts, show_bytes, standing_lines
from .targets import judge, judgement_lines, target_items
from .tuning import tuning_lines

FORMAT = "unisono-bench/2"
AGAINST = ("gloo", *PEERS)
VIEWS = ("scaling", "small", "ddp_matrix", "readme")  # names on the command line for rows and a table over them

EPILOG = f"""\
operations:
  {", ".join(OPS)};
  {" and ".join(ALIASES)}: the same at splits {" ".join(UNEVEN_SPLITS)};
  all: every one of them; alone: scaling, a table by number of ranks, with the memory a group costs;
  small, what calls of 8 bytes cost by verb and way of calling; ddp_matrix, training steps beside busy
  processes, pinned, and under a CPU quota; readme, the README's table in Markdown
  (without any: {" ".join(DEFAULT_OPS)})

examples:
  unisono bench                                                     the usual tables, against gloo
  unisono bench all_reduce -b 8 -e 64M -f 8 -n 2                    one operation, some sizes
  unisono bench all_gather_uneven --splits 1:3,zipf -n 4            uneven chunks
  unisono bench all_reduce -b 8 -e 8 --calls group,dist,comm_func   what each layer costs
  unisono bench --setup-peers                                       install the peers, once
  unisono bench all_reduce --against gloo,openmpi,mpich,intelmpi,oneccl --plot all_reduce.png
  unisono bench small -n 2                                          the overhead of every verb, in one table
  unisono bench small --builds old/bin/python,new/bin/python        two builds by turns
  unisono bench ddp_step -b 1400K -e 1400K -n 3 --busy 2 --pin      pinned, beside two busy processes
  unisono bench ddp_matrix                                          gloo / unisono on busy machines
  unisono bench share                                               new tensors in shared memory, against ordinary ones
  unisono bench recorder                                            what the flight recorder costs a small call
  unisono bench --targets --against all -J targets.json             what is promised, met or missed
  unisono bench scaling -n 1,2,4,8 --plot scaling.png               how cost grows
  unisono bench --hosts 2x2 --rate 10G --interleaved                two hosts in network namespaces, against gloo
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
    _add_what_is_measured(parser)
    add_options(parser)
    how = parser.add_argument_group("how").add_argument
    how("-c", dest="check", type=int, choices=(0, 1), default=1, help="check results before timing (default 1)")
    how("--rounds", type=int, metavar="N", help="rounds per row (default: as many as fit, at least 15)")
    how("--seconds", type=float, default=0.6, metavar="S", help="time per row (default 0.6)")
    how("--builds", metavar="P,P", help="the same by turns with two builds: the python of the environment each is in")
    how("--turns", type=int, default=TURNS, metavar="N", help=f"of each build (default {TURNS})")
    how("--setup-peers", action="store_true", help="install the peers named by --against (default: all), then end")
    output = parser.add_argument_group("output").add_argument
    output("-J", dest="json", type=Path, metavar="FILE", help="write all numbers as JSON")
    output("--from", dest="source", type=Path, metavar="FILE", help="measure nothing; show what -J wrote earlier")
    output("--plot", type=Path, metavar="FILE", help="draw a picture (.png, .svg, .pdf); needs unisono[plot]")
    output("--html", type=Path, metavar="FILE", help="write a page with tables and pictures that needs nothing else")
    return parser


def _add_what_is_measured(parser: argparse.ArgumentParser) -> None:
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
    beside = parse_numbers(0, "numbers of processes such as 0 or 0,2,4")
    what("--busy", type=beside, metavar="N[,N...]", help="with N busy processes on the same CPUs (default 0)")
    what("--pin", action="store_true", help="every rank pinned to one CPU, round robin")
    percent = parse_numbers(0, "percents of one CPU such as 100 or 50,150")
    what(
        "--quota", type=percent, metavar="P[,P...]", help="all ranks together get P %% of one CPU: a cgroup, needs root"
    )
    what("--targets", action="store_true", help="say what is met and missed; without op: measure just what that needs")
    what("--tuning", action="store_true", help="measure how ordinary tensors move fastest here, keep that, then end")


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    known = [*op_names(), "all", *VIEWS]
    for op in args.ops:
        if op not in known:
            parser.error(f"expected an operation of {', '.join(known)}, got {op!r}")
    if args.factor is not None and args.factor < 2:
        parser.error(f"-f: expected a factor of at least 2, got {args.factor}")
    for view in VIEWS[1:]:
        if view in args.ops and args.ops != [view]:
            parser.error(f"{view} stands alone, got {' '.join(args.ops)}")
    for name, number in (("--turns", args.turns), ("--rounds", args.rounds)):
        if number is not None and number < 1:
            parser.error(f"{name}: expected at least 1, got {number}")
    if args.least and args.most and args.least > args.most:
        parser.error(f"-b {args.least} is more than -e {args.most}")
    if args.redop in ("band", "bor", "bxor") and args.dtype in FLOATS:
        parser.error(f"--redop {args.redop} needs an integer --dtype, got {args.dtype}")
    given = given_size()
    if given is not None and args.ranks not in (None, [given]):
        parser.error(f"-n {','.join(map(str, args.ranks))}: the launcher has started {given} ranks")
    if given is not None and (args.pin or args.quota):
        parser.error("--pin and --quota are for ranks started here, not for those of a launcher")
    check_options(parser, args)
    if any(args.quota or []) and (why := why_no_quota()):
        parser.error(f"--quota: {why}")
    if args.plot is not None:
        from . import picture

        if not picture.available():
            parser.error("--plot needs matplotlib: pip install 'unisono[plot]'")
    for path in (args.json, args.plot, args.html):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")


def plan(args: argparse.Namespace) -> list[Item]:
    """The rows of this run."""
    given = given_size()
    places = [Place(quota, args.pin, busy) for quota in args.quota or [0] for busy in args.busy or [0]]
    ranks = args.ranks or ([given] if given is not None else [2])
    if args.targets and not args.ops:
        return possible(target_items())
    if args.ops == ["small"]:
        return [item for n in ranks for place in places for item in small_items(n, place)]
    if args.ops == ["readme"]:
        return [item for n in ranks for place in places for item in readme_items(n, place)]
    if args.ops == ["ddp_matrix"]:
        if not args.pin and args.busy is None and args.quota is None:
            places = [*MATRIX_FREE, *MATRIX_PINNED, *MATRIX_QUOTA]
        both = [(n, place) for n in args.ranks or MATRIX_RANKS for place in places]
        return possible(
            item for n, place in both for item in make_items(["ddp_step"], [MATRIX_BYTES], None, n, place=place)
        )
    scaling = "scaling" in args.ops
    ops = [op for op in args.ops if op != "scaling"] or (["all_reduce"] if scaling else list(DEFAULT_OPS))
    if "all" in ops:
        ops = op_names()
    if scaling and given is None:
        ranks = args.ranks or list(SCALING_RANKS)
    if (scaling or args.hosts) and args.least is None and args.most is None and args.factor is None:
        sizes = list(HOST_SIZES if args.hosts else SCALING_SIZES)
    else:
        sizes = sizes_between(
            args.least or min(8, args.most or 8), args.most or max(256 << 20, args.least or 0), args.factor or 4
        )
    ways, splits = tuple(args.calls) or ("group",), args.splits
    if EVEN in ways:
        ways = tuple(dict.fromkeys(["group", *ways]))  # what it is compared with
        splits = splits or list(UNEVEN_SPLITS)
    return [
        item
        for n in ranks
        for place in places
        for item in make_items(ops, sizes, splits, n, args.dtype, args.redop, ways, place)
    ]


def possible(items: Iterable[Item]) -> list[Item]:
    """Without those that ranks of a launcher, or a machine without quotas, cannot measure."""
    wanted, given = list(items), given_size()
    if given is not None:
        return [i for i in wanted if i.case.ranks == given and not i.place.pin and not i.place.quota]
    if any(item.place.quota for item in wanted) and (why := why_no_quota()):
        print(f"# rows with a CPU quota are left out: {why}")
        return [item for item in wanted if not item.place.quota]
    return wanted


@contextmanager
def opened(args: argparse.Namespace, size: int, pin: bool, quota: int, items: list[Item]) -> Iterator[BenchRanks]:
    gloo = "gloo" in args.against
    backend = any(item.case.op == "ddp_step" or any(way != "group" for way in item.ways) for item in items)
    peers = [name for name in args.against if name in PEERS]
    ranks: BenchRanks
    if args.hosts is not None:
        ranks = HostRanks(Layout(args.hosts, args.interleaved, args.rate), gloo, backend, pin)
    elif given_size() is not None:
        ranks = GivenRanks(gloo, backend, peers)
    else:
        ranks = StartedRanks(size, gloo, backend, peers, pin, quota)
    try:
        yield ranks
    finally:
        ranks.close()


def run(args: argparse.Namespace, command: list[str], items: list[Item]) -> dict[str, Any] | None:
    """All rows, printed as they come; what JSON would hold, or None on a rank that does not lead."""
    start, facts = time.monotonic(), machine_facts()
    view = next((op for op in args.ops if op in VIEWS), None)
    kinds = tuple(kind for kind in KINDS if getattr(args, kind)) or (KINDS[1:] if view == "small" else KINDS)
    document: dict[str, Any] = {"format": FORMAT, "machine": facts, "command": command, "view": view, "peers": {}}
    document["rows"] = []
    progress: Progress | None = None
    memory: dict[int, dict[str, Any]] = {}
    table, leads = Table(), True
    for (size, pin, quota), together in by_ranks(items).items():
        with opened(args, size, pin, quota, together) as ranks:
            leads = ranks.leads
            say = print if leads else _nothing
            if progress is None:
                progress = Progress(len(items), start)
                say(header(facts, command), flush=True)
            for name, library in ranks.facts["libraries"].items():
                if name not in document["peers"]:
                    say(f"# {name}: {library}")
            document["peers"] |= ranks.facts["libraries"]
            for name, why in ranks.facts["lacks"].items():
                say(f"# {name} lacking: {why}")
            if view == "scaling":
                memory[size] = ranks.call(group_memory)[0]
            for item in together:
                case, place = item.case, item.place
                if leads:
                    progress.show(f"{case.op} {show_bytes(case.size_bytes)}, {case.ranks} ranks")
                used = kinds if case.op != "barrier" else kinds[:1]
                order = Order(used, item.ways, "gloo" in args.against, bool(args.check), args.rounds, args.seconds)
                with busy_neighbours(place.busy if leads else 0):
                    row = ranks.measure(case, order)
                if row is None:
                    continue
                row |= {"split": item.split, **asdict(place)}
                if "results" in row:
                    add_ratios(row)
                document["rows"].append(row)
                progress.step()
                if view != "small":
                    say("\n".join(table.lines(row)), flush=True)
    if view == "scaling":
        document["memory"] = {str(size): facts for size, facts in memory.items()}
    return document if leads else None


def recall(path: Path) -> dict[str, Any]:
    """An earlier run, printed as it was then."""
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("format") != FORMAT:
        raise SystemExit(f"unisono bench: {path}: expected format {FORMAT}, got {document.get('format')}")
    print(header(document["machine"], document["command"]))
    table = Table()
    for row in document["rows"] if document.get("view") != "small" else []:
        print("\n".join(table.lines(row)))
    return document


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What ranks that do not lead print."""


def main(argv: Sequence[str] | None = None) -> int:
    command = list(sys.argv[1:] if argv is None else argv)
    if command[:1] == ["share"]:  # a table of its own
        return share.main(command[1:])
    if command[:1] == ["recorder"]:
        return recorder.main(command[1:])
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.setup_peers:
        named = [name for name in args.against if name in PEERS]
        return 1 if setup_peers(named or list(PEERS)) else 0
    if args.tuning:
        print("\n".join(tuning_lines()))
        return 0
    check_args(parser, args)
    if args.builds is not None:
        return builds(parser, args.builds, args.turns, command)
    start, items = time.monotonic(), [] if args.source is not None else plan(args)
    if EVEN in args.calls and items and all(item.case.even for item in items):
        parser.error("--calls even compares uneven chunks with equal ones, and none of these rows has uneven ones")
    try:
        document = recall(args.source) if args.source is not None else run(args, command, items)
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
    if document.get("view") == "small":
        print("\n".join(small_lines(rows)))
    if document.get("view") == "readme":
        print("\n".join(readme_lines(rows)) + "\n#")
    for lines in (host_lines(rows), matrix_lines(rows), standing_lines(rows)):
        if lines:
            print("\n".join(lines))
    if args.targets:
        document["targets"] = judge(rows)
        print("\n".join(judgement_lines(document["targets"])))
    checked = f"wrong elements: {wrong}" if args.check else "results not checked"
    print(f"# {len(rows)} rows in {time.monotonic() - start:.0f} s, {checked}")
    write(args, document)
    return 1 if wrong else 0


def builds(parser: argparse.ArgumentParser, pythons: str, turns: int, command: list[str]) -> int:
    """The same command without --builds, in both of them."""
    both = pythons.split(",")
    if len(both) != 2 or not all(shutil.which(python) for python in both):
        parser.error(f"--builds: expected two programs with a comma between, got {pythons!r}")
    without = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--builds", "--turns", "-J"):
        without.add_argument(name)
    return compare_builds(both, turns, without.parse_known_args(command)[1])


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
