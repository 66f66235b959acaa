"""Jobs of a few ranks as plain scripts, with settings of their own, that say where they are and wait to be told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

LIMIT_S = 200.0  # of one command: beside 15 busy programs per core, torch alone took over 90 s to import

_HEAD = """
import os, sys, time, torch, unisono
from torch.distributed import FileStore
rank, size = int(sys.argv[1]), int(sys.argv[2])
group = unisono.Group.from_store(FileStore(sys.argv[3], size), rank, size, timeout_s=float(sys.argv[4]))
def say(word):
    print(word, flush=True)
def hear():
    assert sys.stdin.readline(), "the test is over"
"""


class Job:
    """Ranks that run one script; a context manager that leaves none of them behind.

    Their calls outlast the test that looks at them: on a busy machine a command takes a minute to begin.
    """

    def __init__(self, folder: Path, size: int, body: str, timeout_s: float = 600.0, **settings: str) -> None:
        script = folder / "job.py"
        script.write_text(_HEAD + textwrap.dedent(body))
        store = folder / f"store-{time.monotonic_ns()}"
        self.folder = folder
        words = [str(size), str(store), str(timeout_s)]
        self.processes = [self._start(folder, [str(script), str(rank), *words], rank, settings) for rank in range(size)]

    @staticmethod
    def _start(folder: Path, words: list[str], rank: int, settings: dict[str, str]) -> subprocess.Popen[str]:
        with (folder / f"stderr-{rank}").open("w") as stderr:
            return subprocess.Popen(
                [sys.executable, *words],
                env={**os.environ, **settings},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def expect(self, rank: int, word: str) -> str:
        """The rest of the next line, which must begin with the word."""
        stream = self.processes[rank].stdout
        assert stream is not None
        line = stream.readline()
        assert line.startswith(word), f"rank {rank} said {line!r}: {(self.folder / f'stderr-{rank}').read_text()}"
        return line[len(word) :].strip()

    def tell(self, rank: int) -> None:
        stream = self.processes[rank].stdin
        assert stream is not None
        stream.write("go\n")
        stream.flush()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.communicate()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs the `unisono` command."""
    return subprocess.run(
        [sys.executable, "-m", "unisono.cli", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def wait_for(what, limit_s: float = 30.0):
    """What the function gives, as soon as that is something."""
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return found
