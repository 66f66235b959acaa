"""``python -m unisono.ascend script.py …``: runs a script written for Ascend on this host's CPU."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

import torch

from ..ascend import install
from .missing import PACKAGES

_PURPOSE = """Run a script written for Ascend (torch_npu, mindspeed, mindspore.communication) on the CPU, unchanged.
With ranks made by torchrun: torchrun --nproc-per-node=2 -m unisono.ascend script.py"""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m unisono.ascend", description=_PURPOSE)
    parser.add_argument("--force", action="store_true", help="stand in for packages that are installed, too")
    parser.add_argument("--quiet", action="store_true", help="do not say what is emulated")
    parser.add_argument("script", help="the script to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(arguments)

    if not os.path.isfile(given.script):
        parser.error(f"no such script: {given.script}")
    if given.force:
        _keep_the_real_one_out()
    # The first place to look for modules is the script's folder, as with python itself; a package there is a real one.
    sys.path.insert(0, os.path.dirname(os.path.abspath(given.script)))
    names = install(force=given.force)
    if not given.quiet and os.environ.get("RANK", "0") == "0":
        _say(names)
    sys.argv = [given.script, *given.args]
    try:
        runpy.run_path(given.script, run_name="__main__")  # as __main__, so that processes it spawns find its functions
    except ValueError as error:
        if "expected, but not set" in str(error):  # torch's words, which do not say what to do
            how = f"torchrun --nproc-per-node=2 -m unisono.ascend {given.script}"
            error.args = (f"{error}\n  start the ranks by `{how}`",)
        raise


def _keep_the_real_one_out() -> None:
    """A real torch_npu has named the device when torch was imported: starts again with torch told not to do that."""
    if torch._C._get_privateuse1_backend_name() == "npu" and not hasattr(sys.modules.get("torch_npu"), "__unisono__"):
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "unisono.ascend", *sys.argv[1:]])


def _say(names: list[str]) -> None:
    parts = []
    if "torch_npu" in names:
        parts.append(f"{torch.npu.device_count()} npu devices and hccl on the CPU")  # type: ignore[attr-defined]
    parts.append(f"stand-ins for {', '.join(names)}" if names else "nothing emulated")
    left = [name for name in PACKAGES if name not in names]
    if left:
        parts.append(f"left alone: {', '.join(left)} (--force to stand in for them)")
    print("unisono.ascend: " + "; ".join(parts), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
