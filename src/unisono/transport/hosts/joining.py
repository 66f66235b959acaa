"""How ranks that may be on several hosts meet: who shares a host, the communicators inside, the engine between.

Two ranks share a host if one can connect to the other's Unix socket; its name is random, and abstract names belong to
one network namespace of one machine. Ranks of different users count as ranks of different hosts: they must not see each
other's memory. So each rank tries all others. If it reaches all of them, so does everybody, and
the group is one of shared memory as ever. Else ranks publish whom they reach, and their addresses; joining the
communicator then maps and checks what was found.

``UNISONO_PRETEND_HOSTS=0,0,1,1`` makes ranks of one machine behave as if they were on several hosts: host numbers by
rank.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from ... import _core
from ...base import settings
from ...base.addresses import address_of, addresses, choose_address
from ...base.errors import (
    AbortedError,
    CollectiveTimeoutError,
    MismatchError,
    SystemCallError,
    lines_of_ranks,
    with_facts,
)
from ...group import rendezvous
from .control import tell_absence
from .engine import Engine, gloo_interfaces, open_engine
from .layout import Layout
from .links import MOST_CONTEXTS, Links
from .presence import Listener, connect
from .survivors import Survival
from .transport import HostsTransport

_NO_BLOCK = -1  # told instead of one's block by a rank that has none


def _is_near(other: rendezvous.Plan, mine: rendezvous.Plan) -> bool:
    if "pretended" in other.place or "pretended" in mine.place:
        return other.place == mine.place
    if _user_in(other.place) != _user_in(mine.place):
        return False  # the core shares memory with processes of the same user only
    # One that was here and is gone counts too: joining says so at once.
    return _can_connect(other.listener) or other.place == mine.place


def _user_in(place: str) -> str:
    return place.partition(" ")[0]


def _can_connect(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(b"\0" + name.encode())
        except OSError as error:
            return error.errno == errno.EAGAIN  # it is there, and busy
        return True


def join(
    listener: _core.Listener, plans: Sequence[rendezvous.Plan], rank: int, name: str, nonce: bytes, identity: int,
    timeout_s: float, deadline_s: float, store: Store,
) -> Any:  # fmt: skip
    """The group's communicator, or if its ranks are on several hosts the transport over them."""
    size = len(plans)
    near = [r for r, plan in enumerate(plans) if r == rank or _is_near(plan, plans[rank])]
    names = [plans[r].listener for r in near]
    left_s = max(0.0, deadline_s - time.monotonic())
    if len(near) == size:
        return listener.join(rank, size, name, nonce, identity, timeout_s, names, left_s)
    views = _publish(store, rank, size, near, name, deadline_s)
    _compare_settings([view["settings"] for view in views], rank, name)
    hosts = sorted({tuple(view["near"]) for view in views})
    for r, view in enumerate(views):
        if [h for h in hosts if r in h] != [tuple(view["near"])]:
            raise SystemCallError(
                f'group "{name}": rank {r} reaches ranks {view["near"]} of its host, others differ: {hosts}'
            )
    comm = listener.join(near.index(rank), len(near), name, nonce, identity, timeout_s, names, left_s)
    layout = Layout(rank, hosts, [views[h[0]]["host"] for h in hosts])
    other = next(h[0] for h in hosts if rank not in h)
    address = choose_address(views[rank]["addresses"], views[other]["addresses"])
    listening = _listen(store, rank, address)
    left_s = max(1.0, deadline_s - time.monotonic())
    engine = open_engine(settings.hosts_engine, PrefixStore("engine", store), rank, size, address, left_s)
    survival = None
    if listening is not None:  # all have shown theirs before they had the engine
        shown = store.multi_get([f"listener/{r}" for r in range(size)])
        places = [(str(at), int(port)) for at, port in map(json.loads, shown)]
        survival = Survival(identity, rank, [p.rank for p in plans], places, plans[rank].place, listening)
    numbers, wide = list(range(size)), settings.hosts_fp32
    return HostsTransport(comm, layout, engine, 0, numbers, name, identity, timeout_s, wide, survival)


def _listen(store: Store, rank: int, address: str) -> Listener | None:
    """This rank's listener for the case that the group shrinks, shown to all; MPI ends all ranks when one dies."""
    if settings.hosts_engine == "mpi":
        return None
    named = gloo_interfaces() if settings.hosts_engine == "gloo" else []
    listener = Listener((address_of(named[0]) if named else "") or address)
    store.set(f"listener/{rank}", json.dumps(listener.place))
    return listener


def _publish(store: Store, rank: int, size: int, near: list[int], name: str, deadline_s: float) -> list[dict[str, Any]]:
    """Shows whom this rank reaches, and reads it of all."""
    mine = {"near": near, "addresses": addresses(), "host": socket.gethostname(), "settings": _shown_settings()}
    store.set(f"host/{rank}", json.dumps(mine))
    keys = [f"host/{r}" for r in range(size)]
    if not rendezvous.wait_for(store, keys, deadline_s, name):
        late = [r for r in range(size) if not store.check([keys[r]])]
        error = CollectiveTimeoutError(f'group "{name}": ranks {late} did not say which host they are on')
        raise with_facts(error, "join", name, rank, late)
    return [json.loads(value) for value in store.multi_get(keys)]


def _shown_settings() -> dict[str, Any]:
    """What must be equal on all ranks: with other settings ranks would send bytes that the others do not expect."""
    shown = {"UNISONO_HOSTS_ENGINE": settings.hosts_engine, "UNISONO_HOSTS_FP32": int(settings.hosts_fp32)}
    if settings.hosts_engine == "gloo":
        shown["interfaces in GLOO_SOCKET_IFNAME"] = max(1, len(gloo_interfaces()))
    return shown


