"""Every example is short, says what it shows, and runs; the notebook too."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
# Small sizes; what each prints when it worked. Those that are not here have tests of their own, named below.
RUNS = {
    "fsdp2_training.py": (["--width=32", "--layers=2", "--steps=4"], "ms per step"),
    "fsdp2_uneven.py": (["--width=64", "--hidden=129", "--words=33", "--layers=1", "--rounds=1"], "bytes are padding"),
    "tensor_parallel_block.py": (["--dtype=float32", "--width=128", "--tokens=4"], "tokens/s"),
    "uneven_all_gather.py": (["--rows=20", "--columns=8"], "the same 60 rows"),
}
ELSEWHERE = {
    "moe_feed_forward.py": "tests/fused/test_example.py",
    "moe_tokens.py": "tests/uneven/test_examples.py",
    "same_bits.py": "tests/fused/test_example.py",
    "two_hosts.py": "tests/testing/test_two_hosts_example.py",
    "zero_at_borders.py": "tests/uneven/test_examples.py",
    "zero_that_survives.py": "tests/faults/test_survivors_example.py",
}


def test_every_example_runs_in_the_tests():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*RUNS, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        assert name.removesuffix(".py") in (EXAMPLES.parent / test).read_text()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_it_is_short_and_says_what_it_shows(path):
    assert len(path.read_text().splitlines()) < 100
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name):
    arguments, expected = RUNS[name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


# In a process of its own, which nbclient may leave open files in; by Unix sockets, as nothing leaves the machine.
EXECUTE = """
import sys, nbformat, nbclient, jupyter_client
notebook = nbformat.read(sys.argv[1], as_version=4)
manager = jupyter_client.AsyncKernelManager(kernel_name="python3", transport="ipc")
nbclient.NotebookClient(notebook, km=manager, timeout=60).execute()
nbformat.write(notebook, sys.argv[2])
"""


def test_the_notebook_runs(tmp_path):
    pytest.importorskip("nbclient")
    executed = tmp_path / "executed.ipynb"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXECUTE, str(EXAMPLES / "notebook.ipynb"), str(executed)],
        capture_output=True, text=True, timeout=100, cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = json.loads(executed.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert "raised ValueError" in "".join("".join(output.get("text", [])) for output in outputs)
