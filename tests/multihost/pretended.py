"""Groups over pretended hosts, out of the ranks of a pool: the logic of several hosts, tested anywhere."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch.distributed as dist

import unisono
from unisono.base import settings
from unisono.transport.hosts.transport import HostsTransport

LAYOUTS = {
    "2+2": "0,0,1,1",
    "1+3": "0,1,1,1",
    "interleaved": "0,1,0,1",
    "3 hosts": "0,1,1,2",
    "4 hosts": "0,1,2,3",
}

_turns = itertools.count()  # the same on all ranks, since all run the same functions


@contextlib.contextmanager
def pretending(hosts: str) -> Iterator[None]:
    """Ranks that join meanwhile take one another for ranks of these hosts."""
    before, settings.pretend_hosts = settings.pretend_hosts, hosts
    try:
        yield
    finally:
        settings.pretend_hosts = before


@contextlib.contextmanager
def over_hosts(
    group: unisono.Group, hosts: str, timeout_s: float = 60.0, together: bool = True
) -> Iterator[unisono.Group]:
    """A group of the pool's ranks over pretended hosts, closed at the end, by all ``together`` if none may be dead."""
    store = dist.PrefixStore(f"hosts-{next(_turns)}", group._store)
    with pretending(hosts):
        made = unisono.Group.from_store(store, group.rank, group.size, name="hosts", timeout_s=timeout_s)
    assert isinstance(made.transport, HostsTransport)
    with made:
        yield made
        if together:
            group.barrier()  # nobody leaves while others still talk
