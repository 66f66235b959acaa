"""``unisono top``: the live groups of this host, what they move, and who waits for whom.

Read out of the processes' shared memory, without their help: a stopped process, or one that holds its GIL, is shown
like any other. Only processes of this user are seen; root sees all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from .base.processes import process_state
from .trace.records import Record, live_records, printable
from .trace.report import words_of_call

_LAST_OPERATIONS = 64
_CLEAR = "\x1b[H\x1b[2J"

Totals = dict[tuple[str, str], tuple[int, int]]  # by process and group: calls and bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``unisono top`` and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="unisono top", description="Live groups of this host: operations, bytes, who waits for whom and how long."
    )
    parser.add_argument("--once", action="store_true", help="show them once and end")
    parser.add_argument("--json", action="store_true", help="one JSON object per look instead of text")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="how often to look (default 2)")
    options = parser.parse_args(argv)
    if not options.every > 0:
        parser.error("--every must be positive")
    before: Totals = {}
    looked_at = 0.0
    try:
        while True:
            records = list(live_records(_LAST_OPERATIONS))
            now = time.monotonic()
            groups = look(records, before, now - looked_at)
            before, looked_at = _totals(records), now
            if options.json:
                print(json.dumps({"time": time.time(), "groups": groups}), flush=True)
            else:
                clear = _CLEAR if sys.stdout.isatty() and not options.once else ""
                print(clear + "\n".join(lines_of(groups)), flush=True)
            if options.once:
                return 0
            time.sleep(options.every)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        sys.stderr.close()  # or Python complains at its end that it cannot flush
        return 0


def look(records: list[Record], before: Totals, passed_s: float) -> list[dict[str, Any]]:
    """The groups, with their ranks; rates are those since the look before."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        for group in record["groups"]:
            if not group["open"]:
                continue
            view = found.setdefault(
                group["id"], {"name": group["name"], "id": group["id"], "size": group["size"], "ranks": []}
            )
            view["ranks"].append(_rank(record, group, before, passed_s))
    for view in found.values():
        view["ranks"].sort(key=lambda rank: rank["rank"])
        for key in ("calls", "bytes", "calls_per_s", "bytes_per_s"):
            view[key] = max(rank[key] for rank in view["ranks"])
    return sorted(found.values(), key=lambda view: (-view["size"], view["name"], view["id"]))


def _rank(record: Record, group: dict[str, Any], before: Totals, passed_s: float) -> dict[str, Any]:
    calls, moved = group["calls"] + group["messages"], group["bytes"] + group["message_bytes"]
    then = before.get((record["token"], group["id"]))
    waits = [w for w in record["waits"] if w["group_id"] == group["id"] and w["for"] != "ticket"]
    last = next((o for o in reversed(record["operations"]) if o["group_id"] == group["id"]), None)
    return {
        "rank": group["rank"],
        "pid": record["pid"],
        "state": process_state(record["pid"]),
        "calls": calls,
        "bytes": moved,
        "calls_per_s": (calls - then[0]) / passed_s if then else 0.0,
        "bytes_per_s": (moved - then[1]) / passed_s if then else 0.0,
        "queued": group["queued"],
        "waits": [
            {"in": words_of_call(w), "for_ranks": w["ranks"], "waited_s": w["waited_ns"] / 1e9, "site": w["site"]}
            for w in waits
        ],
        "last": None
        if last is None
        else {
            "call": words_of_call(last),
            "state": last["state"],
            "site": last["site"],
            "began_s_ago": (record["written_ns"] - last["began_ns"]) / 1e9,
        },
    }


def _totals(records: list[Record]) -> Totals:
    return {
        (record["token"], g["id"]): (g["calls"] + g["messages"], g["bytes"] + g["message_bytes"])
        for record in records
        for g in record["groups"]
    }


def lines_of(groups: list[dict[str, Any]]) -> list[str]:
    """The same as text."""
    if not groups:
        return ["no groups of this user on this host"]
    lines = []
    for view in groups:
        rate = f"{view['calls_per_s']:.0f}/s, {_amount(view['bytes_per_s'])}/s"
        lines.append(
            f'group "{view["name"]}"  {view["size"]} ranks  {view["calls"]} calls  {_amount(view["bytes"])}  {rate}'
        )
        for rank in view["ranks"]:
            lines.append(f"  rank {rank['rank']}  pid {rank['pid']}  {rank['state']:8}  {_doing(rank)}")
        seen = {rank["rank"] for rank in view["ranks"]}
        if missing := [r for r in range(view["size"]) if r not in seen]:
            lines.append(f"  rank {', '.join(map(str, missing))}: not seen (gone, left, or another user's)")
    return [printable(line) for line in lines]  # names are others' words, and root sees everybody's


def _doing(rank: dict[str, Any]) -> str:
    queued = f", {rank['queued']} queued" if rank["queued"] > 1 else ""
    if rank["waits"]:
        wait = rank["waits"][0]
        at = f" at {wait['site']}" if wait["site"] else ""
        who = ", ".join(map(str, wait["for_ranks"])) or "data"
        return f"waits {wait['waited_s']:.1f} s for rank {who} in {wait['in']}{at}{queued}"
    last = rank["last"]
    if last is None:
        return "no call yet"
    at = f" at {last['site']}" if last["site"] else ""
    if last["state"] in ("started", "published"):
        return f"in {last['call']}{at}{queued}"
    return f"last {last['call']}{at}, {last['began_s_ago']:.1f} s ago"


def _amount(n: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
