"""Joining that cannot succeed: it ends, at once where that can be known, and no peer reads memory that was given back.

Most cases hand the core addresses ("doors") as the store would, so that a rank can be made to fail at a chosen step.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from typing import ClassVar

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

import unisono
from unisono import _core
from unisono.group import rendezvous
from unisono.testing import run_ranks

NONCE = b"n" * 16
SOON_S = 15.0  # "at once" on a loaded machine; every limit that must not be waited for is longer
LONG_S = 60.0


def _listeners(group, path):
    """A listener of this rank, and everybody's names."""
    store = FileStore(path, group.size)
    listener = _core.Listener()
    store.set(str(group.rank), listener.name)
    return listener, [store.get(str(rank)).decode() for rank in range(group.size)]


def _join(listener, group, names, limit_s=LONG_S):
    return listener.join(group.rank, group.size, "test", NONCE, 77, limit_s, names)


@contextlib.contextmanager
def _ctrl_c_after(seconds):
    def handler(number, frame):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@contextlib.contextmanager
def _full_listener():
    """The name of a listener where nobody answers and nobody can get in line any more."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(b"\0unisono-full-%d" % os.getpid())
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                knock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                knock.setblocking(False)
                knock.connect(listener.getsockname())
        yield listener.getsockname()[1:].decode()


# -- a rank gives up while others have joined


def _one_gives_up(group, path):
    """Rank 2 reaches rank 0 but not rank 1; once rank 0 has its group, rank 2 is interrupted."""
    listener, names = _listeners(group, path)
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    group.barrier()
    if group.rank == 2:
        with _full_listener() as names[1]:
            before = _core.heap_usage()["in_use"]
            with pytest.raises(KeyboardInterrupt):
                _join(listener, group, names)
        held = _core.heap_usage()["in_use"]
        group.barrier()  # rank 0 has made its call
        group.barrier()  # all have left
        _core.Listener().join(0, 1, "alone", NONCE, 78, LONG_S, ["unused"]).close("done", 0.0)
        return held - before, _core.heap_usage()["in_use"] - before
    began = time.monotonic()
    comm = None
    with pytest.raises(unisono.AbortedError) as caught:
        comm = _join(listener, group, names)
        os.kill(group.transport.pids[2], signal.SIGUSR1)
        began = time.monotonic()
        comm.barrier(LONG_S, False)
    took = time.monotonic() - began
    group.barrier()
    assert (comm is not None) == (group.rank == 0)
    if comm is not None:
        comm.close("done", 0.0)
        del comm
    group.barrier()
    return str(caught.value), took


def test_a_rank_that_gives_up_tells_those_that_joined(tmp_path):
    """They learn it at their first call, or while they still join; its block is not used again before they left."""
    (first, took), (second, _), (held, left) = run_ranks(3, _one_gives_up, str(tmp_path / "store"))
    assert "rank 2 could not join: interrupted" in first, first
    assert "rank 2 could not join: interrupted" in second, second
    assert took < SOON_S
    assert held > 0, "the block was given back while rank 0 could still read it"
    assert left <= 0, "the block was kept after everybody had left"


def _gives_up_early(group, path):
    """Rank 2 never answers; rank 1 waits for it only for seconds, rank 0 much longer."""
    listener, names = _listeners(group, path)
    began = time.monotonic()
    text = ""
    if group.rank < 2:
        with pytest.raises(unisono.UnisonoError) as caught:
            _join(listener, group, names, 3.0 if group.rank else LONG_S)
        text = f"{type(caught.value).__name__}: {caught.value}"
    took = time.monotonic() - began
    group.barrier()
    return text, took


def test_whoever_still_joins_learns_it_too(tmp_path):
    (first, took), (second, _), _ = run_ranks(3, _gives_up_early, str(tmp_path / "store"))
    assert first.startswith("AbortedError") and "rank 1 could not join" in first and "joined: 2" in first, first
    assert second.startswith("CollectiveTimeoutError") and "2" in second, second
    assert took < SOON_S


def _dies_while_joining(group, path):
    listener, names = _listeners(group, path)
    if group.rank == 2:
        with contextlib.suppress(unisono.UnisonoError):
            group.recv(torch.zeros(1), 0, timeout_s=LONG_S)  # stays until rank 0 is done
        return None
    began = time.monotonic()
    if group.rank == 1:
        with _ctrl_c_after(1.0):
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            _join(listener, group, names)
    with pytest.raises(unisono.PeerLostError, match=r"rank 1 .*died|rank 1 closed"):
        _join(listener, group, names)
    return time.monotonic() - began


def test_a_rank_that_dies_after_it_met_some(tmp_path):
    took = run_ranks(3, _dies_while_joining, str(tmp_path / "store"), check=False)[0]
    assert isinstance(took, float), took
    assert took < SOON_S


# -- limits and Ctrl-C


def _interrupted(group, kind, path):
    store = {
        "hash": HashStore,
        "file": lambda: FileStore(path, 2),
        "prefix": lambda: PrefixStore("a", PrefixStore("b", FileStore(path, 2))),
        "tcp": lambda: TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False),
    }[kind]()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), _ctrl_c_after(0.3):
        unisono.Group.from_store(store, 0, 2, timeout_s=LONG_S)
    interrupted = time.monotonic() - began
    with pytest.raises(unisono.CollectiveTimeoutError, match=r"rank 1 did not come within 0.4 s") as caught:
        unisono.Group.from_store(store, 0, 2, name="other", timeout_s=0.4)
    assert (caught.value.op, caught.value.group, caught.value.peers) == ("join", "other", (1,))
    return interrupted


@pytest.mark.parametrize("kind", ["hash", "file", "prefix", "tcp"])
def test_ctrl_c_and_limit_with_every_store(kind, tmp_path):
    """On a rank of its own: torch's TCPStore keeps two fds after its end."""
    (took,) = run_ranks(1, _interrupted, kind, str(tmp_path / "store"), timeout_s=2 * LONG_S)
    assert took < SOON_S


