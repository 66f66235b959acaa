"""Records of processes: from a folder of files, from one live process, or from all of this user's on this host."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import _core

#: What one process did: "pid", "token", "groups", "waits", "operations"; see core/memory/dump.cc.
Record = dict[str, Any]

_MEMORY = "/memfd:unisono"  # what the kernel calls a heap


class NoRecord(Exception):
    """There is nothing to read, and why."""


def read_folder(folder: Path) -> list[Record]:
    """The records in a folder that UNISONO_TRACE_DIR named, or that ``unisono trace --save`` wrote."""
    records = []
    for path in sorted(folder.glob("unisono-*.json")):
        try:
            record = _read_json(path.read_text())
        except ValueError as error:
            raise NoRecord(f"{path} is not a whole record: {error}") from None
        if not isinstance(record, dict) or record.get("unisono_trace") != 1:
            raise NoRecord(f"{path} is not a record of this version")
        records.append(record)
    if not records:
        raise NoRecord(f"no records (unisono-*.json) in {folder}")
    return records


def read_process(pid: int, most: int = 0) -> Record:
    """The record of a live process, with its last ``most`` operations (0: all that are kept).

    The process may be stopped, or busy with anything. The kernel lets only its own user, or root, in.
    """
    try:
        names = os.listdir(f"/proc/{pid}/fd")
        inner = _inner_pids(pid)
    except FileNotFoundError:
        raise NoRecord(f"there is no process {pid}") from None
    except PermissionError:
        raise NoRecord(f"process {pid} belongs to another user") from None
    for name in names:
        record = _read_descriptor(f"/proc/{pid}/fd/{name}", most)
        if record is not None and record["pid"] in inner:  # else the memory of a peer, which it maps
            record["pid"] = pid  # as this host calls it; in a container it may have another number
            return record
    raise NoRecord(f"process {pid} has no group of this version of unisono")


def _read_descriptor(path: str, most: int) -> Record | None:
    try:
        if not os.readlink(path).startswith(_MEMORY):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # closed meanwhile, or not ours
        return None
    try:
        if os.fstat(fd).st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
            return None
        text = _core.read_record(fd, "read by a tool", most)
    finally:
        os.close(fd)
    return _read_json(text) if text else None


def _read_json(text: str) -> Any:
    """The core writes names byte by byte, since they may be anything; here they become text again."""

    def readable(value: Any) -> Any:
        if isinstance(value, str) and not value.isascii():
            with contextlib.suppress(UnicodeError):
                return value.encode("latin-1").decode()
        return value

    return json.loads(text, object_hook=lambda found: {key: readable(value) for key, value in found.items()})


def _inner_pids(pid: int) -> set[int]:
    """The numbers a process has in its own namespace and those around it."""
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return {int(word) for word in line.split()[1:]}
    return {pid}


def live_records(most: int = 0) -> Iterator[Record]:
    """The records of all processes of this host that this user may look at."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(NoRecord, OSError):
                yield read_process(int(name), most)


def with_peers(record: Record) -> list[Record]:
    """A live process and all that share a group with it."""
    tokens = {token for group in record["groups"] if group["open"] for token in group["tokens"]}
    return [record] + [r for r in live_records() if r["token"] in tokens and r["token"] != record["token"]]


def save(records: list[Record], folder: Path) -> None:
    """Writes records as a failing group would have."""
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        (folder / f"unisono-{record['host']}-{record['pid']}.json").write_text(json.dumps(record))
