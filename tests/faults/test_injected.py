"""Faults at exact points of the core, and the matrix with one defence switched off, which it must notice.

Needs a core that was built with UNISONO_FAULTS (``make injected``, and ``make sanitize-python``); the product's has
none of it, which tests/house checks.
"""

import contextlib
import glob
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import unisono
from tests.faults import matrix, proofs
from unisono.testing import RankFailure, run_ranks

pytestmark = pytest.mark.skipif(not hasattr(unisono._core, "inject_fault"), reason="built without UNISONO_FAULTS")

# Which phases each kind of call goes through.
CALLS = {
    "small": (lambda g: g.all_reduce(torch.ones(2)), ("descriptor",)),
    "staged": (lambda g: g.all_reduce(torch.ones(1 << 20)), ("staged", "reduced", "copied")),
    "copied": (lambda g: g.broadcast(torch.ones(1 << 20), 1), ("staged", "copied")),
    "read": (lambda g: g.broadcast(torch.ones(1 << 20), 0), ("reading",)),
    "shared": (lambda g: g.all_reduce(unisono.ones(1 << 20)), ("descriptor", "exit")),
    "fused": (
        lambda g: unisono.matmul_all_reduce(torch.ones(256, 512), torch.ones(512, 256), group=g),
        ("descriptor", "exit"),
    ),
    "message": (
        lambda g: (
            g.send(torch.ones(1 << 20), 0) if g.rank == 1 else g.recv(torch.ones(1 << 20), 1) if g.rank == 0 else 0
        ),
        ("message",),
    ),
}


def _let_go_on(pid):
    """A while after it has stopped."""
    until = time.monotonic() + 30.0
    while time.monotonic() < until and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(pid, signal.SIGCONT)


def _at(group, name, point, action):
    """Rank 1 is struck at the point; what a rank was told, and how long it took."""
    call = CALLS[name][0]
    start = 8 << 10 if name == "read" else 0  # from so many bytes on in one copy; 0: through the ring, always
    unisono._core.choose_tuning((start, 0), (start, 0), 64 << 10, 512 << 10)
    group.barrier()
    pids = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather(pids, torch.tensor([os.getpid()]))
    if group.rank == 1:
        unisono._core.inject_fault(point, action)
    elif group.rank == 0 and action == "stop":
        threading.Thread(target=_let_go_on, args=(int(pids[1]),)).start()
    began = time.monotonic()
    try:
        for _ in range(3):
            call(group)
        group.barrier()
    except unisono.UnisonoError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "fine", time.monotonic() - began


POINTS = [(name, point) for name, (_, points) in CALLS.items() for point in points]


@pytest.mark.parametrize(("name", "point"), POINTS)
def test_a_rank_dies_at(name, point):
    said = run_ranks(3, _at, name, point, "die", check=False, timeout_s=60)
    assert isinstance(said[1], RankFailure), "the point was not reached"
    for text, _ in (said[0], said[2]):
        assert text.startswith("PeerLostError") and "rank 1 died" in text, said
        assert "   died   last call " in text, said
        if point == "staged":
            assert " (published) at test_injected.py:" in text, said


PAUSES = [(*at, "delay") for at in POINTS] + [("staged", "reduced", "stop"), ("message", "message", "stop")]


@pytest.mark.parametrize(("name", "point", "action"), PAUSES)
def test_a_rank_pauses_at(name, point, action):
    said = run_ranks(3, _at, name, point, action, timeout_s=60)
    assert [text for text, _ in said] == ["fine"] * 3
    assert said[1][1] > 0.25, "the point was not reached"


def _answers_late(group):
    """Rank 1 has what it waits for, but is held up for long before and after it says once more that it waits."""
    got = torch.zeros(1)
    if group.rank == 1:
        unisono._core.inject_fault("counting", "long delay", -3)  # from the second count on, before and after each
        began = time.monotonic()
        group.recv(got, 0)
        held_s = time.monotonic() - began
        time.sleep(1.5)  # longer than a proof is held back
        group.send(got, 0)
        return held_s
    time.sleep(0.4)
    group.send(torch.ones(1), 1)
    group.recv(got, 1)
    return got.item()


