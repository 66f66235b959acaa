"""The process that `unisono.testing` forks its ranks from, with torch already imported.

It runs this file by its path, so nothing of unisono is imported here: a rank imports unisono itself, under
the environment its caller has at that moment. One thread, one loop:

* the control socket brings `start` (with the rank's channel, stdout and stderr as file descriptors) and
  `signal` messages; its end of file means the caller is gone, and then all ranks are killed and the folders
  the caller could not remove are removed;
* a rank that ends is reaped, and how it ended goes out on that rank's own channel, after all it sent itself.

Ranks die with this process (PR_SET_PDEATHSIG), whatever becomes of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
STACK_SIGNAL = signal.SIGUSR2  # makes a rank write its stacks
MAX_MESSAGE_BYTES = 65536


def become_rank(start: dict[str, Any], channel: socket.socket, out_fd: int, err_fd: int) -> None:
    """Take over the caller's environment, folder, import path and output, then serve calls."""
    null_fd = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null_fd, 0), (out_fd, 1), (err_fd, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with open(start["setting"], encoding="utf-8") as file:
        setting = json.load(file)
    # Open until the end: a crash, or the caller when it has waited too long, makes the rank write its stacks.
    stacks = open(os.path.join(setting["files"], f"stacks-{start['rank']}"), "w")  # noqa: SIM115
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks)
    os.environ.clear()
    os.environ.update(setting["env"])
    if setting["places"] is not None:
        enter_place(**setting["places"][start["rank"]])
    with contextlib.suppress(OSError):  # the caller's folder may be gone
        os.chdir(setting["folder"])
    sys.path[:] = setting["path"]
    sys.argv[:] = setting["argv"]

    from unisono.testing.rank_main import serve_calls

    serve_calls(channel, start["rank"], setting)


def enter_place(namespace: str, env: dict[str, str]) -> None:
    """Move into a network namespace, with the environment that belongs to it."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.environ.update(env)


class RankServer:
    """Forks, signals and reaps ranks until the caller is gone, then kills those that are left and exits."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._caller, self._pid = os.getppid(), os.getpid()
        self._channels: dict[int, socket.socket] = {}
        self._folders: set[str] = set()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)

    def serve(self) -> NoReturn:
        signal.set_wakeup_fd(self._wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller and its ranks
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # until a rank can answer it
        while os.getppid() == self._caller:
            # The timeout is for a caller that died while a child of its own still holds the control socket.
            readable, _, _ = select.select([self._control, self._wake_read], [], [], 1.0)
            if self._wake_read in readable:
                self._wake_read.recv(4096)
            self._reap_ranks()
            if self._control in readable and not self._obey():
                break
        self._end_ranks()

    def _obey(self) -> bool:
        """Does what the next message says; False if the caller is gone."""
        data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        message = json.loads(data)
        if "rank" in message:
            self._folders.add(os.path.dirname(message["setting"]))
            self._start_rank(message, socket.socket(fileno=fds[0]), fds[1], fds[2])
        elif message["pid"] in self._channels:  # not reaped yet, so the number still means this rank
            os.kill(message["pid"], message["signal"])
        return True

    def _start_rank(self, start: dict[str, Any], channel: socket.socket, out_fd: int, err_fd: int) -> None:
        pid = os.fork()
        if pid:
            os.close(out_fd)
            os.close(err_fd)
            self._channels[pid] = channel
            _tell(channel, pid=pid)
            return
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for other in (self._control, self._wake_read, self._wake_write, *self._channels.values()):
                other.close()
            become_rank(start, channel, out_fd, err_fd)
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)

    def _reap_ranks(self) -> None:
        while self._channels:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            channel = self._channels.pop(pid)
            _tell(channel, exit_code=os.waitstatus_to_exitcode(status))
            channel.close()

    def _end_ranks(self) -> NoReturn:
        for pid in self._channels:
            os.kill(pid, signal.SIGKILL)
        for pid in self._channels:
            os.waitpid(pid, 0)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _tell(channel: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # the caller may not listen to this rank any more
        channel.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])
    importlib.import_module("torch.distributed")  # what makes the fork server worth having
    control = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError):  # the caller is gone already
        control.send(b"ready")
    RankServer(control).serve()
