"""How ranks find each other: through any torch ``Store``, in a few keys per group.

``uses/<rank>`` counts how often a rank has joined by this name, so that a name can be used again; all else is below
that number. ``plan`` is written by whoever comes first: what all must agree on, and the nonce. ``at/<rank>`` has the
plan of each rank and where its listener is. ``dispute`` is there once a rank's plan differs from the first one: ranks
that can never meet learn it at once, and who wanted what. ``failed`` has the error of a rank that cannot join.

All waiting is polling with ``check``, which every store answers at once: ``wait`` blocks in C++, where Ctrl-C does not
reach it, and each store has another exception for its end.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from .. import _core
from ..base import log, settings
from ..base.addresses import addresses
from ..base.errors import (
    CollectiveTimeoutError,
    MismatchError,
    SystemCallError,
    UnisonoError,
    lines_of_ranks,
    with_facts,
)
from ..version import __version__
from .ranks import check_rank, numbers_elsewhere

VERSION = f"{__version__}, memory layout {_core.LAYOUT}"

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.0005, 0.05
_MOST_SHOWN = 16  # of a list of ranks

# How ranks join once their plans are known; transport/hosts/joining.py sets it. A hook and no import: transports are
# looked up by group, so they are above it, and yet a group over several hosts is made of them.
join_hosts: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Plan:
    """What one rank thinks the group is; all but the last four must be equal."""

    version: str
    size: int
    members: list[int]
    rank: int  # of this rank, one of `members`
    listener: str
    nonce: str
    place: str = ""

    @classmethod
    def read(cls, value: bytes) -> Plan:
        try:
            return cls(**json.loads(value))
        except (TypeError, ValueError):
            raise SystemCallError(
                f"the store holds {value[:80]!r} where a rank's plan should be: another version of unisono?"
            ) from None

    def written(self) -> str:
        return json.dumps(asdict(self))

    def differs(self, other: Plan) -> str:
        """What the two disagree on, in words; empty if they can meet."""
        if self.version != other.version:
            return "the version of unisono"
        if self.size != other.size:
            return "the size"
        return "" if self.members == other.members else "the ranks"

    def line(self, with_version: bool) -> str:
        shown = ", ".join(map(str, self.members[:_MOST_SHOWN])) + (", ..." if self.size > _MOST_SHOWN else "")
        return (f"{self.version}   " if with_version else "") + f"{self.size} ranks   [{shown}]"


def missing_variables() -> str:
    """Which variables, with which torchrun describes all ranks, are not set, and what to do; empty if all are."""
    missing = ", ".join(k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ)
    return missing and f"{missing} not set: start the ranks by `torchrun --nproc-per-node=2 script.py`"


def place_of(rank: int) -> str:
    """The user, and where this rank seems to be: that is only for telling one that is gone from one elsewhere."""
    pretended = settings.pretend_hosts.split(",")
    if settings.pretend_hosts and rank < len(pretended):
        return f"pretended {pretended[rank].strip()}"
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        boot, network = "", 0
    return f"{os.geteuid()} {boot} {network} {socket.gethostname()} {' '.join(addresses())}"


def meet(
    store: Store, rank: int, size: int, members: Sequence[int] | None, name: str, timeout_s: float, deadline_s: float,
    place: str = "",
) -> Any:  # fmt: skip
    """Joins the group ``name``; every rank calls this with the same store, size, members and name.

    ``members`` are the numbers the ranks have elsewhere, 0 … size-1 if None; errors call the ranks by them. Joining
    ends at ``deadline_s``, of time.monotonic(); ``timeout_s`` is the limit of later calls. ``place`` is what this rank
    has said before of where it is.
    """
    check_rank("rank", rank, size)
    numbers = list(range(size)) if members is None else numbers_elsewhere("ranks", members, size)
    me = numbers[rank]
    assert join_hosts is not None
    use = store.add(f"unisono/{name}/uses/{me}", 1)
    prefix = f"unisono/{name}/{use}"
    try:
        listener = _core.Listener()
    except UnisonoError as error:  # no memory for a heap, or the system refuses one
        store.set(f"{prefix}/failed", f"rank {me} cannot join: {error}")
        raise
    mine = Plan(VERSION, size, numbers, me, listener.name, secrets.token_hex(16), place or place_of(me))
    first = Plan.read(store.compare_set(f"{prefix}/plan", "", mine.written()))
    if not set(first.members) & set(numbers):
        # Another group of the same name, as torch makes them: each half of the ranks cuts itself into groups.
        prefix = f"{prefix}/of/{min(numbers)}"
        first = Plan.read(store.compare_set(f"{prefix}/plan", "", mine.written()))
    store.set(f"{prefix}/at/{me}", mine.written())
    disputed = bool(mine.differs(first))
    if disputed:
        store.set(f"{prefix}/dispute", mine.written())
    keys = [f"{prefix}/at/{r}" for r in numbers]
    nap_s = _SHORTEST_NAP_S
    warn_s = time.monotonic() + min(timeout_s / 4, log.WARN_AFTER_S)
    while not disputed and not store.check(keys):
        if time.monotonic() > deadline_s:
            raise _late(store, name, use, mine, rank, timeout_s, [not store.check([key]) for key in keys])
        if time.monotonic() > warn_s:
            warn_s = math.inf
            late = ", ".join(str(r) for r, key in zip(numbers, keys, strict=True) if not store.check([key]))
            log.warn(f'joining group "{name}": rank {me} of {size} waits for rank {late}, which has not come yet')
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        disputed = store.check([f"{prefix}/dispute"])
        if store.check([f"{prefix}/failed"]):
            raise SystemCallError(f'group "{name}": {store.get(f"{prefix}/failed").decode()}')
    plans = [] if disputed else [Plan.read(value) for value in store.multi_get(keys)]
    if disputed or any(mine.differs(plan) for plan in plans):
        raise _mismatch(store, prefix, name, rank, mine, first)
    nonce = bytes.fromhex(first.nonce)
    identity = int.from_bytes(nonce[:8], "little") | 1
    inner = PrefixStore(prefix, store)
    return join_hosts(listener, plans, rank, name, nonce, identity, timeout_s, deadline_s, inner)


def wait_for(store: Store, keys: list[str], deadline_s: float, group: str = "") -> bool:
    """Waits until the store has all keys; False at ``deadline_s``, of time.monotonic().

    Of the keys of a ``group``, by its name, also ``failed`` is heeded.
    """
    nap_s = _SHORTEST_NAP_S
    while not store.check(keys):
        if group and store.check(["failed"]):
            raise SystemCallError(f'group "{group}": {store.get("failed").decode()}')
        if time.monotonic() > deadline_s:
            return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    return True


def _late(
    store: Store, name: str, use: int, mine: Plan, rank: int, timeout_s: float, missing: list[bool]
) -> CollectiveTimeoutError:
    late = [r for r, is_missing in zip(mine.members, missing, strict=True) if is_missing]
    who = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
    text = f'group "{name}": {who} did not come within {timeout_s:g} s'
    for r in late:
        other = store.add(f"unisono/{name}/uses/{r}", 0)
        if other or use > 1:  # it may have come, but not in the same turn
            text += f"\n  rank {mine.rank} has joined by this name {use} times, rank {r} {other} times"
    return with_facts(CollectiveTimeoutError(text), "join", name, rank, map(mine.members.index, late))


def _mismatch(store: Store, prefix: str, name: str, rank: int, mine: Plan, first: Plan) -> MismatchError:
    """Every rank's plan that is known by now, and which of them differ."""
    plans = {first.rank: first}
    if store.check([f"{prefix}/dispute"]):
        other = Plan.read(store.get(f"{prefix}/dispute"))
        plans[other.rank] = other
    for r in {r for plan in (mine, *plans.values()) for r in plan.members}:
        if store.check([f"{prefix}/at/{r}"]):
            plans[r] = Plan.read(store.get(f"{prefix}/at/{r}"))
    plans[mine.rank] = mine
    peers = [r for r, plan in sorted(plans.items()) if mine.differs(plan)]
    what = next(filter(None, (a.differs(b) for a in plans.values() for b in plans.values())), "the ranks")
    lines = {r: plan.line("version" in what) for r, plan in sorted(plans.items())}
    error = MismatchError(f'joining group "{name}": ranks disagree on {what}{lines_of_ranks(lines)}')
    return with_facts(error, "join", name, rank, peers)