def test_a_rank_that_is_held_up_is_no_deadlock():
    got, held_s = run_ranks(2, _answers_late, timeout_s=60)
    assert held_s > 1.5, "the point was not reached"
    assert got == 1


def _joins(group, path, action):
    from torch.distributed import FileStore

    if group.rank == 1:
        unisono._core.inject_fault("joining", action)
    try:
        with unisono.Group.from_store(FileStore(path, 3), group.rank, 3, name="second", timeout_s=3.0) as made:
            made.barrier()  # who had met it before is told now
    except (unisono.UnisonoError, OSError) as error:
        return type(error).__name__
    return "fine"


@pytest.mark.parametrize("action", ["die", "delay"])
def test_a_rank_is_struck_while_it_joins(action, tmp_path):
    said = run_ranks(3, _joins, str(tmp_path / "store"), action, check=False, timeout_s=60)
    if action == "delay":
        assert said == ["fine"] * 3
    else:
        assert isinstance(said[1], RankFailure)
        assert all(kind in matrix.JOINING for kind in (said[0], said[2])), said


def _comes_back(group, how, folder):
    """Rank 1 gives up when rank 0 is about to write the verdict; the others take it, give up too, and all come back."""
    pids = torch.zeros(3, dtype=torch.int64)
    group.all_gather(pids, torch.tensor([os.getpid()]))
    if group.rank == 0:
        unisono._core.inject_fault("deciding", "stop")
    group.barrier()
    said = "no error"
    try:
        group.shrink(timeout_s=1.0 if group.rank == 1 else 6.0)
    except (unisono.CollectiveTimeoutError, KeyboardInterrupt) as error:
        said = type(error).__name__
    if group.rank == 1:
        os.kill(int(pids[0]), signal.SIGCONT)
        if how == "interrupt":
            time.sleep(2.0)  # they are in the barrier of the new group
            for r in (0, 2):
                os.kill(int(pids[r]), signal.SIGINT)
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.05)
    else:
        (folder / str(group.rank)).touch()
    new, lost = group.shrink(timeout_s=30.0)
    t = torch.ones(1)
    new.all_reduce(t)
    new.close()
    return said, new.ranks, lost, t.item()


@pytest.mark.parametrize("how", ["timeout", "interrupt"])
def test_nobody_goes_on_alone_with_a_verdict_that_is_over(how, tmp_path):
    said = run_ranks(3, _comes_back, how, tmp_path, timeout_s=100)
    errors = [one[0] for one in said]
    assert errors[1] == "CollectiveTimeoutError", "the point was not reached"
    assert errors[::2] == ["KeyboardInterrupt" if how == "interrupt" else "CollectiveTimeoutError"] * 2, said
    assert [one[1:] for one in said] == [([0, 1, 2], [], 3.0)] * 3, said


CELLS = [(row, moment) for row in matrix.MATRIX for moment in row.moments]


@pytest.mark.slow
@pytest.mark.timeout(600)  # 64 ranks that spin, until their limit
@pytest.mark.parametrize(("row", "moment"), CELLS, ids=[", ".join(filter(None, (r.fault, m.name))) for r, m in CELLS])
def test_without_its_defence_a_cell_fails(row, moment):
    case = matrix.Case(row, moment, moment.sizes[-1] if 2 not in moment.sizes else 2, False, False)
    began = time.monotonic()
    matrix.run(case)
    # Long enough that it is not the limit that fails.
    limit_s = 5.0 + 3 * (time.monotonic() - began)
    try:
        with pytest.raises(AssertionError):
            matrix.run(case, limit_s=limit_s, off=proofs.need_of(row.fault, moment.name))
    finally:
        for planted in glob.glob(proofs.PLANTED + "*"):
            os.unlink(planted)
    with contextlib.suppress(ChildProcessError):  # what a rank had forked that was ended at the limit
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
