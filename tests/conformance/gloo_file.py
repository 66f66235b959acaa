"""Compares served groups with gloo on torch's own tests of ProcessGroupGloo, a file that is not in the wheel:

python -m tests.conformance.gloo_file PATH/test/distributed/test_c10d_gloo.py -k allgather

The file comes from a checkout of PyTorch of the installed version, whose folder also has test_c10d_common.py.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conformance import suite
from tests.conformance.run import BAD, _loopback_only

# "unisono" is a backend that torch did not know when it wrote this test, which fails with every plug-in.
NOT_ABOUT_GLOO = {"test_init_process_group_for_all_backends"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("-k", dest="pattern", default="*", help="only tests whose name contains this, or matches it")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one test")
    parser.add_argument("--only", choices=["gloo", "served"], help="run one of the two and print records")
    args = parser.parse_args()
    if args.only:
        for record in _run_here(args):
            print(json.dumps(record), flush=True)
        return 0
    theirs, ours = (_run_apart(which) for which in ("gloo", "served"))
    missing = 0
    for name in sorted(ours):
        mine, gloo = ours[name], theirs[name]
        if mine["status"] != gloo["status"]:
            print(f"  served {mine['status']:7s} gloo {gloo['status']:7s} {name}: {mine.get('reason', '')}")
            missing += gloo["status"] == "pass" and name.rpartition(".")[2] not in NOT_ABOUT_GLOO
    print(f"{sum(r['status'] == 'pass' for r in theirs.values()) - missing} of those that gloo passes")
    return 1 if missing else 0


def _run_here(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    os.environ.update(suite.ENVIRONMENT)
    pattern = args.pattern if "*" in args.pattern else f"*{args.pattern}*"
    with contextlib.suppress(OSError, AttributeError, PermissionError):
        _loopback_only()
    suite._stand_in_for_expecttest()
    suite._fork_ranks("gloo", args.timeout, namespaces=[])
    if args.only == "served":
        import unisono

        unisono.serve_gloo()
    sys.path[:0] = [str(args.file.resolve().parent), str(args.file.resolve().parents[1])]
    module = importlib.import_module(args.file.stem)
    with tempfile.TemporaryDirectory() as folder:
        for name, case in vars(module).items():
            if not (
                isinstance(case, type) and issubclass(case, unittest.TestCase) and case.__module__ == args.file.stem
            ):
                continue
            case.suite = module  # type: ignore[attr-defined]
            for test in unittest.TestLoader().getTestCaseNames(case):
                if fnmatch.fnmatch(f"{name}.{test}", pattern):
                    record = suite._run_one("gloo", case, test, folder, args.timeout)
                    yield {**record, "test": f"{name}.{test}"}


def _run_apart(which: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.conformance.gloo_file", *sys.argv[1:], "--only", which]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    counts = Counter(record["status"] for record in records)
    words = ", ".join(f"{counts[s]} {s}" for s in ("pass", *BAD, "skip") if counts[s])
    print(f"{which:8s} {words}", flush=True)
    return {record["test"]: record for record in records}


if __name__ == "__main__":
    sys.exit(main())
