"""Compares unisono with gloo on torch's own distributed tests: ``make conformance``, or

python -m tests.conformance.run --world-size 3 -k all_reduce
python -m tests.conformance.run --world-size 4 --hosts 2          (network namespaces; needs root)
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Any

BAD = ("fail", "timeout", "crash")
# Not torch's tests but torch itself refuses these to any name but gloo.
REFUSED = {
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, nargs="+", default=[3, 4])
    parser.add_argument("-k", dest="pattern", default="*", help="only tests whose name contains this, or matches it")
    parser.add_argument("--hosts", type=int, default=1, help="that the ranks are on, made of network namespaces")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one test")
    parser.add_argument("--backend", help="run one backend here and print records; used by the comparison")
    args = parser.parse_args()
    if args.backend:
        return _run_here(args)
    fine = True
    for size in args.world_size:
        ours, theirs = (_run_apart(backend, size, args) for backend in ("unisono", "gloo"))
        fine &= _compare(size, ours, theirs)
    return 0 if fine else 1


def _run_here(args: argparse.Namespace) -> int:
    from tests.conformance import suite

    pattern = args.pattern if "*" in args.pattern else f"*{args.pattern}*"
    if args.hosts == 1:
        with contextlib.suppress(OSError, AttributeError, PermissionError):
            _loopback_only()
    matches = lambda name: fnmatch.fnmatch(name, pattern)  # noqa: E731
    for record in suite.run(args.backend, args.world_size[0], matches, args.timeout, args.hosts):
        print(json.dumps(record), flush=True)
    return 0


def _loopback_only() -> None:
    """A network namespace with nothing but loopback, where the kernel permits one."""
    import fcntl
    import struct

    os.unshare(os.CLONE_NEWNET)  # type: ignore[attr-defined, unused-ignore]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))  # SIOCSIFFLAGS: up


def _run_apart(backend: str, size: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.conformance.run", "--backend", backend, "--world-size", str(size)]
    command += ["-k", args.pattern, "--timeout", str(args.timeout), "--hosts", str(args.hosts)]
    records: dict[str, dict[str, Any]] = {}
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                record = json.loads(line)
                records[record["test"]] = record
                if sys.stderr.isatty():
                    sys.stderr.write(f"\r\033[K{backend}, {size} ranks: {len(records)} {record['test']}")
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    if process.returncode:
        sys.exit(f"the run of {backend} on {size} ranks ended with status {process.returncode}")
    counts = Counter(record["status"] for record in records.values())
    words = ", ".join(f"{counts[s]} {s}" for s in ("pass", "blocked", *BAD, "skip") if counts[s])
    print(f"{backend:8s} {size} ranks: {words}   ({time.monotonic() - begin:.0f} s)", flush=True)
    return records


def _compare(size: int, ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> bool:
    """Prints every difference; True if we pass all that gloo passes but what torch refuses us."""
    missing = 0
    for name in sorted(ours):
        mine, gloo = ours[name], theirs.get(name, {"status": "absent"})
        if mine["status"] == gloo["status"]:
            if mine["status"] in BAD:
                print(f"  both {mine['status']:7s} {name}: {mine.get('reason', '')}")
            continue
        print(
            f"  unisono {mine['status']:7s} gloo {gloo['status']:7s} {name}: {mine.get('reason') or gloo.get('reason')}"
        )
        if gloo["status"] == "pass" and not (mine["status"] == "blocked" and name in REFUSED):
            missing += 1
    words = "nothing that gloo passes is missing" if not missing else f"{missing} that gloo passes are missing"
    print(f"{size} ranks: {words}, except what torch refuses to any name but gloo", flush=True)
    return not missing


if __name__ == "__main__":
    sys.exit(main())
