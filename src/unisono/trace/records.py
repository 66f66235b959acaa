"""Records of processes: from a folder of files, from one live process, or from all of this user's on this host."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import _core
from ..base.processes import process_state

#: What one process did: "pid", "token", "why", "groups", "waits", "operations"; see core/memory/dump.cc. Where it was
#: read out of memory also "state": what the kernel said of the process then.
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
        heaps = _heaps_of(pid, most)
        inner = _inner_pids(pid)
    except FileNotFoundError:
        raise NoRecord(f"there is no process {pid}") from None
    except PermissionError:
        raise NoRecord(f"process {pid} belongs to another user") from None
    for record in heaps:
        if record["pid"] in inner:  # else the memory of a peer, which it maps
            record["pid"] = pid  # as this host calls it; in a container it may have another number
            record["state"] = process_state(pid)
            return record
    if process_state(pid) == "gone":
        raise NoRecord(f"process {pid} has ended; one that shares a group with it may still hold its memory")
    raise NoRecord(f"process {pid} has no group of this version of unisono")


def _heaps_of(pid: int, most: int) -> Iterator[Record]:
    """The records in all heaps that a process holds open: its own and its peers', also of those that have died."""
    paths = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    return (record for path in paths if (record := _read_descriptor(path, most)) is not None)


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
    with open(f"/proc/{pid}/status", errors="replace") as file:  # a name may be cut inside a character
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
    """A live process and all that share a group with it, also those that have died since.

    The memory of a dead process lives on in those that map it, so it is read there.
    """
    pids = {t: pid for g in record["groups"] if g["open"] for t, pid in zip(g["tokens"], g["pids"], strict=True)}
    found = {record["token"]: record}
    for other in live_records():
        if other["token"] in pids:
            found.setdefault(other["token"], other)
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for held in _heaps_of(record["pid"], 0):
            if held["token"] in pids and held["token"] not in found:
                if _is_gone(pids[held["token"]]):
                    held["state"] = "gone"
                found[held["token"]] = held
    return list(found.values())


def _is_gone(pid: int) -> bool:
    """Of a peer whose heap no process has as its own: whether that is since it has ended, not since we may not look."""
    if pid <= 0 or pid == os.getpid():  # 0: of another namespace
        return False
    if process_state(pid) != "gone":
        try:
            os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            return False
        except OSError:
            return True
    return True  # or its number is another process's now


def printable(text: str) -> str:
    """Text of other processes for a terminal: what is no visible character becomes an escape, such as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def save(records: list[Record], folder: Path) -> None:
    """Writes records as a failing group would have."""
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        host = record["host"].replace("/", "_")  # as the core does: a record that was read may say anything
        (folder / f"unisono-{host}-{record['pid']}.json").write_text(json.dumps(record))
