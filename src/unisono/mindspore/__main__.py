"""``python -m unisono.mindspore script.py …``: runs a MindSpore script with unisono as its communication."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from .install import install

_PURPOSE = """Run a MindSpore script on the CPU, with unisono in the place of mindspore.communication.
With ranks made by torchrun: torchrun --nproc-per-node=2 -m unisono.mindspore script.py"""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m unisono.mindspore", description=_PURPOSE)
    parser.add_argument("script", help="the script to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(arguments)
    if not os.path.isfile(given.script):
        parser.error(f"no such script: {given.script}")
    install()
    sys.path.insert(0, os.path.dirname(os.path.abspath(given.script)))  # as with python itself
    sys.argv = [given.script, *given.args]
    runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
