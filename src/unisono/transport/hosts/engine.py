"""Send and receive between hosts: what the transport asks of an engine, and the engines there are.

The default is torch's gloo on a process group of its own, which needs no launcher; ``UNISONO_HOSTS_ENGINE`` names
another backend of torch.distributed, or ``mpi`` for mpi4py. An engine only posts: nobody waits in it for data, since a
wait of gloo cannot be ended. Whoever needs to know looks at the memory (links.py).
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _enable_record_function as _record_functions  # of this thread
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, _DistributedBackendOptions

from ...base.addresses import interface_of

log = logging.getLogger("unisono")

MOST_FAREWELLS = 1 << 14
GLOO_EAGER_BYTES = 1 << 20
_FOR_EVER = timedelta(days=20)


class Work(Protocol):
    def wait(self, timeout: timedelta = ..., /) -> Any: ...


class Engine(Protocol):
    """Messages between processes, matched by source, tag and order; tags are from 0 up to 2**31.

    What is received is in memory byte by byte in the order of sending; a message never before the one ``after`` which
    it was posted.
    """

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work: ...
    def recv(self, tensor: Tensor, peer: int, tag: int, after: Any = None) -> Work: ...
    def wait(self, work: Work) -> None:
        """Waits as long as it takes, or until the connection closes; only threads that may be abandoned call it."""

    def advance(self) -> None:
        """For engines without threads of their own: makes messages go on."""

    eager_bytes: int  # how much data a message may have whose words, at its begin and end, say that it is here
    needs_advance: bool
    tells_ends: bool  # posting fails when the peer's connection is closed, and messages nobody receives do no harm
    farewells: deque[Any]  # the last messages of closed groups
    awaited: list[Any]  # receives of closed groups that are still posted
    given_up: dict[int, float]  # rank -> when messages with it were dropped half-way: later ones may never arrive
    contexts: int  # the highest number of a group on this engine that this process knows


class BackendEngine:
    """A backend of torch.distributed.

    Messages are hidden from torch's profiler: a receive may be posted while it runs and end long after, and torch then
    writes the end of the event into memory that the profiler has freed.
    """

    needs_advance = False

    def __init__(self, rank: int, make: Callable[[], Sequence[Any]], tells_ends: bool = False) -> None:
        self.tells_ends = tells_ends
        self.eager_bytes = GLOO_EAGER_BYTES if tells_ends else 0
        self._rank = rank
        self.farewells: deque[Any] = deque(maxlen=MOST_FAREWELLS)
        self.awaited: list[Any] = []
        self.given_up: dict[int, float] = {}
        self._groups = make()
        self.contexts = 0

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        _record_functions(False)
        try:
            return self._group_to(peer).send([tensor], peer, tag)  # type: ignore[no-any-return]
        finally:
            _record_functions(True)

    def recv(self, tensor: Tensor, peer: int, tag: int, after: Any = None) -> Work:
        _record_functions(False)
        try:
            return self._group_to(peer).recv([tensor], peer, tag)  # type: ignore[no-any-return]
        finally:
            _record_functions(True)

    def _group_to(self, peer: int) -> Any:
        """Always the same for two ranks: only messages of one connection arrive in the order of sending."""
        return self._groups[min(self._rank, peer) % len(self._groups)]

    def wait(self, work: Work) -> None:
        work.wait(_FOR_EVER)

    def advance(self) -> None:
        """Nothing to do."""


def open_engine(name: str, store: Store, rank: int, size: int, address: str, limit_s: float) -> Engine:
    """The engine over all ranks; every rank calls this. ``address`` is this host's as the others reach it."""
    if name == "mpi":
        from .mpi import MpiEngine

        return MpiEngine(store, rank, size)
    limit = timedelta(seconds=max(1.0, limit_s))
    if name != "gloo":
        return BackendEngine(rank, lambda: [_other_backend(name, store, rank, size, limit)])
    interfaces = gloo_interfaces()
    if interfaces:
        log.info("between hosts: gloo on %s (GLOO_SOCKET_IFNAME), one of them for two ranks", ", ".join(interfaces))
        places: list[dict[str, str]] = [{"interface": interface} for interface in interfaces]
    else:
        log.info("between hosts: gloo on %s (%s)", address, interface_of(address) or "no interface has it")
        places = [{"hostname": address}]
    make = partial(_gloo_groups, places, store, rank, size, limit)
    return BackendEngine(rank, make, tells_ends=True)


def gloo_interfaces() -> list[str]:
    """Those that GLOO_SOCKET_IFNAME names."""
    return [name.strip() for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]


def _gloo_groups(
    places: Sequence[dict[str, str]], store: Store, rank: int, size: int, limit: timedelta
) -> list[ProcessGroupGloo]:
    """One group for each interface. A single one would take another interface for each tag, and so lose the order."""
    groups = []
    for number, place in enumerate(places):
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [ProcessGroupGloo.create_device(**place)]
        groups.append(ProcessGroupGloo(PrefixStore(f"interface {number}", store), rank, size, options))
    return groups


def _other_backend(name: str, store: Store, rank: int, size: int, limit: timedelta) -> Any:
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        known = ", ".join(sorted(k.lower() for k in dist.Backend._plugins))
        raise ValueError(f"UNISONO_HOSTS_ENGINE must be gloo, mpi or a registered backend ({known}), got {name!r}")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, limit)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = limit, "unisono hosts"
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)
