"""Runs torch's own DistributedTest, which is inside the wheel, against one backend, each test under a time limit.

How a foreign name gets through a suite written for torch's backends: its skip decorators look at $BACKEND when the
module is imported, so it is imported once as "gloo" and once as "mpi" (whose selection has the all_to_all tests on
CPU); afterwards the module's BACKEND is the real name, which is what the tests hand to init_process_group. Every test
runs in a forked supervisor with a session of its own, which forks the ranks; on a time-out the session is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unisono.testing.fork_server import enter_place
from unisono.testing.hosts import INTERFACE, Hosts

SUITE = "torch.testing._internal.distributed.distributed_test"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONFAULTHANDLER": "1",
}
# Decided on the backend's name alone, by torch or by the test itself.
BLOCKED = ("monitored_barrier is only implemented for GLOO backend", "!= 'gloo'", "Expected gloo, got")


class Alias(str):
    """The backend's name, equal also to the name whose tests run: some test bodies branch on BACKEND == "gloo"."""

    alias: str

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self.alias

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.alias)


def run(
    backend: str, world_size: int, matches: Callable[[str], bool], limit_s: float, hosts: int = 1
) -> Iterator[dict[str, Any]]:
    """Runs the tests one by one; yields a record of each: test, status, seconds, reason, error.

    With several hosts, network namespaces, the ranks fill one after the other.
    """
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        namespaces: list[str] = []
        if hosts > 1:
            made = ending.enter_context(Hosts(hosts))
            os.environ.update(GLOO_SOCKET_IFNAME=INTERFACE, TP_SOCKET_IFNAME=INTERFACE, MASTER_ADDR=made.address(0))
            namespaces = [made.namespace(rank * hosts // world_size) for rank in range(world_size)]
        os.environ.update(WORLD_SIZE=str(world_size), TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/init")
        (Path(folder) / "barrier").mkdir()
        tests, skipped = _load(backend)
        _fork_ranks(backend, limit_s, namespaces)
        for name, why in skipped.items():
            yield {"test": name, "status": "skip", "reason": why, "seconds": 0.0}
        for name in sorted(tests):
            if matches(name):
                yield _run_one(backend, tests[name], name, folder, limit_s)


def _load(backend: str) -> tuple[dict[str, type[unittest.TestCase]], dict[str, str]]:
    _stand_in_for_expecttest()
    tests: dict[str, type[unittest.TestCase]] = {}
    skipped: dict[str, str] = {}
    for selection in ("gloo", "mpi"):
        os.environ["BACKEND"] = selection
        sys.modules.pop(SUITE, None)
        module = importlib.import_module(SUITE)
        base = module.DistributedTest._DistTestBase

        class TestDistBackend(module.TestDistBackend, base):  # type: ignore[misc, name-defined]
            suite = module

            def setUp(self) -> None:
                super().setUp()
                self._spawn_processes()

        for name in dir(base):
            if name.startswith("test_") and name not in tests:
                why = getattr(getattr(base, name), "__unittest_skip_why__", None)
                if why is None:
                    tests[name] = TestDistBackend
                    skipped.pop(name, None)
                else:
                    skipped[name] = why
        module.BACKEND = Alias(backend)
        module.BACKEND.alias = selection
    # From here on the suite reads $BACKEND only in skip_if_small_worldsize, which lets "mpi" go below 8 ranks.
    os.environ["BACKEND"] = "mpi"
    return tests, skipped


def _stand_in_for_expecttest() -> None:
    """torch.testing._internal imports the module expecttest, which these tests do not use."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        module = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = module


def _fork_ranks(backend: str, limit_s: float, namespaces: list[str]) -> None:
    """Has the suite fork its ranks, and has each enter its host and import the backend's package first."""
    from torch.testing._internal import common_distributed as suite

    context = multiprocessing.get_context("fork")

    def rank_main(target: Callable[..., None], rank: int, *args: Any, **kwargs: Any) -> None:
        if namespaces:
            enter_place(namespaces[rank], {})
        if backend == "unisono":
            importlib.import_module("unisono")
        target(rank, *args, **kwargs)

    def process(target: Any = None, name: Any = None, args: Any = (), kwargs: Any = None, daemon: Any = None) -> Any:
        return context.Process(target=rank_main, name=name, args=(target, *args), kwargs=kwargs or {}, daemon=daemon)

    check = suite.MultiProcessTestCase._check_return_codes

    def check_all(self: Any, fn: Any, elapsed: float) -> None:
        check(self, fn, elapsed)  # looks at rank 0 only
        if fn in self.skip_return_code_checks or fn in self.special_return_code_checks:
            return
        killed = {rank: p.exitcode for rank, p in enumerate(self.processes) if p.exitcode and p.exitcode < 0}
        if killed:
            raise RuntimeError(f"ranks ended by a signal: {killed}")

    suite.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(process)
    suite.MultiProcessTestCase._check_return_codes = check_all
    suite.TIMEOUT_DEFAULT = max(5, int(limit_s) - 8)
    for name in list(suite.TIMEOUT_OVERRIDE):
        suite.TIMEOUT_OVERRIDE[name] = suite.TIMEOUT_DEFAULT


def _run_one(backend: str, case: type[unittest.TestCase], name: str, folder: str, limit_s: float) -> dict[str, Any]:
    answer = Path(folder) / "answer.json"
    answer.unlink(missing_ok=True)
    begin = time.monotonic()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _supervise(backend, case, name, answer)  # does not return
    late = False
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > begin + limit_s:
            late = True
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.02)
    for left in _session_members(pid):
        os.kill(left, signal.SIGKILL)
    outcome: dict[str, Any] = {"status": "crash", "reason": "the supervisor died"}
    if late:
        outcome = {"status": "timeout", "reason": f"no end within {limit_s:g} s"}
    elif answer.exists():
        outcome = json.loads(answer.read_text())
    return {"test": name, **outcome, "seconds": round(time.monotonic() - begin, 2)}


def _supervise(backend: str, case: Any, name: str, answer: Path) -> None:
    """In the supervisor: runs one test and leaves its outcome as JSON."""
    os.setsid()
    log = os.open(answer.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        os.chdir(answer.parent)
        sys.modules[SUITE] = case.suite  # pickle looks classes up by the module's name
        result = unittest.TestResult()
        unittest.TestSuite([case(name)]).run(result)
        faults = [text for _, text in result.errors + result.failures]
        if faults:
            named = backend != "gloo" and any(words in faults[0] for words in BLOCKED)
            outcome = {"status": "blocked" if named else "fail", "reason": _last_error(faults[0]), "error": faults[0]}
        elif result.skipped:
            outcome = {"status": "skip", "reason": str(result.skipped[0][1])}
        else:
            outcome = {"status": "pass"} if result.testsRun else {"status": "fail", "reason": "no test ran"}
    except BaseException:
        outcome = {"status": "crash", "reason": _last_error(traceback.format_exc())}
    answer.write_text(json.dumps(outcome))
    os._exit(0)


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"^[\w.]*(Error|Exception|Exit|Timeout)\b", line)]
    return (named or lines or [""])[-1][:200]


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, sid = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            except (OSError, ValueError):
                continue
            if int(sid) == session and state != "Z":
                members.append(int(entry.name))
    return members
