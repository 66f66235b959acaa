"""fork: a child is never stuck on a lock of a thread it does not have, and sees its tensors as they were."""

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import traceback
import warnings

import pytest
import torch
from torch.distributed import FileStore
from torch.utils.data import DataLoader, Dataset

import unisono
from unisono.testing import run_ranks

CHILD_S = 30.0  # a child that takes so long hangs


def _fork(work):
    """Start a child that runs `work()` and tells how it ended by its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is what this is about
        pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def _outcome(pid):
    with contextlib.closing(os.fdopen(os.pidfd_open(pid), "rb", closefd=True)) as ended:
        if select.select([ended], [], [], CHILD_S)[0]:
            return f"exit code {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def use_operators_once():
    """What a test's threads and children use of torch: the first use of an operator fills static variables, and a child
    forked while another thread fills one waits for it for ever. With torch alone 3 of 128 children hung so."""
    t = torch.full((50_000,), 1.0)
    t += torch.zeros(50_000) + 1
    assert bool((t == 2).all()) and t.unique().tolist() == [2.0]
    assert torch.ones(1).fill_(True).item()


def _use_unisono(store, rank):
    """What a child may do: tensors, a group of its own, and one with its sibling."""
    for size, path in ((1, f"{store}-{rank}"), (2, store)):
        group = unisono.Group.from_store(FileStore(path, size), rank % size, size, timeout_s=CHILD_S)
        for make in (unisono.zeros, torch.zeros):
            t = make(50_000) + 1
            group.all_reduce(t, async_op=True).wait()
            assert t.unique().tolist() == [float(size)]
        group.close()


def _forks_among_threads(group, folder, forks):
    """Threads make, use and close groups and tensors all the time; children are forked in between."""
    use_operators_once()
    groups = [group.split(range(group.size)) for _ in range(3)]
    stop = threading.Event()

    def hammer(mine):
        more = torch.ones(1)
        while more.item():
            part = mine.split(range(mine.size))
            part.all_reduce(unisono.zeros(100_000))
            part.all_reduce(torch.zeros(100_000), async_op=True).wait()
            del part  # left to be given back later: the peer may not have left yet
            more.fill_(not stop.is_set())
            mine.all_reduce(more, "min")  # all ranks stop after the same turn

    threads = [threading.Thread(target=hammer, args=(mine,)) for mine in groups]
    for thread in threads:
        thread.start()
    found = []
    for turn in range(forks):
        store = f"{folder}/{group.rank}-{turn}"
        pair = [_fork(lambda rank=rank: _use_unisono(store, rank)) for rank in range(2)]  # noqa: B023
        found += [_outcome(pid) for pid in pair]
        if found[-1] == "hung" or found[-2] == "hung":
            break
    stop.set()
    for thread in threads:
        thread.join()
    for mine in groups:
        mine.close()
    return sorted(set(found))


def test_a_child_forked_among_threads_can_use_unisono(tmp_path):
    assert run_ranks(2, _forks_among_threads, str(tmp_path), 25, timeout_s=110.0) == [["exit code 0"]] * 2


def _fork_beside_held_locks(group, store):
    """Another thread holds every process-wide lock of the Python code when this one forks."""
    asked, held, done = threading.Event(), threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for lock in unisono.base.fork.locks:
                stack.enter_context(lock)
            held.set()
            done.wait(CHILD_S)

    def child():
        unisono.base.handle.Handle(unisono.base.handle.Finished(), "barrier", None).when_done(asked.set)
        assert asked.is_set()
        with unisono.share_new_tensors():
            assert unisono.is_shared(torch.zeros(100_000))
        alone = unisono.Group.from_store(FileStore(store, 1), 0, 1)
        alone.split([0]).all_reduce(torch.ones(3))

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = _fork(child)
    done.set()
    thread.join()
    return _outcome(pid)


def test_a_child_finds_no_lock_held(tmp_path):
    assert run_ranks(1, _fork_beside_held_locks, str(tmp_path / "store")) == ["exit code 0"]


def _values_in_child(group):
    """What a child sees of tensors that its parent writes after the fork: of every size, and after the child wrote."""
    sizes = (1, 3, 33, 1000, 5000, 70_001, 1 << 20)
    tensors = [unisono.zeros(n) + 0 for n in sizes]
    tensors = [unisono.to_shared_(t.fill_(i + 1.0)) for i, t in enumerate(tensors)]
    del tensors[2]  # a hole
    values = [float(t[0]) for t in tensors]
    go_read, go_write = os.pipe()

    def child():
        os.read(go_read, 1)
        assert [t.unique().tolist() for t in tensors] == [[v] for v in values], "the parent's later writes are seen"
        for t in tensors:
            t += 0.5
        assert [t.unique().tolist() for t in tensors] == [[v + 0.5] for v in values]

        def grandchild():
            assert [t.unique().tolist() for t in tensors] == [[v + 0.5] for v in values]
            tensors[0].zero_()

        assert _outcome(_fork(grandchild)) == "exit code 0"
        assert tensors[0].tolist() == [values[0] + 0.5]
        mine = unisono.zeros(100)
        assert unisono.is_shared(mine) and not mine.any()
        assert unisono._core.heap_usage()["reserved"] < 2 << 20, "the child's heap is not its own"

    pid = _fork(child)
    for t in tensors:
        t.fill_(-1.0)
    os.write(go_write, b".")
    os.close(go_read)
    os.close(go_write)
    said = _outcome(pid)
    assert all(t.unique().tolist() == [-1.0] for t in tensors), "the child's write is seen by the parent"
    group.all_reduce(tensors[-1])
    return said, tensors[-1].unique().tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_a_child_keeps_the_values_at_its_fork(size):
    assert run_ranks(size, _values_in_child) == [("exit code 0", [-float(size)])] * size


def _values_beyond_the_limit(group):
    """Too much to copy: the child's writes are still its own, and it still has a heap of its own."""
    t = unisono.zeros(1 << 20)
    group.broadcast(t, 0)

    def child():
        t.fill_(5.0)
        assert t.unique().tolist() == [5.0]
        assert not unisono.zeros(10).any()

    said = _outcome(_fork(child))
    return said, t.unique().tolist()


def test_a_heap_too_large_to_copy():
    env = {"UNISONO_FORK_COPY_MAX": "1M"}
    assert run_ranks(2, _values_beyond_the_limit, env=env) == [("exit code 0", [0.0])] * 2


class _Rows(Dataset):
    def __init__(self, table, filled):
        self.table, self.filled = table, filled

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i):
        assert self.filled.wait(CHILD_S)
        return self.table[i]


def _data_loader(group):
    table = unisono.empty(8, 1000)
    table.copy_(torch.arange(8.0)[:, None].expand(8, 1000))
    filled = multiprocessing.get_context("fork").Event()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = DataLoader(_Rows(table, filled), batch_size=4, num_workers=2, multiprocessing_context="fork")
        batches = iter(loader)  # starts the workers
    table.fill_(-1.0)
    filled.set()
    return [batch.unique().tolist() for batch in batches]


def test_workers_of_a_data_loader_keep_the_values_at_their_start():
    assert run_ranks(2, _data_loader) == [[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]] * 2
