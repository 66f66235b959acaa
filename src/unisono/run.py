"""``unisono run``: a program as it is, with unisono where it says "gloo".

    unisono run --nproc-per-node 4 train.py --lr 0.1     as torchrun, with torchrun's options
    unisono run train.py                                 as python: a program that starts its own ranks, or has one
    unisono run --nproc-per-node 4 -m package.train

The programs learn it from their environment (``UNISONO_GLOO``, ``UNISONO_SHARE``), which the entry point that torch
loads reads; so do all processes that they start.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun


def main(argv: Sequence[str]) -> int:
    """Runs the program, by torchrun or in the place of this process."""
    parser = _parser()
    args = parser.parse_args(argv)
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        parser.error("TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading unisono; unset it")
    if not args.no_gloo:
        os.environ["UNISONO_GLOO"] = "1"
    if args.share:
        os.environ["UNISONO_SHARE"] = "1"
    if _asks_for_torchrun(parser, args):
        torchrun.run(args)  # type: ignore[no-untyped-call]
        return 0
    how = [] if args.no_python else [sys.executable, "-u"]
    command = [*how, *(["-m"] if args.module else []), args.training_script, *args.training_script_args]
    sys.stdout.flush()
    return os.execvp(command[0], command)


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog = "unisono run"
    parser.description = (
        'Runs a program with unisono in the place of "gloo". Takes all options of torchrun; without any of them the '
        "program runs by itself, as with python, and starts its own ranks if it has several."
    )
    ours = parser.add_argument_group("unisono")
    ours.add_argument("--share", action="store_true", help="new tensors of the program lie in shared memory")
    ours.add_argument("--no-gloo", action="store_true", help='leave groups that ask for "gloo" to gloo')
    return parser


def _asks_for_torchrun(parser: argparse.ArgumentParser, args: argparse.Namespace) -> bool:
    """Whether an option of torchrun was given that is about ranks."""
    how = {"module", "no_python", "share", "no_gloo", "training_script", "training_script_args"}
    plain = parser.parse_args([args.training_script])
    return any(value != getattr(plain, name) for name, value in vars(args).items() if name not in how)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
