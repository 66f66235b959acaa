"""Records in other tools' formats: Perfetto (trace events) and torch's flight recorder.

Torch's analyser (``torchfrtrace``) compares what ranks say about one call, so every rank lists the full splits of an
uneven call; of a gather and a scatter these are the root's. Messages are left out: the analyser pairs them only where
torch has coalesced them. It knows no backend by our name; the entries say "gloo", the one for CPUs.

The analyser takes a call that one rank lists and another does not for a call that was never made. So of each group all
ranks list the same calls: from the first one that every record still holds whole.
"""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

from .records import Record
from .report import GroupView, groups_of

_TORCH_VERSION = "2.10"
_SHORT_US = 1.0  # of a call so short that its end was not timed
_GROUPS_KEPT = 64  # kRecordedGroups of core/memory/recorder.h


def global_ranks(records: list[Record]) -> dict[str, int]:
    """The number of each process, by token: its rank in the largest group, others behind."""
    largest = max((g for r in records for g in r["groups"]), key=lambda g: g["size"], default=None)
    ranks = {token: rank for rank, token in enumerate(largest["tokens"])} if largest else {}
    for record in records:
        for token in [record["token"], *(t for g in record["groups"] for t in g["tokens"])]:
            ranks.setdefault(token, len(ranks))
    return ranks


# -- Perfetto


def write_perfetto(records: list[Record], path: Path) -> None:
    """A file for ui.perfetto.dev or chrome://tracing: a process per rank, a track per group."""
    ranks = global_ranks(records)
    events: list[dict[str, Any]] = []
    for record in records:
        pid = record["pid"]
        name = f"rank {ranks[record['token']]} (pid {pid})"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        tracks: dict[str, int] = {}
        by_group: dict[str, list[dict[str, Any]]] = {}
        for operation in record["operations"]:
            by_group.setdefault(operation["group_id"], []).append(operation)
        for group_id, operations in by_group.items():
            track = tracks.setdefault(group_id, len(tracks) + 1)
            label = f"group {operations[-1]['group'] or group_id}"
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": label}})
            ends = [o["began_ns"] for o in operations[1:]] + [record["written_ns"]]
            for operation, limit_ns in zip(operations, ends, strict=True):
                events.append(_event(operation, pid, track, limit_ns, record["written_ns"]))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _event(operation: dict[str, Any], pid: int, track: int, limit_ns: int, written_ns: int) -> dict[str, Any]:
    began = operation["began_ns"]
    if operation["ended_ns"]:
        duration_us = (operation["ended_ns"] - began) / 1e3
    elif operation["state"] in ("done", "failed"):
        duration_us = min(_SHORT_US, (limit_ns - began) / 1e3)
    else:
        duration_us = (written_ns - began) / 1e3
    shown = ("seq", "state", "dtype", "reduce", "count", "root", "in_splits", "out_splits", "async", "site")
    return {
        "ph": "X",
        "name": operation["op"],
        "cat": operation["group"] or "group",
        "pid": pid,
        "tid": track,
        "ts": began / 1e3,
        "dur": max(duration_us, 0.0),
        "args": {key: operation[key] for key in shown if key in operation},
    }


# -- torch


def write_torch(records: list[Record], folder: Path) -> None:
    """A file per rank, as torch writes them: ``torchfrtrace FOLDER`` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = global_ranks(records)
    views = groups_of(records)
    names = _unique_names(views)
    members = {view.id: [ranks[t] for t in _tokens(records, view)] for view in views}
    roots = _root_splits(records)
    first = _first_whole(records)
    for record in records:
        config = {
            names[g["id"]]: {"name": names[g["id"]], "desc": names[g["id"]], "ranks": str(members[g["id"]])}
            for g in record["groups"]
        }
        calls = [
            o for o in record["operations"] if _is_collective(o) and o["seq"] >= first.get(o["group_id"], math.inf)
        ]
        entries = [_entry(i, o, names[o["group_id"]], roots) for i, o in enumerate(calls)]
        dump = {
            "version": _TORCH_VERSION,
            "comm_lib_version": "unisono",
            "pg_config": config,
            "pg_status": {},
            "entries": entries,
        }
        (folder / f"unisono_trace_{ranks[record['token']]}").write_bytes(pickle.dumps(dump))


def _tokens(records: list[Record], view: GroupView) -> list[str]:
    return next(list(g["tokens"]) for r in records for g in r["groups"] if g["id"] == view.id)


def _unique_names(views: list[GroupView]) -> dict[str, str]:
    names: dict[str, str] = {}
    for view in views:
        name, number = view.name, 1
        while name in names.values():
            number += 1
            name = f"{view.name}_{number}"
        names[view.id] = name
    return names


def _is_collective(operation: dict[str, Any]) -> bool:
    return operation["op"] not in ("send", "recv")


def _first_whole(records: list[Record]) -> dict[str, float]:
    """By group: the number of the first call that all its records still hold, with its splits.

    Rings wrap at different calls of a group, since ranks have different groups beside it.
    """
    first: dict[str, float] = {}
    for record in records:
        has_wrapped = bool(record["operations"]) and record["operations"][0]["number"] > 0
        for group in record["groups"]:
            calls = [o for o in record["operations"] if o["group_id"] == group["id"] and _is_collective(o)]
            begin = 1
            if has_wrapped:
                begin = calls[0]["seq"] if calls else group["calls"] + 1
            lost = [o["seq"] for o in calls if _lost_splits(o, group["rank"])]
            first[group["id"]] = max(first.get(group["id"], 1), begin, max(lost, default=0) + 1)
    # A process that has had more groups than it keeps may have forgotten one that others still list.
    for full in (record for record in records if len(record["groups"]) >= _GROUPS_KEPT):
        kept = {group["id"] for group in full["groups"]}
        for group in (g for record in records for g in record["groups"]):
            if group["id"] not in kept and full["token"] in group["tokens"]:
                first[group["id"]] = math.inf
    return first


def _lost_splits(o: dict[str, Any], rank: int) -> bool:
    """Whether this rank's splits of the call were overwritten: they have a ring of their own, which wraps sooner."""
    has_had = o["op"] in ("all_gather", "reduce_scatter", "all_to_all") or (
        o["op"] in ("gather", "scatter") and o["root"] == rank
    )
    return has_had and not (o.get("in_splits") or o.get("out_splits"))


