"""The `unisono` command: one subcommand per thing a person wants to see."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

#: The modules whose ``main`` is a subcommand.
COMMANDS = {
    "demo": "two ranks show an uneven all-gather and reduce-scatter, timed against gloo",
    "doctor": "check whether unisono works on this machine, and how fast",
    "trace": "who was where: reads the flight recorder of failed, hanging or running ranks",
    "top": "the live groups of this host: operations, bytes, who waits for whom",
    "run": 'run a program as torchrun or python does, with unisono where it says "gloo"',
    "bench": "measure the collectives against the memory's limit, gloo, MPI and oneCCL",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand named first in `argv` (the command line unless given) and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="unisono",
        description="Collective communication for PyTorch on CPUs. New here? `unisono doctor`, then `unisono demo`.",
        epilog="Each subcommand has its own --help.",
    )
    parser.add_argument("--version", action="version", version=f"unisono {version('unisono')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        # Everything after the name belongs to the subcommand, its --help too.
        commands.add_parser(name, add_help=False, help=text)
    chosen, rest = parser.parse_known_args(argv)
    code: int = import_module(f"unisono.{chosen.command}").main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main())
