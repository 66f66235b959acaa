"""torchrun --max-restarts: a rank crashes, and the next round starts clean and soon."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
import unisono

folder, how = sys.argv[1:]
rank, turn = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
began = time.monotonic()
if how == "dist":
    dist.init_process_group("unisono")
    group = dist.group.WORLD.unisono_group
else:
    group = unisono.Group.from_env()
joined = time.monotonic()
t = unisono.zeros(1 << 22)
t += 1
group.all_reduce(t)
assert t.min() == t.max() == group.size
with open(f"{folder}/{turn}.{rank}.part", "w") as file:
    json.dump({"pid": os.getpid(), "agent": os.getppid(), "joining_s": joined - began, "at": time.monotonic()}, file)
os.rename(f"{folder}/{turn}.{rank}.part", f"{folder}/{turn}.{rank}")
group.barrier()
if turn < 2 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if turn < 2:
    group.all_reduce(t)  # PeerLostError ends this rank too
if turn == 2:
    left = [pid for r in range(2) for past in range(2)
            if os.path.exists(f"/proc/{(pid := json.load(open(f'{folder}/{past}.{r}'))['pid'])}")]
    agent = os.getppid()
    links = []
    for fd in os.listdir(f"/proc/{agent}/fd"):
        try:
            links.append(os.readlink(f"/proc/{agent}/fd/{fd}"))
        except OSError:
            pass
    words = f"round 2 done, left: {left} {[l for l in links if 'memfd:unisono' in l]}\\n"
    os.write(1, words.encode())  # in one piece: both ranks write
if how == "dist":
    dist.destroy_process_group()
else:
    group.close()
"""


@pytest.mark.parametrize("how", ["dist", pytest.param("group", marks=pytest.mark.slow)])
def test_the_next_round_is_clean(how, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2",
         "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
         str(script), str(tmp_path), how],
        capture_output=True, text=True, timeout=115, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("round 2 done, left: [] []") == 2, done.stdout
    rounds = [[json.loads((tmp_path / f"{turn}.{rank}").read_text()) for rank in range(2)] for turn in range(3)]
    for turn in (1, 2):
        joining = max(facts["joining_s"] for facts in rounds[turn])
        took = rounds[turn][0]["at"] - rounds[turn - 1][0]["at"]
        print(f"round {turn}: joined in {joining:.3f} s, {took:.1f} s after the last")
        assert joining < 20.0  # the others' rest would cost a deadline of minutes
    assert set(os.listdir("/dev/shm")) <= before
