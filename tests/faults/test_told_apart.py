"""What is said about a rank that others wait for: dead and how, stopped, slow, left, never there; and where it was."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.base import log
from unisono.testing import run_ranks

LIMIT_S = 8.0


class _Heard(logging.Handler):
    def __init__(self, path=None):
        super().__init__()
        self.texts, self.path = [], path
        logging.getLogger("unisono").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())
        if self.path:
            self.path.touch()


def _late(group, how, path):
    """Rank 1 comes to the second call when rank 0 has warned, or late; what rank 0's log says meanwhile."""
    heard = _Heard(path)
    group = group.split([0, 1], timeout_s=LIMIT_S)
    pid = torch.tensor([os.getpid()])
    group.broadcast(pid, 1)
    if group.rank == 1:
        until = time.monotonic() + 0.75 * LIMIT_S
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
    elif how == "stopped":
        os.kill(int(pid), signal.SIGSTOP)
        again = threading.Timer(LIMIT_S / 2, os.kill, (int(pid), signal.SIGCONT))
        again.start()
    if how == "async":
        group.barrier(async_op=True).wait()
    else:
        group.barrier()
    return heard.texts


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_late_rank_is_in_the_log_with_its_line(how, tmp_path):
    waiting, late = run_ranks(2, _late, how, tmp_path / "warned", timeout_s=60)
    assert late == []
    assert len(waiting) >= 1, "no warning"
    assert "barrier #2" in waiting[0] and "test_told_apart.py:" in waiting[0], waiting[0]
    line = waiting[0].splitlines()[1]
    assert line.strip().startswith("rank 1   pid ") and "slow (" in line, line
    assert "last call broadcast #1 at test_told_apart.py:" in line and "in no call" in line, line


def test_a_stopped_rank_is_in_the_log_as_stopped(tmp_path):
    waiting, _ = run_ranks(2, _late, "stopped", tmp_path / "warned", timeout_s=60)
    assert any("   stopped   " in text for text in waiting), waiting


def test_nobody_late_nothing_in_the_log():
    assert run_ranks(2, _in_time, timeout_s=60) == [[], []]


def _in_time(group):
    heard = _Heard()
    for _ in range(100):
        group.barrier()
    return heard.texts


def _dies(group, how):
    group.barrier()
    if group.rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    try:
        group.barrier()
    except unisono.PeerLostError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit"])
def test_how_a_rank_died_is_said_if_its_parent_has_not_asked_yet(how):
    said = run_ranks(2, _dies, how, timeout_s=60, check=False)[0]
    assert "rank 1 died (pid " in said, said
    words = {"SIGKILL": "signal 9", "SIGSEGV": "signal 11", "exit": "exit code 7"}[how]
    # The parent may have been faster; then nobody on this side can know.
    assert words in said or ("signal" not in said and "exit code" not in said), said


def test_where_a_rank_died_is_said():
    said = run_ranks(2, _dies, "SIGKILL", timeout_s=60, check=False)[0]
    line = said.splitlines()[1]
    assert line.startswith("  rank 1   pid ") and "   died   " in line, said
    assert "last call barrier #1 (done) at test_told_apart.py:" in line, said


def _dies_in_a_call(group):
    """Rank 1 waits for rank 0, in one group and then in another, and is killed there."""
    other = group.split([0, 1], name="other")
    pid = torch.tensor([os.getpid()])
    group.broadcast(pid, 1)
    if group.rank == 1:
        other.all_reduce(torch.ones(3))
        return None
    time.sleep(1.0)
    os.kill(int(pid), signal.SIGKILL)
    texts = []
    for g in (group, other):
        try:
            g.barrier()
        except unisono.PeerLostError as error:
            texts.append(str(error))
    return texts


