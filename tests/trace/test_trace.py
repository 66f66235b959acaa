"""The flight recorder: what survivors write about the dead, what tools read out of stopped and busy processes."""

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import HashStore

import unisono
from tests.trace.jobs import Job, command, wait_for
from unisono import _core
from unisono.trace import records
from unisono.trace.report import groups_of, verdicts

DIES = """
for i in range(5):
    group.all_reduce(torch.ones(8))
if rank == size - 1:
    os.kill(os.getpid(), 9)
try:
    group.all_gather(torch.empty(6), torch.ones(rank + 1), counts=[1, 2, 3])  # the call of the survivors
except unisono.PeerLostError as error:
    say("lost " + str(error).splitlines()[0])
"""


def test_survivors_write_what_the_dead_rank_did_last(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    with Job(tmp_path, 3, DIES, UNISONO_TRACE_DIR=str(folder)) as job:
        for rank in (0, 1):
            assert "rank 2 died" in job.expect(rank, "lost ")
        files = wait_for(lambda: len(found := list(folder.glob("*.json"))) == 3 and found)
        assert {int(path.stem.rpartition("-")[2]) for path in files} == {job.pid(r) for r in range(3)}
    dead = next(r for r in records.read_folder(folder) if r["pid"] == job.pid(2))
    last = dead["operations"][-1]
    assert (last["op"], last["seq"], last["state"]) == ("all_reduce", 5, "done"), last
    assert last["site"].startswith("job.py:"), last
    (view,) = groups_of(records.read_folder(folder))
    assert "culprit" in verdicts(view)[2] and set(verdicts(view)) == {2}
    shown = command("trace", str(folder))
    assert shown.returncode == 0, shown.stderr
    line = next(text for text in shown.stdout.splitlines() if "rank 2   pid" in text)
    assert "has not called all_gather #6" in line and "last call all_reduce #5" in line, shown.stdout


COMPUTES = """
group.all_reduce(torch.ones(8))
say("inside")
if rank != 1:
    hear()  # rank 0 is busy with something else, rank 2 dies here
try:
    group.barrier()
except unisono.PeerLostError as error:
    say("lost " + str(error).splitlines()[0])
hear()
"""


def test_any_survivor_writes_what_the_dead_rank_did(tmp_path):
    """Rank 0 would be the first to write it, but the launcher ends it while it computes."""
    folder = tmp_path / "traces"
    folder.mkdir()
    with Job(tmp_path, 3, COMPUTES, UNISONO_TRACE_DIR=str(folder)) as job:
        for rank in range(3):
            job.expect(rank, "inside")
        os.kill(job.pid(2), signal.SIGKILL)
        job.expect(1, "lost ")
        os.kill(job.pid(0), signal.SIGKILL)
        written = {int(path.stem.rpartition("-")[2]) for path in folder.glob("*.json")}
        assert written == {job.pid(1), job.pid(2)}, f"{written}, pids {[job.pid(r) for r in range(3)]}"
        assert not list(folder.glob("*.part"))


INSIDE = """
group.all_reduce(torch.ones(8))
say("inside")
if rank == 1:
    hear()
try:
    group.all_reduce(torch.ones(3 << 20))  # too large for a request: everybody is needed to the end
except unisono.PeerLostError as error:
    say("lost " + str(error).splitlines()[0])
hear()
"""


@pytest.mark.timeout(600)  # six programs that import torch
def test_a_rank_killed_while_it_waits_is_the_culprit_and_is_read_in_its_peers_memory(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    with Job(tmp_path, 3, INSIDE, UNISONO_TRACE_DIR=str(folder)) as job:
        for rank in range(3):
            job.expect(rank, "inside")
        wait_for(lambda: records.read_process(job.pid(2))["waits"])
        job.processes[2].kill()
        job.tell(1)
        for rank in (0, 1):
            assert "rank 2 died" in job.expect(rank, "lost ")
        wait_for(lambda: len(list(folder.glob("*.json"))) == 3)
        (view,) = groups_of(records.read_folder(folder))
        assert set(verdicts(view)) == {2} and "culprit: died" in verdicts(view)[2], verdicts(view)
        # Out of the memory of a survivor, before and after the dead one's parent has asked for its end.
        for _ in range(2):
            shown = command("trace", "--pid", str(job.pid(0)))
            assert shown.returncode == 0, shown.stderr
            line = next(text for text in shown.stdout.splitlines() if "rank 2   pid" in text)
            assert f"pid {job.pid(2)}" in line and "all_reduce #2 at job.py:" in line, shown.stdout
            assert "culprit: its process is gone" in line and shown.stdout.count("culprit") == 1, shown.stdout
            job.processes[2].wait()
        shown = command("trace", "--pid", str(job.pid(2)))
        assert shown.returncode == 1 and "no process" in shown.stderr


UNSENT = """
say("inside")
if rank == 0:
    group.recv(torch.empty(4), 1)
hear()
"""


@pytest.mark.timeout(600)
def test_a_message_that_nobody_sends_has_a_culprit(tmp_path):
    with Job(tmp_path, 2, UNSENT) as job:
        for rank in range(2):
            job.expect(rank, "inside")
        wait_for(lambda: records.read_process(job.pid(0))["waits"])
        shown = command("trace", "--pid", str(job.pid(0))).stdout
        assert any("rank 1" in x and "culprit: has not sent to rank 0" in x for x in shown.splitlines()), shown


WAITS = """
group.all_reduce(torch.ones(8))
say("inside")
if rank == 1:
    hear()
group.barrier()  # rank 0 waits here
say("done")
"""


@pytest.mark.timeout(600)  # five programs that import torch, one after the other
def test_a_stopped_process_is_read_without_its_help(tmp_path):
    with Job(tmp_path, 2, WAITS) as job:
        for rank in range(2):
            job.expect(rank, "inside")
        os.kill(job.pid(1), signal.SIGSTOP)
        wait_for(lambda: records.read_process(job.pid(0))["waits"])
        shown = command("trace", "--pid", str(job.pid(0)))
        assert shown.returncode == 0, shown.stderr
        lines = shown.stdout.splitlines()
        assert any("rank 0" in x and "in barrier #2" in x and "waits for rank 1" in x for x in lines), shown.stdout
        assert any("rank 1" in x and "has not called barrier #2" in x and "culprit" in x for x in lines), shown.stdout
        # And as a live view.
        top = command("top", "--once", "--json")
        views = json.loads(top.stdout)["groups"]
        ours = [v for v in views if [r["pid"] for r in v["ranks"]] == [job.pid(0), job.pid(1)]]
        assert len(ours) == 1, f"{top.stdout} does not show {job.pid(0)} and {job.pid(1)}: {top.stderr}"
        view = ours[0]
        assert view["calls"] == 2 and view["bytes"] == 32, view
        assert view["ranks"][0]["waits"][0]["for_ranks"] == [1] and view["ranks"][0]["waits"][0]["waited_s"] > 0
        assert view["ranks"][1]["state"] == "stopped" and not view["ranks"][1]["waits"]
        assert "for rank 1 in barrier #2 at job.py:" in command("top", "--once").stdout
        os.kill(job.pid(1), signal.SIGCONT)
        job.tell(1)
        for rank in range(2):
            job.expect(rank, "done")


HOLDS = """
import ctypes
group.all_reduce(torch.ones(8))
say("inside")
ctypes.PyDLL(None).sleep(60)  # holds the GIL
"""


def test_a_signal_writes_the_record_while_the_gil_is_held(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    with Job(tmp_path, 1, HOLDS, UNISONO_TRACE_DIR=str(folder), UNISONO_TRACE_SIGNAL="USR2") as job:
        job.expect(0, "inside")
        os.kill(job.pid(0), signal.SIGUSR2)
        (path,) = wait_for(lambda: list(folder.glob("*.json")))
        record = json.loads(path.read_text())
        assert record["why"] == "signal" and record["operations"][-1]["op"] == "all_reduce"
        assert job.processes[0].poll() is None


def test_a_wrong_signal_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", "import unisono"],
        env={**os.environ, "UNISONO_TRACE_SIGNAL": "NOPE"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "UNISONO_TRACE_SIGNAL" in done.stderr


VERBS = """
parts = [1, 2, 3]
mine = torch.ones(parts[rank])
for i in range(2):
    group.all_reduce(torch.ones(8))
    group.all_gather(torch.empty(6), mine, counts=parts)
    group.reduce_scatter(torch.empty(parts[rank]), torch.ones(6), counts=parts)
    group.all_gather(torch.empty(6), torch.ones(2))
    group.gather(torch.empty(6) if rank == 0 else None, mine, 0, counts=parts if rank == 0 else None)
    group.scatter(torch.empty(parts[rank]), torch.ones(6) if rank == 1 else None, 1, counts=[None, parts, None][rank])
    group.all_to_all(torch.empty(6), torch.ones(6))
    group.broadcast(torch.ones(4), 2)
    group.reduce(torch.ones(4), 1)
    group.barrier()
half = group.split([0, 1] if rank < 2 else None)
if half is not None:
    half.all_reduce(torch.ones(2))
if SKIP != rank:
    group.all_reduce(torch.ones(8), async_op=True)
say("inside")
hear()
"""


def _torch_says(tmp_path, skip):
    with Job(tmp_path, 3, VERBS.replace("SKIP", str(skip))) as job:
        for rank in range(3):
            job.expect(rank, "inside")
        if skip < 0:
            wait_for(
                lambda: all(records.read_process(job.pid(r))["operations"][-1]["state"] == "done" for r in range(3))
            )
        out, perfetto = tmp_path / f"fr{skip}", tmp_path / "perfetto.json"
        done = command("trace", "--pid", str(job.pid(0)), "--torch", str(out), "--perfetto", str(perfetto))
        assert done.returncode == 0, done.stderr
    program = Path(sys.executable).parent / "torchfrtrace"
    said = subprocess.run([str(program), str(out)], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout + said.stderr, json.loads(perfetto.read_text())


def test_torch_reads_a_right_program_as_right(tmp_path):
    said, perfetto = _torch_says(tmp_path, -1)
    assert "mismatch" not in said.lower() and "missing" not in said.lower(), said
    events = [e for e in perfetto["traceEvents"] if e["ph"] == "X"]
    assert len({e["pid"] for e in events}) == 3 and {"all_gather", "gather", "barrier"} <= {e["name"] for e in events}
    assert all(e["dur"] >= 0 and e["ts"] > 0 for e in events)


def test_torch_names_the_rank_that_made_no_call(tmp_path):
    """The control: the same with a call that rank 2 leaves out."""
    said, _ = _torch_says(tmp_path, 2)
    assert "{2}" in said or "rank 2" in said.lower() or "missing" in said.lower(), said


def test_the_ring_keeps_the_last_operations():
    group = unisono.Group.from_store(HashStore(), 0, 1)
    tensors = [unisono.zeros(4) for _ in range(2)]
    for i in range(1500):
        group.all_reduce(tensors[i % 2])
    mine = records.read_process(os.getpid())
    own = [o for o in mine["operations"] if o["group"] == group.name and o["op"] == "all_reduce"]
    assert len(mine["operations"]) == 1024
    assert own[-1]["seq"] == 1500 and own[-1]["site"].startswith("test_trace.py:")
    numbers = [o["number"] for o in mine["operations"]]
    assert numbers == list(range(numbers[0], numbers[0] + 1024))
    began = [o["began_ns"] for o in mine["operations"]]
    assert began == sorted(began)
    group.close()


def test_garbage_is_read_without_harm():
    """Whatever a process puts into its memory, a reader ends with some JSON, or none."""
    unisono.zeros(1)
    path = next(
        p for n in os.listdir("/proc/self/fd") if os.readlink(p := f"/proc/self/fd/{n}").startswith("/memfd:unisono")
    )
    with open(path, "rb") as file:
        whole = file.read(1 << 20)
    dice = random.Random(18)
    for turn in range(40):
        data = bytearray(whole)
        first = 0 if turn == 0 else 40  # the first time the header too
        for _ in range(2000 if turn % 2 else 50):
            data[dice.randrange(first, len(data))] = dice.choice([0, 1, 255, dice.randrange(256)])
        if turn % 4 == 3:
            data[4096:] = dice.randbytes(len(data) - 4096)
        fd = os.memfd_create("garbage")
        os.write(fd, data)
        text = _core.read_record(fd, "why", 0)
        if text:
            json.loads(text)
        os.close(fd)
    fd = os.memfd_create("short")
    os.write(fd, whole[:5000])
    assert _core.read_record(fd, "why", 0) == ""
    os.close(fd)


def test_a_process_without_groups_says_so():
    shown = command("trace", "--pid", "1")
    assert shown.returncode == 1 and "unisono trace:" in shown.stderr
    shown = command("trace", "--pid", "999999999")
    assert shown.returncode == 1 and "no process" in shown.stderr


def test_an_empty_folder_says_so(tmp_path):
    shown = command("trace", str(tmp_path))
    assert shown.returncode == 1 and "no records" in shown.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_another_user_reads_nothing(tmp_path):
    with Job(tmp_path, 1, 'group.barrier()\nsay("inside")\nhear()\n') as job:
        job.expect(0, "inside")
        libc = ctypes.CDLL(None)
        child = os.fork()
        if child == 0:
            libc.setgid(65534)
            libc.setuid(65534)
            try:
                records.read_process(job.pid(0))
                os._exit(1)
            except records.NoRecord:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_top_beside_a_name_cut_inside_a_character():
    name = "обучение модели"  # the system keeps 15 bytes of it
    naming = f"import ctypes, time; ctypes.CDLL(None).prctl(15, {name.encode()!r}); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", naming], stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            shown = subprocess.run(
                [sys.executable, "-m", "unisono", "top", "--once"], capture_output=True, text=True, timeout=60
            )
            assert shown.returncode == 0, shown.stderr
        finally:
            other.kill()