def _compare_settings(shown: Sequence[dict[str, Any]], rank: int, name: str) -> None:
    differing = [r for r, of_rank in enumerate(shown) if of_rank != shown[rank]]
    if not differing:
        return
    keys = [key for key in shown[rank] if any(of_rank.get(key) != shown[rank][key] for of_rank in shown)]
    lines = {r: ", ".join(f"{key} {of_rank.get(key, 'none')}" for key in keys) for r, of_rank in enumerate(shown)}
    text = f'joining group "{name}": ranks disagree on settings that must be equal on all hosts{lines_of_ranks(lines)}'
    raise with_facts(MismatchError(text), "join", name, rank, differing)


rendezvous.join_hosts = join


def split(
    parent: HostsTransport, members: Sequence[int], contexts: Sequence[int], ports: Sequence[int], rank: int,
    listener: Listener | None, name: str, id: int, timeout_s: float,
) -> _core.Communicator | HostsTransport:  # fmt: skip
    """A group of some ranks of another: of one host only, then it is one of shared memory, or over the same engine.

    ``contexts`` are the highest that each member has seen on the engine: the new group's is one more than all of them.
    Groups inside a host need none. Numbers of closed groups are not used again: gloo remembers the receives that were
    posted for them, and would give a later message of the same tag to one of those. When there are none left, the group
    gets an engine of its own, whose connections end with it. ``ports`` are the members' listeners for the new group, at
    the addresses they have in the other one.
    """
    layout, engine, of_parent = parent.layout, parent.links.engine, parent.survival
    near = [i for i, r in enumerate(members) if layout.host_of[r] == layout.host]
    is_inside = len(near) == len(members)
    context = 0 if is_inside else max(contexts) + 1
    if context >= MOST_CONTEXTS and not (of_parent is not None and all(ports)):
        raise RuntimeError(
            f'split of group "{parent.name}": its ranks have made {MOST_CONTEXTS - 1} subgroups over several hosts, '
            "and there are no numbers for more, also if those are closed. Keep subgroups instead of making new ones, "
            "or make the whole group anew (destroy_process_group, init_process_group), which starts anew"
        )
    engine.contexts = max(engine.contexts, min(context, MOST_CONTEXTS - 1))
    places = [layout.mine.index(members[i]) for i in near]
    if is_inside:
        comm = _split_inside(parent.comm, places, near.index(rank), name, id, timeout_s)
        if listener is not None:
            listener.close()  # the core has its own way to shrink
        return comm
    hosts: dict[int, list[int]] = {}
    for i, r in enumerate(members):
        hosts.setdefault(layout.host_of[r], []).append(i)
    child = Layout(rank, list(hosts.values()), [layout.names[h] for h in hosts])
    numbers = [parent.links.numbers[r] for r in members]
    survival = None
    if listener is not None and of_parent is not None and all(ports):
        at = [(of_parent.places[r][0], port) for r, port in zip(members, ports, strict=True)]
        survival = Survival(id, rank, [of_parent.names[r] for r in members], at, of_parent.place, listener)
    try:
        comm = _split_inside(parent.comm, places, near.index(rank), name, id, timeout_s)
        if context >= MOST_CONTEXTS:
            assert survival is not None
            engine, context, numbers = _own_engine(survival, timeout_s), 0, list(range(len(members)))
        wide = parent.wide_sums
        return HostsTransport(comm, child, engine, context, numbers, name, id, timeout_s, wide, survival)
    except BaseException as error:
        if child.is_leader and context < MOST_CONTEXTS:
            tell_absence(
                Links(parent.links.engine, context, id, numbers, rank), child, f"could not join the split: {error}"
            )
        raise


def _own_engine(survival: Survival, timeout_s: float) -> Engine:
    """An engine for the ranks of one group, which meet at the first one's listener."""
    first = survival.rank == 0
    store = survival.listener.serve() if first else connect(survival.places[0])
    store.set_timeout(timedelta(seconds=timeout_s))
    prefix, address = PrefixStore("engine", store), survival.places[survival.rank][0]
    return open_engine(settings.hosts_engine, prefix, survival.rank, len(survival.names), address, timeout_s)


def _split_inside(
    comm: _core.Communicator, places: list[int], rank: int, name: str, id: int, timeout_s: float
) -> _core.Communicator:
    """The communicator of some of this host's ranks. Only these are asked: they tell one another by messages."""
    tag = -(id >> 2) - 1  # negative tags are ours
    theirs = {p: torch.zeros(1, dtype=torch.int64) for p in places if p != comm.rank}
    try:
        block = comm.make_block(len(places))
    except BaseException:
        told = [comm.send(torch.tensor([_NO_BLOCK]), p, tag, timeout_s, True) for p in theirs]
        for sent in told:
            sent.wait()  # type: ignore[union-attr]
        raise
    mine = torch.tensor([block])
    try:
        coming = [comm.recv(theirs[p], p, tag, timeout_s, True) for p in theirs]
        going = [comm.send(mine, p, tag, timeout_s, True) for p in theirs]
        for handle in (*coming, *going):
            handle.wait()  # type: ignore[union-attr]
        blocks = [block if p == comm.rank else int(theirs[p]) for p in places]
        absent = [i for i, other in enumerate(blocks) if other == _NO_BLOCK]
        if absent:
            text = f'group "{name}": rank {absent[0]} of those on this host could not join the split'
            raise with_facts(AbortedError(text), "split", name, rank, ())
        return comm.split(places, blocks, rank, name, id, timeout_s)
    except BaseException as error:
        comm.drop_block(block, rank, f"a rank could not join the split: {error}")
        raise