def test_what_a_rank_died_in_is_said():
    of_group, of_other = run_ranks(2, _dies_in_a_call, timeout_s=60, check=False)[0]
    assert "last call broadcast #2 (done) at test_told_apart.py:" in of_group, of_group
    assert '   waited in all_reduce #1 of group "' in of_group, of_group
    assert "last call all_reduce #1 (published) at test_told_apart.py:" in of_other, of_other
    assert "   waited in all_reduce #1 at test_told_apart.py:" in of_other, of_other


def _all_but_one_die(group):
    group.barrier()
    if group.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2.0)
    try:
        group.barrier()
    except unisono.PeerLostError as error:
        return str(error).splitlines()[1:]
    return []


def test_where_many_ranks_died_is_said_of_some():
    lines = run_ranks(11, _all_but_one_die, timeout_s=120, check=False)[0]
    assert [line.split("   ")[0] for line in lines] == [f"  rank {r}" for r in range(1, 9)] + ["  and 2 more"], lines


CHILD = """
import os, signal, sys
from torch.distributed import FileStore
import unisono
group = unisono.Group.from_store(FileStore(sys.argv[1], 2), 1, 2)
group.barrier()
os._exit(7) if sys.argv[2] == "exit" else os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


def _parent_of_a_rank(_, path, how):
    """Rank 0 is the parent of rank 1, and asks after it only when the error is there: the system knows how it died."""
    with subprocess.Popen([sys.executable, "-c", CHILD, path, how]) as child:
        group = unisono.Group.from_store(dist.FileStore(path, 2), 0, 2)
        group.barrier()
        with pytest.raises(unisono.PeerLostError) as told:
            group.barrier()
        group.close()
        return str(told.value).replace(str(child.pid), "PID")


@pytest.mark.parametrize(("how", "words"), [("SIGKILL", "signal 9"), ("SIGSEGV", "signal 11"), ("exit", "exit code 7")])
def test_how_a_rank_died_is_said(how, words, tmp_path):
    (said,) = run_ranks(1, _parent_of_a_rank, str(tmp_path / "store"), how, timeout_s=60)
    assert f"rank 1 died (pid PID, {words}" in said, said


def _sites(group):
    """The source line that the recorder has of calls through every adapter."""
    from unisono.trace import records

    lines = {}
    x = unisono.zeros(4)

    def note(name):
        lines[name] = records.read_process(os.getpid())["operations"][-1]

    group.all_reduce(x)
    note("group")
    unisono.comm_func.all_reduce(x, group=group)
    note("comm_func")
    group.all_reduce(x, async_op=True).wait()
    note("async")
    unisono.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), group=group)
    note("fused")
    dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(x)
    note("dist")
    work = dist.all_gather_into_tensor(torch.empty(4), x, async_op=True)
    work.wait()
    note("work")
    dist.destroy_process_group()
    return {name: (o["op"], o["site"], o["state"]) for name, o in lines.items()}


def test_every_adapter_notes_the_programs_line():
    (found,) = run_ranks(1, _sites, timeout_s=60)
    for name, (op, site, state) in found.items():
        assert site.startswith("test_told_apart.py:"), (name, op, site)
        assert state == "done", (name, state)
    assert len({site for _, site, _ in found.values()}) == len(found), found


def _on_gloo(group, path):
    """Rank 1 comes late to a call on gloo."""
    heard = _Heard()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=group.rank, world_size=2)
    for late in (False, True):
        if late and group.rank == 0:
            log.WARN_AFTER_S = 0.5
        elif late:
            time.sleep(3.0)
        unisono.all_gather_into_tensor_uneven(torch.empty(3), torch.ones(1 + group.rank), [1, 2])
    dist.destroy_process_group()
    return heard.texts


def test_a_late_rank_on_gloo_is_in_the_log(tmp_path):
    waiting, late = run_ranks(2, _on_gloo, str(tmp_path / "store"), timeout_s=60)
    assert late == [] and len(waiting) == 1, (waiting, late)
    assert "rank 1 has not come" in waiting[0] and "test_told_apart.py:" in waiting[0], waiting
