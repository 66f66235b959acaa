"""The examples run under torchrun, on our backend and on another."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


MOE = ("moe_tokens.py", ["--tokens", "300", "--width", "16", "--repeats", "1"], "true counts")
ZERO = ("zero_at_borders.py", ["--width", "16", "--steps", "3"], "of the memory")


@pytest.mark.parametrize(
    "name, options, line, backend, ranks",
    [
        (*MOE, "unisono", 3),
        (*ZERO, "unisono", 2),
        (*MOE, "gloo", 2),
        pytest.param(*ZERO, "gloo", 3, marks=pytest.mark.slow),
    ],
)
def test_example(name, options, line, backend, ranks, tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", "-m", "torch.distributed.run"]
    command += [f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(EXAMPLES / name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--backend", backend, *options],
        capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks on {backend}" in done.stdout and line in done.stdout
