"""Whether a rank on another host is still in a group, for those that shrink it.

Every rank of a group has a *listener*: a socket at the address that its engine has, behind which nobody answers. The
kernel closes it when the process dies, and the rank does when it leaves the group. So whoever is refused there, or
hears the connection end, knows that this rank is gone for good. When ranks are to meet at one of them, it puts a
TCPStore of torch behind its listener (survivors.py).

A network that is silent, or that says the host cannot be reached, is no proof: the rank may live, and ask the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
import weakref
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

Place = tuple[str, int]  # address and port

_BACKLOG = 4096
_CONNECT_S = 0.5
_GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


class Listener:
    """The socket that says that this rank is in a group; later also the store in which ranks meet."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._store: TCPStore | None = None
        self._fd = -1  # once it is the store's
        try:
            self._socket.bind((address, 0))
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self.place: Place = (address, self._socket.getsockname()[1])
        _listeners.add(self)

    def serve(self) -> Store:
        """The store behind the listener; whoever has connected before is answered now."""
        if self._store is None:
            address, port = self.place
            self._fd = self._socket.detach()
            self._store = TCPStore(
                address, port, None, True, timedelta(seconds=_CONNECT_S), False, master_listen_fd=self._fd
            )
        return self._store

    def close(self) -> None:
        """This rank has left: whoever waits for it here is told so."""
        _listeners.discard(self)
        self._socket.close()
        self._store = None

    def forget(self) -> None:
        """In a child of the process: else the parent would seem alive as long as the child."""
        self._socket.close()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)


def _forget_all() -> None:
    for listener in list(_listeners):
        listener.forget()


os.register_at_fork(after_in_child=_forget_all)


class Presence:
    """A connection to another rank's listener, which tells when that rank is gone."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._socket: socket.socket | None = None
        self._is_gone = False
        self._reached_at = 0.0

    def is_gone(self) -> bool:
        """Whether the rank is known to be gone; never waits."""
        if self._is_gone:
            return True
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._heed(self._socket.connect_ex(self.place))
        if self._socket is not None:
            self._look(self._socket)
        return self._is_gone

    def _look(self, connection: socket.socket) -> None:
        looked = select.poll()
        looked.register(connection, select.POLLIN | select.POLLOUT)
        if not looked.poll(0):
            return  # on its way
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._heed(error)
            return
        self._reached_at = self._reached_at or time.monotonic()
        try:
            self._is_gone = connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return  # it says nothing, and is there
        except OSError as failed:
            self._heed(failed.errno or 0)

    def _heed(self, error: int) -> None:
        if error in (0, errno.EINPROGRESS):
            return
        self._is_gone = error in _GONE
        self.close()  # else it is tried again

    def reached_s(self) -> float:
        """For how long it has been known to be there."""
        return time.monotonic() - self._reached_at if self._reached_at else 0.0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def connect(place: Place) -> Store:
    """The store behind another rank's listener; waits until there is one. RuntimeError if the rank goes meanwhile."""
    return TCPStore(*place, None, False, timedelta(seconds=_CONNECT_S), False)
