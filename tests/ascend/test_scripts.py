"""Scripts written for Ascend run as they stand, started by torchrun or with ranks of their own."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy
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
