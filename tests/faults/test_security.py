"""Another user's process: it cannot join, though it knows everything, nor read or write what ranks share."""

import os
import subprocess
import sys

import pytest

import unisono
from unisono import _core
from unisono.testing import run_ranks

NONCE = b"n" * 16
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a process of another user")

# A perfect rank 1 of a group of two, as far as bytes go: the right hello, with a sealed heap that has the right header.
ATTACK = """
import fcntl, os, socket, struct, sys
name, uid, layout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setgid(uid); os.setuid(uid)
capacity, token = 1 << 24, b"t" * 16
heap = os.memfd_create("unisono", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.ftruncate(heap, capacity)
os.pwrite(heap, struct.pack("<QQ16sQ", 0x314f4e4f53494e55, layout, token, capacity), 0)
fcntl.fcntl(heap, 1033, 0x1 | 0x2 | 0x4)  # F_ADD_SEALS: seal, shrink, grow
hello = struct.pack("<QQ16s16sQQiiQQd128s", 0x6f6e6f73696e75, layout, b"n" * 16, token, capacity, 8192, 1, 2, 0,
                    1 << 20, 1.0, b"\\1")
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect("\\0" + name)
socket.send_fds(s, [hello], [heap])
print("said", flush=True)
try:
    print("answer", len(s.recv(4096)), flush=True)
except OSError as error:
    print("answer", error, flush=True)
sys.stdin.read()
"""


def attack_as(uid, name):
    return subprocess.Popen(
        [sys.executable, "-c", ATTACK, name, str(uid), str(_core.LAYOUT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def wait_for_stranger(uid, folder):
    """This process is rank 0 of two; the stranger says it is rank 1. What comes of it."""
    listener = _core.Listener()
    with attack_as(uid, listener.name) as stranger:
        assert stranger.stdout.readline() == b"said\n"
        try:
            comm = listener.join(0, 2, "stranger", NONCE, 5, 1.0, [listener.name, "nobody"])
        except unisono.UnisonoError as error:
            return str(error)
        else:
            comm.close("done", 0.0)
            return "joined"
        finally:
            stranger.stdin.close()
            answer = stranger.stdout.readline()
            hung_up = answer == b"answer 0\n" or b"reset" in answer
            assert uid == os.geteuid() or hung_up, answer  # without a word


@needs_root
def test_another_user_cannot_join_even_with_the_nonce(tmp_path):
    assert "not joined: 1" in wait_for_stranger(NOBODY, tmp_path)


def test_the_same_hello_of_the_same_user_is_a_rank(tmp_path):
    """The control: nothing but the user is wrong with it."""
    before = _core.isa()
    assert wait_for_stranger(os.geteuid(), tmp_path) == "joined"
    _core.set_isa(before)  # it said that it has plain kernels only, so this process uses no others


def test_without_the_nonce_the_same_user_is_a_stranger_too(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ATTACK", ATTACK.replace('b"n" * 16', 'b"m" * 16'))
    assert "not joined: 1" in wait_for_stranger(os.geteuid(), tmp_path)


def _as_nobody(group):
    """A child of another user tries all doors to a rank's memory."""
    secret = unisono.zeros(1000)
    secret += 7
    group.barrier()
    pid, read, write = os.getpid(), *os.pipe()
    fds = [fd for fd in os.listdir("/proc/self/fd") if "memfd:unisono" in _link(fd)]
    assert fds, "there is something to open"
    if os.fork() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        opened = []
        for path in [f"/proc/{pid}/mem", f"/proc/{pid}/maps", *(f"/proc/{pid}/fd/{fd}" for fd in fds)]:
            for flags in (os.O_RDONLY, os.O_RDWR):
                try:
                    os.close(os.open(path, flags))
                    opened.append(path)
                except OSError:
                    pass
        os.write(write, repr(opened).encode())
        os._exit(0)
    os.wait()
    opened = os.read(read, 10_000).decode()
    mode = os.stat(f"/proc/self/fd/{fds[0]}").st_mode & 0o777
    os.close(read), os.close(write)
    group.barrier()
    return opened, mode, int(secret.sum())


def _link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@needs_root
def test_another_user_cannot_open_the_memory():
    assert run_ranks(2, _as_nobody) == [("[]", 0o600, 7000)] * 2