def _root_splits(records: list[Record]) -> dict[tuple[str, int], list[int]]:
    """The parts of every gather and scatter, which only the root knows, by group and number."""
    found: dict[tuple[str, int], list[int]] = {}
    for record in records:
        for o in record["operations"]:
            splits = (
                o.get("out_splits") if o["op"] == "gather" else o.get("in_splits") if o["op"] == "scatter" else None
            )
            if splits:
                found[o["group_id"], o["seq"]] = splits
    return found


def _sizes(o: dict[str, Any], roots: dict[tuple[str, int], list[int]]) -> tuple[str, list[Any], list[Any]]:
    """Torch's name for the call, and its input and output sizes."""
    op, count = o["op"], o["count"]
    splits = o.get("in_splits") or o.get("out_splits") or roots.get((o["group_id"], o["seq"])) or []
    even, total = len(set(splits)) == 1, sum(splits)
    if op in ("all_gather", "reduce_scatter"):
        parts, whole = [[s] for s in splits], [[total]]
        if even:
            parts = parts[:1]
        name = op if even else f"{op}_v"
        return (name, parts, whole) if op == "all_gather" else (name, whole, parts)
    if op == "all_to_all":
        return op, [[sum(o.get("in_splits", []))]], [[sum(o.get("out_splits", []))]]
    # Without the root's record nobody knows the parts of all; of its own alone a rank would seem to differ.
    if op == "gather":
        return op, [[s] for s in splits] or [[]], [[total]]
    if op == "scatter":
        return op, [[total]], [[s] for s in splits] or [[]]
    if op == "matmul_reduce":
        return "all_reduce", [[count]], [[count]]
    if op == "barrier":
        return op, [[1]], [[1]]
    return op, [[count]], [[count]]


def _entry(i: int, o: dict[str, Any], name: str, roots: dict[tuple[str, int], list[int]]) -> dict[str, Any]:
    torch_name, inputs, outputs = _sizes(o, roots)
    state = {"done": "completed", "started": "scheduled"}.get(o["state"], "started")
    file, _, line = o["site"].rpartition(":")
    dtype = {"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16"}.get(
        o["dtype"], o["dtype"].capitalize()
    )
    done = o["state"] == "done"
    return {
        "record_id": i,  # one count for the process; the analyser drops what is below the highest first one of any rank
        "pg_id": 0,
        "process_group": (name, name),
        "collective_seq_id": o["seq"],
        "p2p_seq_id": 0,
        "op_id": o["seq"],
        "profiling_name": f"gloo:{torch_name}",
        "time_created_ns": o["began_ns"],
        "duration_ms": (o["ended_ns"] - o["began_ns"]) / 1e6 if o["ended_ns"] else None,
        "input_sizes": inputs,
        "input_dtypes": [dtype] * len(inputs),
        "output_sizes": outputs,
        "output_dtypes": [dtype] * len(outputs),
        "state": state,
        "time_discovered_started_ns": o["began_ns"],
        "time_discovered_completed_ns": (o["ended_ns"] or o["began_ns"]) if done else None,
        "retired": done,
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [{"name": "?", "filename": file or "?", "line": int(line) if line.isdigit() else 0}],
        "thread_id": "0",
        "thread_name": "main",
    }
