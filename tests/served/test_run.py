"""`unisono run`: programs written for gloo, as they are, under torchrun's options and by themselves."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("program.py")
ROOT = PROGRAM.parents[2]


def run(*command, limit_s=100, **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        env.pop(name, None)
    return subprocess.run(
        [sys.executable, *map(str, command)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=limit_s
    )


def told(done):
    """What the program printed, by rank."""
    assert done.returncode == 0, done.stderr[-4000:]
    lines = dict(re.findall(r"^rank (\d) (\{.*\})$", done.stdout, re.M))
    assert sorted(lines) == ["0", "1"], done.stdout + done.stderr[-2000:]
    return [json.loads(lines[rank]) for rank in sorted(lines)]


def ours(done, kind="ServedGroup"):
    ranks = told(done)
    for line in ranks:
        assert line["world"] == kind and set(line["groups"].values()) == {kind}, line
        assert line["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert line["gradient"] == ranks[0]["gradient"] and line["behind"] == [0.0] * 5
    return ranks


TORCHRUN = ("--standalone", "--nproc-per-node", "2")


def test_as_torchrun(tmp_path):
    done = run("-m", "unisono", "run", *TORCHRUN, PROGRAM, UNISONO_LOG="info")
    found = ours(done)
    said = [line for line in done.stderr.splitlines() if line.startswith("unisono: ")]
    assert sum('"gloo" is unisono in this program' in line for line in said) == 1, said
    # The same program on gloo itself, by the same command: the same numbers.
    theirs = told(run("-m", "unisono", "run", "--no-gloo", *TORCHRUN, PROGRAM))
    assert theirs[0]["groups"]["gloo"] == "ProcessGroup" and theirs[0]["groups"]["options"] == "ProcessGroupGloo"
    assert [line["gradient"] for line in found] == [line["gradient"] for line in theirs]


def test_a_program_that_spawns_its_ranks(tmp_path):
    ours(run("-m", "unisono", "run", PROGRAM, MEETING_FILE=str(tmp_path / "meet")))


def test_as_a_module_with_its_own_arguments(tmp_path):
    (tmp_path / "said.py").write_text(
        "import os, sys, torch.distributed as dist\n"
        'print(sys.argv[1:], os.environ.get("UNISONO_SHARE"), os.environ["UNISONO_GLOO"], dist.ProcessGroupGloo)\n'
    )
    done = run("-m", "unisono", "run", "--share", "-m", "said", "--share", "-m", "x", PYTHONPATH=str(tmp_path))
    assert done.stdout.startswith("['--share', '-m', 'x'] 1 1 <class 'torch.distributed.distributed_c10d."), done


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("--help",), "--nproc-per-node"),
        (("--help",), "--no-gloo"),
        ((), "training_script"),
    ],
)
def test_help_and_mistakes(command, words):
    done = run("-m", "unisono", "run", *command)
    assert words in done.stdout + done.stderr and (done.returncode == 0) == bool(command)


def test_torch_must_load_plugins():
    done = run("-m", "unisono", "run", "x.py", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 2 and "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading unisono" in done.stderr


def test_the_exit_code_is_the_programs(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(7)\n")
    assert run("-m", "unisono", "run", tmp_path / "fails.py").returncode == 7
    assert run("-m", "unisono", "run", *TORCHRUN, tmp_path / "fails.py").returncode == 1


WITHOUT_A_HEAP = """
import os, resource
import torch, torch.distributed as dist
if os.environ["RANK"] in os.environ["REFUSED"].split(","):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # the system refuses this rank a heap, as a container may
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
part = dist.new_group([1, 0], backend="gloo")
dist.all_reduce(total, group=part)
dist.monitored_barrier()
kinds = [type(group).__name__ for group in (dist.group.WORLD, part)]
print(f"{dist.get_rank()} {total.item()} {' '.join(kinds)} {dist.get_backend()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("refused", ["1", "none", *(pytest.param(r, marks=pytest.mark.slow) for r in ("0", "0,1"))])
def test_gloo_for_all_ranks_if_one_cannot_join(tmp_path, refused):
    """Both groups are gloo's on both ranks, whoever could not join; and at once, not after the time limit."""
    (tmp_path / "program.py").write_text(WITHOUT_A_HEAP)
    done = run("-m", "unisono", "run", *TORCHRUN, tmp_path / "program.py", REFUSED=refused)
    assert done.returncode == 0, done.stderr[-4000:]
    kind = "ServedGroup" if refused == "none" else "ProcessGroup"
    assert sorted(done.stdout.split("\n"))[-2:] == [f"{rank} 6.0 {kind} {kind} gloo" for rank in (0, 1)]
    said = [line for line in done.stderr.splitlines() if "is gloo's, since unisono cannot make it" in line]
    assert len(said) == (0 if refused == "none" else 2), done.stderr  # once for each group
    assert all(f"rank {refused[0]}: " in line for line in said)
