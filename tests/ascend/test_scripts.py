"""Scripts written for Ascend run as they stand, started by torchrun or with ranks of their own."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy
import pytest
import torch

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
LINE = "unisono.ascend: 8 npu devices and hccl on the CPU; stand-ins for torch_npu, mindspeed, mindspore"


def start(*command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning:__main__"}
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_ranks_of_torchrun(tmp_path):
    torchrun = (
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    )
    done = start(*torchrun, "-m", "unisono.ascend", SCRIPTS / "uneven.py", tmp_path, "--more", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == 1
    totals = [[2 * v + 10 for v in row] for row in ([0, 1], [2, 3], [4, 5], [6, 7])]
    for rank, part in enumerate((totals[:3], totals[3:])):
        assert json.loads((tmp_path / f"rank_{rank}.json").read_text()) == {
            "device": f"npu:{rank}",
            "part": part,
            "gathered": totals,
            "argv": [str(tmp_path), "--more"],
            "name": "__main__",
        }


def test_started_without_ranks(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    done = start("unisono.ascend", SCRIPTS / "uneven.py", tmp_path, folder=tmp_path)
    assert done.returncode != 0
    assert f"start the ranks by `torchrun --nproc-per-node=2 -m unisono.ascend {SCRIPTS / 'uneven.py'}`" in done.stderr


def test_ranks_of_its_own(tmp_path):
    done = start("unisono.ascend", SCRIPTS / "grouped.py", free_port(), tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == 1  # not from the ranks
    shapes = (16, 8), (24, 24)
    for i, shape in enumerate(shapes):
        written = numpy.fromfile(tmp_path / f"y_{i}.bin", dtype=numpy.float16).reshape(shape)
        exact = sum(x.double() @ w.double() for x, w in (_matrices(rank)[i] for rank in range(2)))
        error = (torch.from_numpy(written).double() - exact).abs()
        assert bool((error <= exact.abs() * 2**-11 + 1e-4).all()), error.max()


def _matrices(rank):
    """As in scripts/grouped.py, which cannot be imported where there is no torch_npu."""
    generator = torch.Generator().manual_seed(rank)
    shapes = ((16, 32), (32, 8)), ((24, 16), (16, 24))
    return [[torch.randn(shape, generator=generator).half() for shape in pair] for pair in shapes]


REAL = """
import torch

torch.utils.rename_privateuse1_backend("npu")  # as the real one does when torch loads it
REAL = True


def autoload():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
def test_a_real_torch_npu_that_torch_loads(force, tmp_path, monkeypatch):
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(REAL)
    facts = tmp_path / "torch_npu-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:autoload\n")
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text("import torch_npu, sys; print(hasattr(torch_npu, 'REAL'), sys.argv[1:])\n")
    path = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    options = ["--force"] if force else []
    done = start("unisono.ascend", *options, script, "a", "--force", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{not force} ['a', '--force']"
    if force:
        assert done.stderr.strip() == LINE
    else:
        assert done.stderr.strip() == (
            "unisono.ascend: stand-ins for mindspore; left alone: torch_npu, mindspeed (--force to stand in for them)"
        )
