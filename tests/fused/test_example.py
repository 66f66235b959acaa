"""The example runs under torchrun on two ranks, and the bench runs."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_moe_feed_forward():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--local-addr=127.0.0.1", str(ROOT / "examples" / "moe_feed_forward.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout


def test_bench_runs():
    command = [sys.executable, "-m", "unisono.bench.fused", "--json", "--rows", "2", "--dtype", "float16"]
    command += ["--groups", "2", "--k", "32", "--n", "48", "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["rows"] == 2 and set(row["ms"]) == {"plain", "prepared", "knowing", "sgemm", "torch"}
    assert all(ms > 0 for ms in row["ms"].values())