class _SilentListener:
    """Is published like any other, then never answers."""

    def __init__(self):
        self._listener = _core.Listener()
        self.name = self._listener.name

    def join(self, *arguments):
        raise InterruptedError


class _NotingListener:
    """Notes how much time a handshake is given."""

    limits_s: ClassVar[list[float]] = []

    def __init__(self):
        self._listener = _core.Listener()
        self.name = self._listener.name

    def join(self, *arguments):
        self.limits_s.append(arguments[-1])
        return self._listener.join(*arguments)


def _late_and_silent(group, path):
    """Rank 1 shows itself when most of rank 0's time is over, and then does nothing."""
    store = FileStore(path, 2)
    kind = _SilentListener if group.rank else _NotingListener
    rendezvous._core = type("Core", (), {**vars(_core), "Listener": kind})
    began = time.monotonic()
    if group.rank == 0:
        with pytest.raises(unisono.CollectiveTimeoutError, match="1"):
            unisono.Group.from_store(store, 0, 2, name="late", timeout_s=5.0)
    else:
        store.wait(["unisono/late/1/at/0"])  # rank 0's time runs
        time.sleep(3.0)
        with pytest.raises(InterruptedError):
            unisono.Group.from_store(store, 1, 2, name="late", timeout_s=5.0)
    rendezvous._core = _core
    took = time.monotonic() - began
    group.barrier()  # the silent listener stays open until now
    return took, _NotingListener.limits_s


def test_one_limit_for_the_whole_of_joining(tmp_path):
    """The handshake is given what the store has left of it."""
    (took, limits_s), _ = run_ranks(2, _late_and_silent, str(tmp_path / "store"))
    assert took > 4.9
    assert len(limits_s) == 1 and limits_s[0] <= 2.0, limits_s


def _no_room(group):
    with _full_listener() as full:
        names = [full, "unused"]
        began = time.monotonic()
        with pytest.raises(unisono.CollectiveTimeoutError, match="0"):
            _core.Listener().join(1, 2, "full", NONCE, 77, 0.5, names)
        limit = time.monotonic() - began
        with pytest.raises(KeyboardInterrupt), _ctrl_c_after(0.3):
            _core.Listener().join(1, 2, "full", NONCE, 77, LONG_S, names)
    return limit


def test_a_listener_with_no_room(tmp_path):
    """connect() itself has the limit and sees Ctrl-C."""
    (took,) = run_ranks(1, _no_room, timeout_s=SOON_S)
    assert took >= 0.5


# -- strangers


def _among_many_strangers(group, path):
    """More silent connections wait than this process may have files open."""
    listener, names = _listeners(group, path)
    room = len(os.listdir("/proc/self/fd")) + 200
    crowd = "import socket, sys\nkept = []\nfor i in range(600):\n"
    crowd += "  s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
    crowd += "  s.connect(chr(0) + sys.argv[1])\n  kept.append(s)\n"
    crowd += "print('here', flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", crowd, listener.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as strangers:
        assert strangers.stdout.readline() == b"here\n"
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        group.barrier()
        comm = _join(listener, group, names)
        comm.barrier(LONG_S, False)
        comm.close("done", 0.2)
        strangers.stdin.close()
    return True


def test_many_strangers_take_no_room(tmp_path):
    assert run_ranks(2, _among_many_strangers, str(tmp_path / "store")) == [True, True]


FLOOD = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
names = sys.argv[1:]
print("here", flush=True)
kept = []
while True:  # as fast as it can, until it is killed
    for name in names:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.setblocking(False)
        try:
            s.connect(chr(0) + name)
        except OSError:
            pass
        kept.append(s)
    if len(kept) > 900:
        del kept[:100]
"""


def _flooded(group, path):
    listener, names = _listeners(group, path)
    if group.rank == 0:
        flood = subprocess.Popen([sys.executable, "-c", FLOOD, *names], stdout=subprocess.PIPE)
        flood.stdout.readline()
        time.sleep(0.5)  # the doors' queues fill
    group.barrier()
    try:
        comm = _join(listener, group, names)
        comm.barrier(LONG_S, False)
        comm.close("done", 0.2)
    finally:
        group.barrier()
        if group.rank == 0:
            flood.kill()
            flood.wait()
            flood.stdout.close()
    return True


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a process of another user")
def test_another_user_cannot_keep_ranks_apart(tmp_path):
    assert run_ranks(3, _flooded, str(tmp_path / "store")) == [True] * 3
