"""The `unisono` command: one subcommand per thing a person wants to see."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

EPILOG = "Each subcommand has its own --help."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand named first in `argv` (the command line unless given) and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="unisono",
        description="Collectives between the processes of one host through shared memory.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"unisono {version('unisono')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Everything after the name belongs to the subcommand, its --help too.
    commands.add_parser(
        "demo",
        add_help=False,
        help="two ranks show an uneven all-gather and reduce-scatter, timed against gloo",
    )
    commands.add_parser(
        "bench", add_help=False, help="measure the collectives against the memory's limit, gloo, MPI and oneCCL"
    )
    chosen, rest = parser.parse_known_args(argv)
    if chosen.command == "demo":
        from unisono import demo

        return demo.main(rest)
    from unisono import bench

    return bench.main(rest)


if __name__ == "__main__":
    sys.exit(main())
