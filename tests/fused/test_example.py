"""The example runs under torchrun on two ranks, and the bench runs."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_moe_feed_forward():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--local-addr=127.0.0.1", str(ROOT / "examples" / "moe_feed_forward.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tokens, dtype", [(6, "float32"), pytest.param(200, "bfloat16", marks=pytest.mark.slow)])
def test_same_bits(tokens, dtype):
    """1, 2, 4 and 8 ranks: the same logits in the tree order; in the default order others, in 16 bit after a while."""
    command = [sys.executable, str(ROOT / "examples" / "same_bits.py"), str(tokens), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    digests = {(line[1], int(line[3])): line[-1] for line in lines}
    assert len(digests) == 8
    assert len({digests["tree", size] for size in (1, 2, 4, 8)}) == 1
    assert len({digests["None", size] for size in (1, 2, 4, 8)}) > 1


def test_bench_runs():
    command = [sys.executable, "-m", "unisono.bench.fused", "--json", "--rows", "2", "--dtype", "float16"]
    command += ["--groups", "2", "--k", "128", "--n", "48", "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["rows"] == 2 and set(row["ms"]) == {"plain", "prepared", "tree", "knowing", "sgemm", "torch"}
    assert all(ms > 0 for ms in row["ms"].values())
