"""Fresh ranks for one fault test: started, listened to, killed by pid, and all gone at the end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.faults import scenarios

LIMIT_S = 45.0  # for one event; nothing here takes that long unless it hangs

# A server with torch imported forks the ranks, so that starting one costs milliseconds.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["pytest", "torch.distributed", "tests.faults.scenarios"])


class FreshRanks:
    """`size` ranks that run one body of scenarios.py; use as a context manager."""

    def __init__(self, size: int, folder: Path, body: str, **options: Any) -> None:
        self.size = size
        self.pipes, self.processes = [], []
        self._heard: list[list[dict[str, Any]]] = [[] for _ in range(size)]
        path = str(folder / f"store-{time.monotonic_ns()}")
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, path, theirs, body, options)
            process = context.Process(target=scenarios.main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def expect(self, rank: int, *events: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The next event with one of these names; fails with what the rank said instead of it."""
        deadline = time.monotonic() + limit_s
        while True:
            for index, heard in enumerate(self._heard[rank]):
                if heard["event"] in events:
                    del self._heard[rank][: index + 1]
                    return heard
            left = deadline - time.monotonic()
            if left <= 0 or not self.pipes[rank].poll(left):
                raise AssertionError(f"rank {rank}: no {events} within {limit_s} s; heard {self._heard[rank]}")
            try:
                self._heard[rank].append(self.pipes[rank].recv())
            except EOFError:
                code = self.processes[rank].exitcode
                raise AssertionError(
                    f"rank {rank} ended (exit code {code}) without {events}; heard {self._heard[rank]}"
                ) from None

    def expect_all(self, event: str, ranks: Iterable[int] | None = None) -> list[dict[str, Any]]:
        return [self.expect(rank, event) for rank in (range(self.size) if ranks is None else ranks)]

    def say(self, ranks: Iterable[int], word: Any = "go") -> None:
        for rank in ranks:
            self.pipes[rank].send(word)

    def signal(self, ranks: Iterable[int], number: int = signal.SIGKILL) -> float:
        """Send the signal to these ranks; the time just before."""
        at = time.monotonic()
        for rank in ranks:
            os.kill(self.pid(rank), number)
        return at

    def wait_until_blocked(self, rank: int, settle_s: float = 0.15) -> None:
        """Give a rank that said it is about to call the time to be inside.

        Where it is exactly does not matter for the outcome: each test holds at any moment.
        """
        time.sleep(settle_s)
        assert self.processes[rank].is_alive(), f"rank {rank} ended with {self.processes[rank].exitcode}"

    def join(self, ranks: Iterable[int], limit_s: float = 10.0) -> list[int | None]:
        """Exit codes; None for one that has not ended."""
        deadline = time.monotonic() + limit_s
        for rank in (ranks := list(ranks)):
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        return [self.processes[rank].exitcode for rank in ranks]

    def __enter__(self) -> FreshRanks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.processes:
            if process.is_alive():
                for number in (signal.SIGCONT, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)
            process.join(10.0)
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.close()


def finish(ranks: FreshRanks, members: list[int], live_on: bool = False) -> None:
    """The rest of every member's life: close in time, nothing left, a second group if asked, exit code 0."""
    for rank in members:
        closed = ranks.expect(rank, "closed")
        assert closed["took_s"] < scenarios.CLOSE_S, f"rank {rank}: close took {closed['took_s']:.3f} s"
    for rank in members:
        left = ranks.expect(rank, "left")
        assert not left["growth"], f"rank {rank} left behind: {left['growth']}"
        assert left["heap"] == [5.0], f"rank {rank}: its own heap tensor holds {left['heap']}"
    ranks.say(members, members if live_on else "end")
    if live_on:
        for rank in members:
            numbers = ranks.expect(rank, "second group")["numbers"]
            assert numbers == [float(len(members))], f"rank {rank}: second group gave {numbers}"
    assert ranks.join(members) == [0] * len(members)
