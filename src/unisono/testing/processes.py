"""The caller's side of `unisono.testing`: start ranks, send them calls, collect their answers.

Calls and results are files in a folder of the run, so a rank that reads nothing can block nobody; the channel
between a rank and its caller carries short notes only: `pid` and `exit_code` from the fork server (fork_server.py),
`done` from the rank itself (rank_main.py).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.testing import rank_main
from unisono.testing.fork_server import STACK_SIGNAL

_NURSERY_START_S = 300.0  # importing torch from a cold disk
_KILL_S = 1.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed: by an exception, by ending too soon, or by not ending in time."""

    rank: int
    pid: int | None
    reason: str
    traceback: str = ""
    error: str | None = None  # the exception's type, such as "unisono.base.errors.PeerLostError"
    exit_code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        head = f"rank {self.rank} (pid {self.pid}): {self.reason}"
        return head if not self.traceback else f"{head}\n{self.traceback.rstrip()}"


class ForkServer:
    """The caller's end of the fork server process: one per process, started when first needed."""

    current: ForkServer | None = None
    lock = threading.RLock()

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("fork_server.py"))
        with theirs:
            command = [sys.executable, script, str(theirs.fileno()), json.dumps(sys.path)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.control.settimeout(_NURSERY_START_S)
        try:
            ready = self.control.recv(16)
        except TimeoutError:
            ready = b""
        if ready != b"ready":
            self.end()
            raise RuntimeError(f"the process that ranks are forked from did not start: {' '.join(command[:2])}")
        self.control.settimeout(_KILL_S)

    @classmethod
    def get(cls) -> ForkServer:
        with cls.lock:
            fork_server = cls.current
            if fork_server is not None and fork_server.owner_pid == os.getpid() and fork_server.process.poll() is None:
                return fork_server
            cls.stop()
            cls.current = cls()
            return cls.current

    @classmethod
    def stop(cls) -> None:
        with cls.lock:
            fork_server, cls.current = cls.current, None
            if fork_server is None:
                return
            if fork_server.owner_pid == os.getpid():
                fork_server.end()
            else:  # this is a fork: the process belongs to its parent
                fork_server.control.close()
                fork_server.process.returncode = 0  # nothing for this process to wait for

    def end(self) -> None:
        self.control.close()
        try:
            self.process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> bool:
        """False if the fork server is gone or does not listen."""
        try:
            with self.lock:
                socket.send_fds(self.control, [json.dumps(message).encode()], fds or [])
            return True
        except OSError:
            return False


atexit.register(ForkServer.stop)


class Ranks:
    """`n` started ranks, with the folder that holds their store, calls and results."""

    def __init__(self, n: int, group_timeout_s: float, num_threads: int, env: Mapping[str, str] | None) -> None:
        if n < 1:
            raise ValueError(f"n: expected at least 1 rank, got {n}")
        if rank_main.importing_main:
            raise RuntimeError(
                "ranks were started while a rank was still importing the main script\n"
                '  Put the code that starts them under: if __name__ == "__main__":'
            )
        self.size = n
        self.pids: list[int | None] = [None] * n
        self.exit_codes: list[int | None] = [None] * n
        self.calls = 0
        self.fork_server = ForkServer.get()
        self.folder = Path(tempfile.mkdtemp(prefix="unisono-ranks-"))
        self.channels: list[socket.socket] = []
        setting = {
            "size": n,
            "folder": os.getcwd(),
            "path": sys.path,
            "argv": sys.argv,
            "env": {**os.environ, **(env or {})},
            "main": _describe_main(),
            "files": str(self.folder),
            "group_timeout_s": group_timeout_s,
            "num_threads": num_threads,
        }
        (self.folder / "setting.json").write_text(json.dumps(setting), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for rank in range(n):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.channels.append(ours)
                start = {"rank": rank, "setting": str(self.folder / "setting.json")}
                with theirs:
                    if not self.fork_server.send(start, [theirs.fileno(), 1, 2]):
                        raise RuntimeError("the process that ranks are forked from is gone")
        except BaseException:
            self.close()
            raise

    def call(self, call: bytes, timeout_s: float, grace_s: float, *, last: bool, own_group: bool) -> list[Any]:
        """Results by rank, a RankFailure for each that failed; every rank has answered or was killed."""
        deadline = time.monotonic() + timeout_s
        self.calls += 1
        number = self.calls
        call_path = self.folder / f"call-{number}"
        call_path.write_bytes(call)
        order = json.dumps({"call": number, "last": last, "own_group": own_group}).encode()
        for channel in self.channels:
            with contextlib.suppress(OSError):  # a dead rank is reported below
                channel.send(order, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

        results: dict[int, Any] = {}
        reason = f"still running at the deadline, {timeout_s:g} s after the start"
        failed = False
        while len(results) < self.size:
            for rank, note in self._receive(set(range(self.size)) - set(results), deadline - time.monotonic()):
                if note.get("done") == number:
                    results[rank] = self._read_result(rank, number)
                elif "exit_code" in note:
                    results[rank] = self.describe_end(rank, "before it answered")
                if isinstance(results.get(rank), RankFailure) and not failed:
                    failed = True
                    if time.monotonic() + grace_s < deadline:
                        deadline = time.monotonic() + grace_s
                        reason = f"still running {grace_s:g} s after rank {rank} had failed"
            if time.monotonic() >= deadline:
                break
        late = [rank for rank in range(self.size) if rank not in results]
        if late:
            stopped = [rank for rank in late if _is_stopped(self.pids[rank])]
            stacks = self._ask_for_stacks([rank for rank in late if rank not in stopped])
            self._kill(late)
            for rank in late:
                why = f"stopped (SIGSTOP), {reason}" if rank in stopped else reason
                results[rank] = RankFailure(rank, self.pids[rank], why, stacks.get(rank, ""))
        call_path.unlink()
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End all ranks, the idle ones by telling them, and remove the folder."""
        for channel in self.channels:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_WR)
        try:
            self._kill(self._wait_for_ends(list(range(len(self.channels))), 3.0))
        finally:
            for channel in self.channels:
                channel.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def any_ended(self) -> bool:
        self._wait_for_ends(list(range(self.size)), 0.0)
        return any(code is not None for code in self.exit_codes)

    def describe_end(self, rank: int, when: str) -> RankFailure:
        code = self.exit_codes[rank]
        pid, stacks = self.pids[rank], self._read_stacks(rank)
        if code is None:
            return RankFailure(rank, pid, f"did not end {when}", stacks)
        if code >= 0:
            return RankFailure(rank, pid, f"ended with exit code {code} {when}", stacks, exit_code=code)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "unknown"
        return RankFailure(rank, pid, f"died by signal {-code} ({name}) {when}", stacks, signal=-code)

    def _receive(self, ranks: set[int], timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """The notes that arrived on the channels of `ranks`, after waiting for the first one."""
        poll = select.poll()
        by_fd = {self.channels[rank].fileno(): rank for rank in ranks if self.exit_codes[rank] is None}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        notes: list[tuple[int, dict[str, Any]]] = [
            (rank, {"exit_code": self.exit_codes[rank]}) for rank in ranks if self.exit_codes[rank] is not None
        ]
        if notes:
            return notes
        for fd, _ in poll.poll(max(0, math.ceil(timeout_s * 1000))):
            rank = by_fd[fd]
            try:
                data = self.channels[rank].recv(4096)
            except OSError:
                data = b""
            # An end of file without a word about the end: the fork server died, and the rank with it.
            note: dict[str, Any] = json.loads(data) if data else {"exit_code": -signal.SIGKILL}
            self.pids[rank] = note.get("pid", self.pids[rank])
            self.exit_codes[rank] = note.get("exit_code")
            notes.append((rank, note))
        return notes

    def _read_result(self, rank: int, number: int) -> Any:
        path = self.folder / f"result-{number}-{rank}"
        pid = self.pids[rank]
        try:
            kind, *fields = pickle.loads(path.read_bytes())
        except Exception:
            return RankFailure(rank, pid, "its result cannot be read back", traceback.format_exc())
        finally:
            path.unlink(missing_ok=True)
        if kind == "result":
            return fields[0]
        error, text = fields
        return RankFailure(rank, pid, f"raised {error}", text, error=error)

    def _ask_for_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where these ranks stand now; empty for one that does not answer."""
        for rank in ranks:
            self._signal(rank, STACK_SIGNAL)
        end = time.monotonic() + 2.0
        while time.monotonic() < end and not all(self._read_stacks(rank) for rank in ranks):
            time.sleep(0.02)
        time.sleep(0.05)  # for the rest of what is being written
        return {rank: self._read_stacks(rank) for rank in ranks}

    def _read_stacks(self, rank: int) -> str:
        try:
            return (self.folder / f"stacks-{rank}").read_text(errors="replace")
        except OSError:
            return ""

    def _signal(self, rank: int, number: int) -> None:
        if self.pids[rank] is not None and self.exit_codes[rank] is None:
            self.fork_server.send({"pid": self.pids[rank], "signal": number})

    def _wait_for_ends(self, ranks: list[int], timeout_s: float) -> list[int]:
        """Those of `ranks` that have not ended within the time."""
        end = time.monotonic() + timeout_s
        left = {rank for rank in ranks if self.exit_codes[rank] is None}
        while left and (self._receive(left, end - time.monotonic()) or time.monotonic() < end):
            left = {rank for rank in left if self.exit_codes[rank] is None}
        return sorted(left)

    def _kill(self, ranks: list[int]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not ranks:
                return
            for rank in ranks:
                self._signal(rank, number)
            ranks = self._wait_for_ends(ranks, _KILL_S)
        if ranks:  # the fork server itself does not answer; its ranks die with it
            self.fork_server.process.kill()
            self._wait_for_ends(ranks, _KILL_S)


def _is_stopped(pid: int | None) -> bool:
    try:
        # After the name, which is in parentheses and may hold anything, comes the state.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _describe_main() -> dict[str, str]:
    """How a rank can import the main script, should the call need something from it."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"module": name}
    path = getattr(main, "__file__", None)
    return {} if path is None else {"path": os.path.abspath(path)}
