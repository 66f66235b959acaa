"""The example that loses a rank by SIGKILL and goes on with its shard."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "zero_that_survives.py"


@pytest.mark.parametrize(
    ("ranks", "kill"), [(3, 0), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)]
)
def test_training_goes_on(ranks, kill, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--ranks", str(ranks), "--kill", str(kill), "--at", "3", "--steps", "6"],
        capture_output=True, text=True, timeout=110, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"rank {kill} died" in done.stdout and f"{ranks - 1} ranks go on from step 2" in done.stdout, done.stdout
    assert "the same bits as a run that was never disturbed" in done.stdout
