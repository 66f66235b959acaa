"""The backend for torchcomms on a stand-in for its base class, since what PyPI has of torchcomms is a placeholder.

The stand-in has what torchcomms' stubs and its own tests of Python backends show: a class to derive from, operators
with a type that has a name, a function that registers, and calls by position.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from enum import Enum, auto
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.testing import run_ranks

SIZE = 3


class RedOpType(Enum):
    SUM = auto()
    PRODUCT = auto()
    MIN = auto()
    MAX = auto()
    BAND = auto()
    BOR = auto()
    BXOR = auto()
    PREMUL_SUM = auto()
    AVG = auto()


def _op(name: str) -> Any:
    return SimpleNamespace(type=RedOpType[name])


def _backend_class() -> Any:
    """What loading the entry point registers, as torchcomms does when the backend is first asked for."""
    registered = {}
    stand_in = ModuleType("torchcomms")
    stand_in.TorchCommBackend = type("TorchCommBackend", (), {})  # type: ignore[attr-defined]
    stand_in.register_backend = registered.__setitem__  # type: ignore[attr-defined]
    sys.modules["torchcomms"] = stand_in
    (entry,) = entry_points(group="torchcomms.backends", name="unisono")
    entry.load()
    return registered["unisono"]


def _made(group: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RANK", str(group.rank))
    monkeypatch.setenv("WORLD_SIZE", str(group.size))
    store = dist.FileStore(path, group.size)
    made = _backend_class()()
    options = SimpleNamespace(store=store, timeout=timedelta(seconds=60), hints={})
    made.init(torch.device("cpu"), "world of torchcomms", options)
    assert (made.get_rank(), made.get_size(), made.get_backend_name()) == (group.rank, group.size, "unisono")
    assert made.get_comm_name() == "world of torchcomms"
    return made


def _row(rank: int, count: int = 2) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * rank


def _calls(comm: Any, asynchronous: bool) -> None:
    rank, ranks = comm.get_rank(), range(SIZE)

    def done(work: Any) -> None:
        assert (work is not None) is asynchronous
        if asynchronous:
            work.wait()

    tensor = _row(rank)
    done(comm.all_reduce(tensor, _op("SUM"), asynchronous))
    assert torch.equal(tensor, sum(_row(r) for r in ranks))
    tensor = _row(rank)
    done(comm.all_reduce(tensor, _op("AVG"), asynchronous))
    assert torch.equal(tensor, _row(1))
    bits = torch.tensor([1 << rank])
    done(comm.all_reduce(bits, _op("BOR"), asynchronous))
    assert bits.item() == 7
    tensor = _row(rank)
    done(comm.reduce(tensor, 1, _op("MAX"), asynchronous))
    assert torch.equal(tensor, _row(2 if rank == 1 else rank))
    tensor = _row(rank)
    done(comm.broadcast(tensor, 2, asynchronous))
    assert torch.equal(tensor, _row(2))

    parts = [torch.empty(2) for _ in ranks]
    done(comm.all_gather(parts, _row(rank), asynchronous))
    assert torch.equal(torch.cat(parts), torch.cat([_row(r) for r in ranks]))
    whole = torch.empty(2 * SIZE)
    done(comm.all_gather_single(whole, _row(rank), asynchronous))
    assert torch.equal(whole, torch.cat(parts))
    counts = [4, 0, 1]
    parts = [torch.empty(count) for count in counts]
    done(comm.all_gather_v(parts, _row(rank, counts[rank]), asynchronous))
    assert all(torch.equal(part, _row(r, counts[r])) for r, part in enumerate(parts))

    output = torch.empty(2)
    done(comm.reduce_scatter(output, [_row(r) for r in ranks], _op("SUM"), asynchronous))
    assert torch.equal(output, SIZE * _row(rank))
    done(comm.reduce_scatter_single(output, whole, _op("SUM"), asynchronous))
    assert torch.equal(output, SIZE * _row(rank))
    output = torch.empty(counts[rank])
    done(comm.reduce_scatter_v(output, [_row(r, counts[r]) for r in ranks], _op("SUM"), asynchronous))
    assert torch.equal(output, SIZE * _row(rank, counts[rank]))

    whole = torch.empty(SIZE)
    done(comm.all_to_all_single(whole, torch.arange(3.0) + 10 * rank, asynchronous))
    assert whole.tolist() == [rank, 10.0 + rank, 20.0 + rank]
    parts = [torch.empty(1) for _ in ranks]
    done(comm.all_to_all(parts, list((torch.arange(3.0) + 10 * rank).split(1)), asynchronous))
    assert torch.equal(torch.cat(parts), whole)
    # Rank r sends j rows to rank j, of two elements each.
    sent, received = [0, 1, 2], [rank] * SIZE
    rows = torch.full((sum(received), 2), -1.0)
    done(comm.all_to_all_v_single(rows, torch.full((3, 2), float(rank)), received, sent, asynchronous))
    assert rows[:, 1].tolist() == [float(r) for r in ranks for _ in range(rank)]

    output = torch.empty(2)
    done(comm.scatter(output, [_row(r) for r in ranks] if rank == 1 else [], 1, asynchronous))
    assert torch.equal(output, _row(rank))
    parts = [torch.empty(2) for _ in ranks] if rank == 0 else []
    done(comm.gather(parts, _row(rank), 0, asynchronous))
    assert all(torch.equal(part, _row(r)) for r, part in enumerate(parts))
    if rank < 2:
        tensor = _row(rank)
        done(comm.send(tensor, 1, asynchronous) if rank == 0 else comm.recv(tensor, 0, asynchronous))
        assert torch.equal(tensor, _row(0))
    done(comm.barrier(asynchronous))


def _on_ranks(group: Any, path: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        comm = _made(group, path, monkeypatch)
        for asynchronous in (False, True):
            _calls(comm, asynchronous)
        with pytest.raises(ValueError, match="PREMUL_SUM"):
            comm.all_reduce(torch.ones(1), _op("PREMUL_SUM"), False)
        child = comm.split([2, 0] if group.rank != 1 else [], "ends", None)
        assert (child is None) == (group.rank == 1)
        if child is not None:
            assert (child.get_rank(), child.get_size(), child.get_comm_name()) == (int(group.rank == 0), 2, "ends")
            tensor = _row(group.rank)
            child.all_reduce(tensor, _op("SUM"), False)
            assert torch.equal(tensor, _row(0) + _row(2))
            child.finalize()
        comm.set_timeout(timedelta(seconds=0.2))
        if group.rank == 0:
            with pytest.raises(Exception, match="barrier"):
                comm.barrier(False)


def test_three_ranks(tmp_path: Any) -> None:
    run_ranks(SIZE, _on_ranks, str(tmp_path / "store"))


def test_it_is_for_cpus() -> None:
    before = dict(sys.modules)
    try:
        made = _backend_class()()
        with pytest.raises(ValueError, match="cpu"):
            made.init(torch.device("meta"), "x", None)
        with pytest.raises(RuntimeError, match="not initialized"):
            made.get_rank()
    finally:
        for name in ("torchcomms", "unisono.torchcomms"):
            if name not in before:
                sys.modules.pop(name, None)
