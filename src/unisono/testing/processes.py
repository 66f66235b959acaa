"""The caller's side of `unisono.testing`: start ranks, send them calls, collect their answers.

Calls and results are files in a folder of the run, so a rank that reads nothing can block nobody; the channel
between a rank and its caller carries short notes only: `pid` and `exit_code` from the fork server (fork_server.py),
`done` from the rank itself (rank_main.py).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
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
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from unisono.base.processes import process_state
from unisono.testing import rank_main
from unisono.testing.fork_server import STACK_SIGNAL

_FORK_SERVER_START_S = 300.0  # importing torch from a cold disk
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
            command = [sys.executable, script, str(theirs.fileno()), json.dumps(list(map(str, sys.path)))]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.control.settimeout(_FORK_SERVER_START_S)
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
            current = cls.current
            if current is None or current.owner_pid != os.getpid() or current.process.poll() is not None:
                cls.stop()
                cls.current = current = cls()
            return current

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

    def send(self, message: dict[str, Any], *fds: int) -> bool:
        """False if the fork server is gone or does not listen."""
        try:
            with self.lock:
                socket.send_fds(self.control, [json.dumps(message).encode()], fds)
            return True
        except OSError:
            return False


atexit.register(ForkServer.stop)


class Rank:
    """One started rank: the channel to it, and what is known of it."""

    def __init__(self, number: int, folder: Path, fork_server: ForkServer) -> None:
        self.number = number
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.answered = 0  # the last call that it has answered
        self._folder = folder
        self._fork_server = fork_server
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = {"rank": number, "setting": str(folder / "setting.json")}
        with theirs:
            if not fork_server.send(start, theirs.fileno(), 1, 2):
                self.channel.close()
                raise RuntimeError("the process that ranks are forked from is gone")

    def read_note(self) -> None:
        """Learns from a note that has arrived on the channel."""
        try:
            data = self.channel.recv(4096)
        except OSError:
            data = b""
        # An end of file without a word about the end: the fork server died, and the rank with it.
        note: dict[str, Any] = json.loads(data) if data else {"exit_code": -signal.SIGKILL}
        self.pid = note.get("pid", self.pid)
        self.answered = note.get("done", self.answered)
        self.exit_code = note.get("exit_code")

    def read_result(self) -> Any:
        """What the last call returned, or how it failed."""
        path = self._folder / f"result-{self.answered}-{self.number}"
        try:
            kind, *fields = pickle.loads(path.read_bytes())
        except Exception:
            return self.failure("its result cannot be read back", traceback.format_exc())
        finally:
            path.unlink(missing_ok=True)
        if kind == "result":
            return fields[0]
        error, text = fields
        return self.failure(f"raised {error}", text, error=error)

    def describe_end(self, when: str) -> RankFailure:
        code, stacks = self.exit_code, self.read_stacks()
        if code is None:
            return self.failure(f"did not end {when}", stacks)
        if code >= 0:
            return self.failure(f"ended with exit code {code} {when}", stacks, exit_code=code)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "unknown"
        return self.failure(f"died by signal {-code} ({name}) {when}", stacks, signal=-code)

    def failure(self, reason: str, traceback: str, **more: Any) -> RankFailure:
        return RankFailure(self.number, self.pid, reason, traceback, **more)

    def read_stacks(self) -> str:
        """What the rank has written of its stacks, by a crash or since it was asked."""
        try:
            return (self._folder / f"stacks-{self.number}").read_text(errors="replace")
        except OSError:
            return ""

    def signal(self, number: int) -> None:
        if self.pid is not None and self.exit_code is None:
            self._fork_server.send({"pid": self.pid, "signal": number})

    def is_stopped(self) -> bool:
        return self.pid is not None and process_state(self.pid) == "stopped"


class Ranks:
    """`n` started ranks, with the folder that holds their store, calls and results."""

    def __init__(
        self,
        n: int,
        group_timeout_s: float,
        num_threads: int,
        env: Mapping[str, str] | None,
        places: list[dict[str, Any]] | None = None,
    ) -> None:
        """With `places`, a network namespace and environment for each rank, the ranks get no group (hosts.py)."""
        if n < 1:
            raise ValueError(f"n: expected at least 1 rank, got {n}")
        if rank_main.importing_main:
            raise RuntimeError(
                "ranks were started while a rank was still importing the main script\n"
                '  Put the code that starts them under: if __name__ == "__main__":'
            )
        self.calls = 0
        self.ranks: list[Rank] = []
        self.fork_server = ForkServer.get()
        self.folder = Path(tempfile.mkdtemp(prefix="unisono-ranks-"))
        setting = {
            "size": n,
            "folder": os.getcwd(),
            "path": list(map(str, sys.path)),
            "argv": sys.argv,
            "env": {**os.environ, **(env or {})},
            "places": places,
            "main": _describe_main(),
            "files": str(self.folder),
            "group_timeout_s": group_timeout_s,
            "num_threads": num_threads,
        }
        (self.folder / "setting.json").write_text(json.dumps(setting), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for number in range(n):
                self.ranks.append(Rank(number, self.folder, self.fork_server))
        except BaseException:
            self.close()
            raise

    def call(self, call: bytes, timeout_s: float, grace_s: float, *, last: bool, own_group: bool) -> list[Any]:
        """Results by rank, a RankFailure for each that failed; every rank has answered or was killed."""
        deadline = time.monotonic() + timeout_s
        self.calls += 1
        call_path = self.folder / f"call-{self.calls}"
        call_path.write_bytes(call)
        order = json.dumps({"call": self.calls, "last": last, "own_group": own_group}).encode()
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # a dead rank is reported below
                rank.channel.send(order, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

        results: dict[int, Any] = {}
        reason = f"still running at the deadline, {timeout_s:g} s after the start"
        waiting = self.ranks
        while True:
            for rank in waiting:
                if rank.answered == self.calls:
                    result = rank.read_result()
                elif rank.exit_code is not None:
                    result = rank.describe_end("before it answered")
                else:
                    continue
                results[rank.number] = result
                # The first failure counts: later ones would only move the deadline back.
                if isinstance(result, RankFailure) and time.monotonic() + grace_s < deadline:
                    deadline = time.monotonic() + grace_s
                    reason = f"still running {grace_s:g} s after rank {rank.number} had failed"
            waiting = [rank for rank in waiting if rank.number not in results]
            if not waiting or not _read_notes(waiting, deadline - time.monotonic()):
                break
        if waiting:
            stopped = [rank for rank in waiting if rank.is_stopped()]
            _ask_for_stacks([rank for rank in waiting if rank not in stopped])
            self._kill(waiting)
            for rank in waiting:
                why = f"stopped (SIGSTOP), {reason}" if rank in stopped else reason
                results[rank.number] = rank.failure(why, rank.read_stacks())
        call_path.unlink()
        return [results[rank.number] for rank in self.ranks]

    def close(self) -> None:
        """End all ranks, the idle ones by telling them, and remove the folder."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.channel.shutdown(socket.SHUT_WR)
        try:
            self._kill(_wait_for_ends(self.ranks, 3.0))
        finally:
            for rank in self.ranks:
                rank.channel.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def any_ended(self) -> bool:
        return len(_wait_for_ends(self.ranks, 0.0)) < len(self.ranks)

    def _kill(self, ranks: list[Rank]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in ranks:
                rank.signal(number)
            ranks = _wait_for_ends(ranks, _KILL_S)
        if ranks:  # the fork server itself does not answer; its ranks die with it
            self.fork_server.process.kill()
            _wait_for_ends(ranks, _KILL_S)


def _read_notes(ranks: list[Rank], timeout_s: float) -> bool:
    """Waits for notes of ranks that have not ended, and reads them; False if none came in time."""
    by_channel = {rank.channel: rank for rank in ranks}
    arrived = wait(list(by_channel), max(0.0, timeout_s))
    for channel in arrived:
        by_channel[channel].read_note()  # type: ignore[index]
    return bool(arrived)


def _wait_for_ends(ranks: list[Rank], timeout_s: float) -> list[Rank]:
    """Those of `ranks` that have not ended within the time."""
    end = time.monotonic() + timeout_s
    while left := [rank for rank in ranks if rank.exit_code is None]:
        if not _read_notes(left, end - time.monotonic()):
            break
    return left


def _ask_for_stacks(ranks: list[Rank]) -> None:
    """Has these ranks write where they stand; one that does not answer writes nothing."""
    for rank in ranks:
        rank.signal(STACK_SIGNAL)
    end = time.monotonic() + 2.0
    while time.monotonic() < end and not all(rank.read_stacks() for rank in ranks):
        time.sleep(0.02)
    time.sleep(0.05)  # for the rest of what is being written


def _describe_main() -> dict[str, str]:
    """How a rank can import the main script, should the call need something from it."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {"module": name}
    path = getattr(main, "__file__", None)
    return {} if path is None else {"path": os.path.abspath(path)}
