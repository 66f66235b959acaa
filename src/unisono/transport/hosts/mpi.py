"""MPI as the engine between hosts, through mpi4py: an optional extra, for ranks that MPI's launcher has started.

MPI moves messages only while somebody calls it, so whoever waits calls ``advance`` now and then. It needs threads
(MPI_THREAD_MULTIPLE). A message that is dropped is cancelled if it is to be received, and kept until it has gone if
it is sent: MPI may still read the memory.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

_NAP_S = 0.0005


class MpiWork:
    """One message."""

    def __init__(self, engine: MpiEngine, request: Any, tensor: Tensor, sending: bool) -> None:
        self._engine, self._request, self._tensor, self._sending = engine, request, tensor, sending

    def wait(self, timeout: timedelta | None = None) -> None:
        while not self._request.Test():
            time.sleep(_NAP_S)

    def __del__(self) -> None:
        self._engine.drop(self._request, self._tensor, self._sending)


class MpiEngine:
    """Messages over a copy of MPI's world."""

    needs_advance = True

    def __init__(self, store: Store, rank: int, size: int, limit_s: float) -> None:
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
        store.set(f"mpi/{rank}", str(world.Get_rank()))
        ranks = [int(store.get(f"mpi/{r}")) for r in range(size)]
        # A communicator of its own: other engines of the process use the same tags.
        self._comm, self._byte = world.Create_group(world.Get_group().Incl(ranks)), MPI.BYTE
        self.contexts = 0
        if (world.Get_attr(MPI.TAG_UB) or 0) < (1 << 31) - 1:
            raise RuntimeError(f"UNISONO_HOSTS_ENGINE=mpi: the tags of this MPI end at {world.Get_attr(MPI.TAG_UB)}")
        self._lock = threading.Lock()
        self._going: list[tuple[Any, Tensor]] = []  # sends that were dropped and have not gone

    def send(self, tensor: Tensor, peer: int, tag: int) -> MpiWork:
        data = [tensor.view(torch.uint8).numpy(), self._byte]
        return MpiWork(self, self._comm.Isend(data, peer, tag), tensor, True)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> MpiWork:
        data = [tensor.view(torch.uint8).numpy(), self._byte]
        return MpiWork(self, self._comm.Irecv(data, peer, tag), tensor, False)

    def wait(self, work: Any) -> None:
        work.wait()

    def advance(self) -> None:
        """Lets MPI work, and forgets sends that have gone."""
        self._comm.Iprobe()
        with self._lock:
            self._going = [(request, tensor) for request, tensor in self._going if not request.Test()]

    def drop(self, request: Any, tensor: Tensor, sending: bool) -> None:
        """A work was dropped."""
        if not request or request.Test():
            return
        if sending:
            with self._lock:
                self._going.append((request, tensor))
        else:
            request.Cancel()
            request.Wait()
