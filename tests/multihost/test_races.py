"""What other threads, Ctrl-C and failures do at bad moments: locks are free, errors have their types."""

import gc
import sys
import threading
import time

import pytest
import torch

import unisono
from tests.multihost.pretended import LAYOUTS, over_hosts
from unisono.testing import run_ranks
from unisono.transport.hosts import calling

SOON_S = 8.0  # of 25, at which a group's calls end


class Deceived:
    """A communicator that says there is a message, which another receive takes before anybody asks for it."""

    def __init__(self, comm):
        self._comm = comm

    def has_message(self, tag):
        return True

    def __getattr__(self, name):
        return getattr(self._comm, name)


def from_anyone(group):
    """Rank 0 is told of a message inside its host that is not there; then rank 2 sends one, and then nobody."""
    with over_hosts(group, LAYOUTS["2+2"], 25.0, together=False) as over:
        over.barrier()
        took, said, got = [], "", torch.zeros(3)
        if over.rank == 0:
            over.transport.comm = Deceived(over.transport.comm)
            began = time.monotonic()
            source = over.recv(got, None, 4)
            took.append(time.monotonic() - began)
            began = time.monotonic()
            try:
                over.recv(torch.zeros(3), None, 5, timeout_s=1.0)
            except unisono.CollectiveTimeoutError as error:
                said = str(error)
            took.append(time.monotonic() - began)
            group.barrier()
            return source, got.tolist(), "from anyone" in said, max(took) < SOON_S
        if over.rank == 2:
            time.sleep(0.5)
            over.send(torch.full((3,), 2.0), 0, 4)
        group.barrier()
        return None


def test_a_receive_from_anyone_does_not_wait_inside():
    """Neither for a message that is not there while one of another host is, nor beyond its own time limit."""
    assert run_ranks(4, from_anyone, timeout_s=60)[0] == (2, [2.0] * 3, True, True)


def mixed(group, rounds):
    """Receives from anyone, of one host and the other, several at once and withdrawn ones among them."""
    with over_hosts(group, LAYOUTS["2+2"], 40.0) as over:
        for n in (3, 100_000):
            for i in range(rounds):
                if over.rank == 0:
                    tensors = [torch.zeros(n) for _ in range(3)]
                    handles = [over.recv(t, None, 7, async_op=True) for t in tensors]
                    for handle in handles:
                        handle.wait()
                    assert sorted(t[-1].item() for t in tensors) == [10 * i + r for r in (1, 2, 3)]
                    assert sorted(handle._pending.source for handle in handles) == [1, 2, 3]
                else:
                    over.send(torch.full((n,), float(10 * i + over.rank)), 0, 7)
                group.barrier()  # or a rank sends two while another has sent none


@pytest.mark.parametrize("size", [4])
def test_receives_from_anyone(pool, size):
    pool.run(mixed, 10)


def called_back(group):
    """A callback that waits for another thread, which uses the mailbox: when a message fails inside of another's."""
    with over_hosts(group, LAYOUTS["2+2"], 25.0, together=False) as over:
        over.barrier()
        if over.rank == 3:
            time.sleep(0.3)
            over.close()
        elif over.rank == 0:
            free = []

            def callback():
                thread = threading.Thread(target=over.transport.mailbox.advance, daemon=True)
                thread.start()
                thread.join(SOON_S)
                free.append(not thread.is_alive())

            handles = [over.recv(torch.zeros(4), source, async_op=True) for source in (2, 3)]
            for handle in handles:
                handle._pending.on_done(callback)
            for handle in handles:
                with pytest.raises(unisono.PeerLostError):
                    handle.wait()
            end = time.monotonic() + 3 * SOON_S
            while len(free) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            group.barrier()
            return free
        group.barrier()
        return None


def test_callbacks_are_called_with_no_lock_held():
    assert run_ranks(4, called_back, timeout_s=80)[0] == [True, True]


class InterruptedLock:
    """Ctrl-C comes when it has just been acquired."""

    def __init__(self, lock):
        self._lock = lock

    def acquire(self):
        self._lock.acquire()
        raise KeyboardInterrupt

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *args):
        return self._lock.__exit__(*args)

    def __getattr__(self, name):
        return getattr(self._lock, name)


def interrupted(group):
    with over_hosts(group, LAYOUTS["2+2"], 25.0, together=False) as over:
        over.barrier()
        transport = over.transport
        if over.rank == 1:
            lock, transport._turn = transport._turn, InterruptedLock(transport._turn)
            with pytest.raises(KeyboardInterrupt):
                over.all_reduce(torch.ones(4))
            free = []
            thread = threading.Thread(target=lambda: free.append(lock.acquire(timeout=SOON_S)), daemon=True)
            thread.start()
            thread.join()
            transport._turn = threading.RLock()
            assert free == [True]
        began = time.monotonic()
        with pytest.raises(unisono.AbortedError, match=r"rank 1 on host 0 .* was interrupted"):
            over.all_reduce(torch.ones(4))
        return time.monotonic() - began < SOON_S


def test_interrupted_before_the_call():
    assert run_ranks(4, interrupted, timeout_s=60) == [True] * 4


def fails_to_join(group):
    unraised = []
    sys.unraisablehook = lambda about: unraised.append(repr(about.exc_value))

    def no_slots(transport):
        raise MemoryError("no memory for slots")

    calling.Slots = no_slots
    with pytest.raises(MemoryError), over_hosts(group, LAYOUTS["2+2"], 25.0):
        pass
    gc.collect()
    return unraised


def test_a_group_that_could_not_be_made():
    assert run_ranks(4, fails_to_join, timeout_s=60) == [[]] * 4
