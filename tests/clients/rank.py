"""One rank of a program, started by torchrun (or the only process, where the library starts its own ranks).

    python -m tests.clients.rank PROGRAM BACKEND FOLDER

Writes what each case returned, or its error, to ``FOLDER/RANK.pt``.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.clients.case import Case

STUCK_S = float(os.environ.get("CLIENT_STUCK_S", "100"))


def main(program: str, backend: str, folder: str) -> int:
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(STUCK_S)  # a rank that hangs says where
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    module = import_module(f"tests.clients.programs.{program}")
    found: dict[str, Any] = {}
    failed = False
    # One default group serves all cases: gloo may hang when a process makes a second one on torchrun's store.
    for title, function in module.CASES.items():
        case = Case(backend, getattr(module, "BY_NAME", True))
        try:
            values = function(case)
            found[title] = {"values": values, "milliseconds": case.milliseconds, "rounding": case.rounding}
        except Exception:
            traceback.print_exc()
            found[title] = {"error": traceback.format_exc().strip().splitlines()[-1]}
            failed = True
            break  # the other ranks may be anywhere
        if dist.is_initialized():
            dist.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    return int(failed)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # libraries leave threads behind that would keep a rank which failed from ending
