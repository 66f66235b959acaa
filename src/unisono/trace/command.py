"""``unisono trace``: what the ranks of a failed, hanging or running job did last."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import exports, records
from .report import print_report


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``unisono trace`` and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="unisono trace",
        description="Who was where: from the files that ranks write when a group fails (UNISONO_TRACE_DIR), or from a "
        "live process and those that share a group with it, without their help.",
    )
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="a folder of records")
    parser.add_argument("--pid", type=int, help="a live process instead; its peers on this host are read too")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the records there")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write a file for ui.perfetto.dev")
    parser.add_argument("--torch", type=Path, metavar="DIR", help="write files for torch's analyser, torchfrtrace")
    parser.add_argument("--json", action="store_true", help="print the records as JSON instead of a report")
    options = parser.parse_args(argv)
    if (options.folder is None) == (options.pid is None):
        parser.error("give a folder of records, or --pid")
    try:
        if options.pid is not None:
            found = records.with_peers(records.read_process(options.pid))
        else:
            found = records.read_folder(options.folder)
    except records.NoRecord as error:
        print(records.printable(f"unisono trace: {error}"), file=sys.stderr)
        return 1
    if options.save is not None:
        records.save(found, options.save)
    if options.perfetto is not None:
        exports.write_perfetto(found, options.perfetto)
    if options.torch is not None:
        exports.write_torch(found, options.torch)
    if options.json:
        print(json.dumps(found))
    else:
        print_report(found)
    return 0
