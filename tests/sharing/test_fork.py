"""fork with new tensors shared: a child sees its tensors as they were, whatever the parent and its peers do later."""

from __future__ import annotations

import os
import threading
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import unisono
from tests.faults.test_fork import _fork, _outcome, use_operators_once
from unisono import _core
from unisono.testing import run_ranks

MIB = 1 << 20


def _tensors(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.full((n,), i + 1.0) for i, n in enumerate(sizes)]


def _seen_by_children(group: unisono.Group, shared_after: bool) -> None:
    """Two children in a row: the parent writes after each fork; the children read, write and fork themselves."""
    unisono.share_new_tensors(min_bytes=4096)
    tensors = _tensors((1500, 5000, 100_000, 300_001, MIB))
    assert all(map(unisono.is_shared, tensors))
    group.all_reduce(tensors[-1], "max")
    for turn in range(2):
        want = [float(t[0]) for t in tensors]
        go_read, go_write = os.pipe()

        def child() -> None:
            os.read(go_read, 1)  # noqa: B023
            assert [t.unique().tolist() for t in tensors] == [[v] for v in want], "a later write is seen"  # noqa: B023
            for t in tensors:
                t += 0.5
            own = torch.ones(MIB)
            assert unisono.is_shared(own) and bool((own == 1).all())

            def grandchild() -> None:
                assert [t.unique().tolist() for t in tensors] == [[v + 0.5] for v in want]  # noqa: B023
                assert bool((own == 1).all())

            assert _outcome(_fork(grandchild)) == "exit code 0"
            tensors.clear()  # freeing what the parent has is nothing

        pid = _fork(child)
        for t in tensors:
            t.mul_(-3.0)
        del t
        group.all_reduce(tensors[-1], "max")  # peers write into it
        more = _tensors((MIB, MIB))  # and new tensors take the place of freed ones
        os.write(go_write, b".")
        os.close(go_read)
        os.close(go_write)
        assert _outcome(pid) == "exit code 0"
        assert [t.unique().tolist() for t in tensors] == [[v * -3] for v in want], f"turn {turn}"
        assert [unisono.is_shared(t) for t in tensors[2:]] == [shared_after] * 3
        del more
    before = _core.heap_usage()
    tensors.clear()
    again = _tensors((100_000, 300_001, MIB))  # the same addresses, shared again
    assert all(map(unisono.is_shared, again))
    group.all_reduce(again[-1])
    assert again[-1].unique().tolist() == [3.0 * group.size]
    assert _core.heap_usage()["in_use"] < before["in_use"]
    assert _core.heap_usage()["quarantined"] == 0


@pytest.mark.parametrize(("size", "most", "shared"), [(2, "256M", True), (2, "1M", False), (1, "0", False)])
def test_children_see_the_values_at_their_fork(size: int, most: str, shared: bool) -> None:
    run_ranks(size, _seen_by_children, shared, env={"UNISONO_FORK_COPY_MAX": most})


def _fork_during_a_call(group: unisono.Group) -> bool:
    """A tensor that peers may be reading stays where it is, whatever the limit."""
    unisono.share_new_tensors()
    mine, other = torch.full((MIB,), 1.0), torch.full((MIB,), 5.0)
    handles = []
    if group.rank == 0:
        handles.append(group.all_reduce(mine, async_op=True))  # rank 1 comes after the fork

        def child() -> None:
            assert other.unique().tolist() == [5.0]
            other.zero_()

        while group.calls == 0:
            pass
        assert _outcome(_fork(child)) == "exit code 0"
        assert unisono.is_shared(mine) and unisono.is_shared(other)
        group._store.set("forked", "1")
        handles[0].wait()
    else:
        group._store.wait(["forked"])
        group.all_reduce(mine)
    assert mine.unique().tolist() == [float(group.size)] and other.unique().tolist() == [5.0]
    if group.rank == 0:  # and with no call under way, it goes
        assert _outcome(_fork(lambda: None)) == "exit code 0"
        assert not unisono.is_shared(mine)
    group.all_reduce(mine)
    return mine.unique().tolist() == [float(group.size) ** 2]


def test_a_fork_during_a_call() -> None:
    assert run_ranks(2, _fork_during_a_call, env={"UNISONO_FORK_COPY_MAX": "0"}) == [True, True]


class _Rows(Dataset[torch.Tensor]):
    def __init__(self, table: torch.Tensor, weight: torch.Tensor) -> None:
        self.table, self.weight = table, weight

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> torch.Tensor:
        row = self.table[i] + self.weight.sum()  # of a model that the parent trains meanwhile
        self.table[i] = -1.0  # a worker's write is its own
        return row


def _train_beside_workers(group: unisono.Group) -> None:
    """Two epochs: workers are forked for each, while the parent trains in place and calls collectives."""
    unisono.share_new_tensors(min_bytes=4096)
    table = torch.arange(32.0)[:, None].repeat(1, 20_000)
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    assert unisono.is_shared(table) and unisono.is_shared(model.weight)
    for _ in range(2):
        at_fork = model.weight.detach().clone()
        dataset = _Rows(table, model.weight.detach())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
            batches = iter(loader)
        for i, batch in enumerate(batches):
            want = torch.arange(4 * i, 4.0 * i + 4)[:, None] + at_fork.sum()
            assert torch.allclose(batch, want.expand(4, 20_000)), "a worker saw the parent's training"
            optimizer.zero_grad()
            model(torch.randn(64, 512)).sum().backward()
            assert model.weight.grad is not None
            group.all_reduce(model.weight.grad)
            optimizer.step()
        assert torch.equal(table, torch.arange(32.0)[:, None].expand(32, 20_000)), "a worker's write is seen"


@pytest.mark.parametrize("most", ["256M", "1M"])
def test_a_data_loader_beside_training(most: str) -> None:
    run_ranks(2, _train_beside_workers, env={"UNISONO_FORK_COPY_MAX": most})


def _forks_among_threads(group: unisono.Group, forks: int) -> list[str]:
    """Threads make, write and free tensors all the time; children must get on with their own."""
    use_operators_once()
    unisono.share_new_tensors(min_bytes=4096)
    stop = threading.Event()
    wrong: list[str] = []

    def work(seed: int) -> None:
        i = 0
        while not stop.is_set():
            i += 1
            t = torch.full(((seed * 37 + i * 7919) % 300_000 + 1,), float(i))
            t += 1
            if not bool((t == i + 1).all()):
                wrong.append(f"thread {seed}, turn {i}")

    def child() -> None:
        for i in range(20):
            assert torch.full((100_000 + i,), 2.0).unique().tolist() == [2.0]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    found = [_outcome(_fork(child)) for _ in range(forks)]
    stop.set()
    for thread in threads:
        thread.join()
    return sorted(set(found)) + wrong


@pytest.mark.parametrize("most", ["256M", "0"])
def test_forks_among_threads(most: str) -> None:
    env = {"UNISONO_FORK_COPY_MAX": most}
    assert run_ranks(1, _forks_among_threads, 20, env=env, timeout_s=100) == [["exit code 0"]]
