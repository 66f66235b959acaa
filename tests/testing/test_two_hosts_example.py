"""examples/two_hosts.sh: torchrun on two hosts made of network namespaces, and nothing left behind."""

import os
import pathlib
import subprocess
import sys

import pytest

from unisono.testing.hosts import why_not

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "examples" / "two_hosts.sh"

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def run(*args):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "RANKS": "2"}
    return subprocess.run([str(SCRIPT), *args], capture_output=True, text=True, timeout=110, env=env)


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()


def left_behind(before):
    return [name for name in namespaces() if name.startswith("unisono-") and name not in before]


def test_it_runs():
    before = namespaces()
    done = run()
    assert done.returncode == 0, done.stderr[-3000:]
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("host"))
    rows = [f"host {rank // 2}, rank {rank} of 4: {rank + 1} rows of 10, all right" for rank in range(4)]
    assert told == rows
    assert not left_behind(before)


def test_a_program_that_fails(tmp_path):
    before = namespaces()
    program = tmp_path / "fails.py"
    program.write_text("import sys\nsys.exit(3)\n")
    assert run(str(program)).returncode != 0
    assert not left_behind(before)
