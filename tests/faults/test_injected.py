"""Faults at exact points of the core, and the matrix with one defence switched off, which it must notice.

Needs a core that was built with UNISONO_FAULTS (``make injected``, and ``make sanitize-python``); the product's has
none of it, which tests/house checks.
"""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch

import unisono
from tests.faults import matrix
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


def _at(group, name, point, action):
    """Rank 1 is struck at the point; what a rank was told, and how long it took."""
    call = CALLS[name][0]
    start = 8 << 10 if name == "read" else 0  # from so many bytes on in one copy; 0: through the ring, always
    unisono._core.choose_tuning(start, start, 64 << 10, 512 << 10)
    group.barrier()
    pids = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather(pids, torch.tensor([os.getpid()]))
    if group.rank == 1:
        unisono._core.inject_fault(point, action)
    elif group.rank == 0 and action == "stop":
        threading.Timer(0.3, os.kill, (int(pids[1]), signal.SIGCONT)).start()
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


PAUSES = [(*at, "delay") for at in POINTS] + [("staged", "reduced", "stop"), ("message", "message", "stop")]


@pytest.mark.parametrize(("name", "point", "action"), PAUSES)
def test_a_rank_pauses_at(name, point, action):
    said = run_ranks(3, _at, name, point, action, timeout_s=60)
    assert [text for text, _ in said] == ["fine"] * 3
    assert said[1][1] > 0.25, "the point was not reached"


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


# A cell and the defence that it needs.
NEEDS = {
    "idle": "deaths",
    "in small calls": "deaths",
    "in large calls, heap": "deaths",
    "in large calls, staged": "deaths",
    "in fused matmuls": "deaths",
    "in calls nobody waits for": "deaths",
    "two": "deaths",
    "rank 0": "deaths",
    "all but one": "deaths",
    "by exit": "deaths",
    "shrink": "deaths",
    "by close": "departures",
    "longer than the deadline": "deadlines",
    "a rank that is slow": "deadlines",
    "an extra call on one rank": "deadlines",
    "op": "agreement",
    "shape": "agreement",
    "dtype": "agreement",
    "reduce op": "agreement",
    "root": "agreement",
    "splits": "agreement",
    "the child uses the group": "forks",
    "an end with work in flight": "endings",
    "Ctrl-C while waiting": "interrupts",
    "half-open and foreign connections": "strangers",
    "a stopped rank goes on after the others' time-out": "withdrawal",
    "two groups": "cycles",
    "callbacks that sleep, drop the last reference or raise": "callbacks",
}
CELLS = [(row, moment) for row in matrix.MATRIX for moment in row.moments]


def test_every_name_is_a_cell():
    names = {name for row, moment in CELLS for name in (row.fault, moment.name)}
    assert set(NEEDS) <= names, set(NEEDS) - names


@pytest.mark.slow
@pytest.mark.parametrize("cell", NEEDS, ids=str)
def test_without_its_defence_a_cell_fails(cell):
    row, moment = next((r, m) for r, m in CELLS if cell in (m.name, r.fault))
    case = matrix.Case(row, moment, 2, False, False)
    began = time.monotonic()
    matrix.run(case)
    # Long enough that it is not the limit that fails.
    limit_s = 5.0 + 3 * (time.monotonic() - began)
    with pytest.raises(AssertionError):
        matrix.run(case, limit_s=limit_s, off=NEEDS[cell])
    with contextlib.suppress(ChildProcessError):  # what a rank had forked that was ended at the limit
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
