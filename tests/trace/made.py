"""Records made up for tests, as core/memory/dump.cc writes them."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]


def token(process: int) -> str:
    return f"{process + 1:016x}"


def operation(op: str, seq: int, group: str, **facts: Any) -> dict[str, Any]:
    return {
        "op": op,
        "seq": seq,
        "group": group,
        "group_id": group,
        "state": "done",
        "dtype": "float32",
        "count": 8,
        "root": -1,
        "tag": 0,
        "began_ns": 1_000,
        "ended_ns": 2_000,
        "async": False,
        "site": "job.py:1",
        **facts,
    }


def wait(op: str, seq: int, group: str, ranks: list[int], kind: str = "callers", **facts: Any) -> dict[str, Any]:
    return {
        "op": op,
        "seq": seq,
        "group": group,
        "group_id": group,
        "for": kind,
        "ranks": ranks,
        "peer": ranks[0] if kind == "message" else -1,
        "tag": 0,
        "since_ns": 1_000,
        "waited_ns": 1_000_000_000,
        "site": "job.py:2",
        **facts,
    }


def record(
    process: int,
    groups: dict[str, list[int]],
    operations: list[dict[str, Any]],
    waits: list[dict[str, Any]] | None = None,
    kept: int = 1024,
    why: str = "read by a tool",
    **facts: Any,
) -> Record:
    """Of process 100 + ``process``, in groups given as lists of processes; the ring keeps the last operations."""
    numbered = [{"number": i, **o} for i, o in enumerate(operations)]
    return {
        "unisono_trace": 1,
        "host": "here",
        "pid": 100 + process,
        "token": token(process),
        "why": why,
        "written_ns": 3_000,
        "groups": [
            {
                "name": name,
                "id": name,
                "open": True,
                "rank": members.index(process),
                "size": len(members),
                "pids": [100 + m for m in members],
                "tokens": [token(m) for m in members],
                "calls": sum(o["group"] == name and o["op"] not in ("send", "recv") for o in operations),
                "messages": sum(o["group"] == name and o["op"] in ("send", "recv") for o in operations),
                "bytes": 0,
                "message_bytes": 0,
                "queued": 0,
            }
            for name, members in groups.items()
        ],
        "waits": waits or [],
        "operations": numbered[-kept:],
        **facts,
    }
