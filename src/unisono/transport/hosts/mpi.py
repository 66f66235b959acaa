"""MPI as the engine between hosts, through mpi4py: an optional extra, for ranks that MPI's launcher has started.

MPI moves messages only while somebody calls it: a thread does so now and then, since ranks that wait for each other
inside a host do not, and whoever waits for a message calls ``advance`` more often. So it needs MPI_THREAD_MULTIPLE.
Bytes of a message, and messages of different length, may arrive in any order: what is received goes through memory of
the engine and is put into the receiver's when it is all there, large data straight to its place but its seal after it.
A message that is dropped is cancelled if it is to be received, and kept until it has gone if it is sent: MPI may still
read the memory.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from ctypes import memmove
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from .engine import MOST_FAREWELLS

_NAP_S = 0.0005
_STAGED_BYTES = 256 << 10  # larger receives are data without words in them


class MpiWork:
    """One message."""

    def __init__(self, engine: MpiEngine, request: Any, tensor: Tensor, into: Tensor, after: MpiWork | None) -> None:
        self._engine, self.request, self.tensor, self.into, self.after = engine, request, tensor, into, after
        self.is_over = False

    def wait(self, timeout: timedelta | None = None) -> None:
        while not self.is_over:
            self._engine.advance()
            time.sleep(_NAP_S)

    def __del__(self) -> None:
        if not self.is_over:
            self._engine.drop(self)


class MpiEngine:
    """Messages over a copy of MPI's world."""

    needs_advance = True
    eager_bytes = 0  # larger messages do not go through memory of the engine
    tells_ends = False  # when a rank dies MPI ends the others

    def __init__(self, store: Store, rank: int, size: int) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError("UNISONO_HOSTS_ENGINE=mpi needs mpi4py: pip install mpi4py, and an MPI") from error
        world = MPI.COMM_WORLD
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE or world.Get_size() < size:
            raise RuntimeError(
                f"UNISONO_HOSTS_ENGINE=mpi needs MPI_THREAD_MULTIPLE and at least {size} ranks started by mpiexec, "
                f"got thread level {MPI.Query_thread()} and {world.Get_size()} ranks"
            )
        if (world.Get_attr(MPI.TAG_UB) or 0) < (1 << 31) - 1:
            raise RuntimeError(f"UNISONO_HOSTS_ENGINE=mpi: the tags of this MPI end at {world.Get_attr(MPI.TAG_UB)}")
        store.set(f"mpi/{rank}", str(world.Get_rank()))
        ranks = [int(store.get(f"mpi/{r}")) for r in range(size)]
        # A communicator of its own: other engines of the process use the same tags.
        self._comm, self._byte = world.Create_group(world.Get_group().Incl(ranks)), MPI.BYTE
        self._status = MPI.Status
        self.contexts = 0
        self.farewells: deque[Any] = deque(maxlen=MOST_FAREWELLS)
        self.awaited: list[Any] = []
        self.given_up: dict[int, float] = {}
        self._lock = threading.RLock()  # a work may be dropped by the garbage collector, anywhere
        self._sending: list[tuple[Any, Tensor, weakref.ref[MpiWork]]] = []
        self._receiving: list[weakref.ref[MpiWork]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=_progress, args=(weakref.ref(self), self._ended), daemon=True)
        self._thread.start()
        atexit.register(self._end)  # before MPI ends, which mpi4py registered earlier

    def _end(self) -> None:
        self._ended.set()
        self._thread.join()

    def send(self, tensor: Tensor, peer: int, tag: int) -> MpiWork:
        with self._lock:
            request = self._comm.Isend([tensor.view(torch.uint8).numpy(), self._byte], peer, tag)
            work = MpiWork(self, request, tensor, tensor, None)
            self._sending.append((request, tensor, weakref.ref(work)))
            return work

    def recv(self, tensor: Tensor, peer: int, tag: int, after: MpiWork | None = None) -> MpiWork:
        staged = tensor.nbytes <= _STAGED_BYTES
        memory = torch.empty(tensor.nbytes, dtype=torch.uint8) if staged else tensor
        with self._lock:
            request = self._comm.Irecv([memory.view(torch.uint8).numpy(), self._byte], peer, tag)
            work = MpiWork(self, request, memory, tensor, after)
            self._receiving.append(weakref.ref(work))
            return work

    def wait(self, work: Any) -> None:
        work.wait()

    def advance(self) -> None:
        """Lets MPI work, puts what has come where it belongs, and forgets what has gone."""
        with self._lock:
            self._comm.Iprobe()
            left = []
            for sent in self._sending:
                if not sent[0].Test():
                    left.append(sent)
                elif (work := sent[2]()) is not None:
                    work.is_over = True
            self._sending = left
            self._receiving = [
                held for held in self._receiving if (work := held()) is not None and not _take(self, work)
            ]

    def drop(self, work: MpiWork) -> None:
        """A work that is not over was dropped; what it sends is kept in the list of those that are sent."""
        with self._lock:
            if work.tensor is work.into and any(request is work.request for request, _, _ in self._sending):
                return
            if work.request and not work.request.Test():
                work.request.Cancel()
                work.request.Wait()


def _take(engine: MpiEngine, work: MpiWork) -> bool:
    """Puts what has come into the receiver's memory; whether it was there."""
    if work.after is not None and not work.after.is_over:
        return False
    status = engine._status()
    if not work.request.Test(status):
        return False
    if work.tensor is not work.into:
        memmove(work.into.data_ptr(), work.tensor.data_ptr(), status.Get_count(engine._byte))
    work.is_over = True
    return True


def _progress(of: weakref.ref[MpiEngine], ended: threading.Event) -> None:
    while not ended.wait(_NAP_S):
        engine = of()
        if engine is None:
            return
        engine.advance()
        del engine
