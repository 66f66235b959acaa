"""Life after a death: the survivors' new group, and what the dead have left them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _core
from ..base.counter import number_of
from ..base.errors import AbortedError, PeerLostError, UnisonoError, with_facts
from ..base.kept import Inherited
from .ranks import read_ranks

if TYPE_CHECKING:
    from .group import Group


class Survivors:
    """What :func:`agree` has found: the communicator of those that are left, and who is not."""

    def __init__(self, size: int) -> None:
        self.members = list(range(size))  # by their numbers in the group that shrinks
        self.estates: dict[int, _core.Estate | str] = {}
        self.survival: Any = None  # of a group over hosts: how it shrinks again


def agree(group: Group, exclude: Sequence[int], limit_s: float, strict: bool) -> tuple[_core.Communicator, Survivors]:
    """Makes a communicator of the ranks that are left, again and again until nobody dies meanwhile.

    With ``strict``, others than ``exclude`` must not be lost: PeerLostError names them, and the group can be shrunk
    again with a longer list.
    """
    deadline = time.monotonic() + limit_s
    found = Survivors(group.size)
    excluded = sorted(set(read_ranks("exclude", exclude)))
    comm = group.transport
    if not hasattr(comm, "agree") and group._survival is None:
        raise ValueError(f'group "{group.name}" cannot shrink: its engine between hosts ends all ranks when one dies')
    if group._survival is not None:
        return _agree_over_hosts(group, excluded, limit_s, strict)
    rounds = 0
    while True:
        members, numbers = _agree_once(comm, excluded, max(0.001, deadline - time.monotonic()))
        if strict and len(members) < comm.size - len(excluded):
            raise _also_lost(group, [r for r in range(comm.size) if r not in members and r not in excluded])
        for r in range(comm.size):
            if r not in members:
                found.estates[found.members[r]] = comm.estate(r)
        rounds += 1
        identity = number_of(comm.id, members, numbers) | 1
        made = comm.adopt(f"{group.name}/shrunk", identity, group.timeout_s)
        if rounds > 1:
            comm.close("was shrunk", 0.0)
        found.members = [found.members[r] for r in members]
        comm, excluded = made, []
        try:
            comm.barrier(max(0.001, deadline - time.monotonic()), False)
        except (PeerLostError, AbortedError):
            continue  # another one is gone: the new group shrinks too
        return comm, found


def _agree_over_hosts(group: Group, excluded: list[int], limit_s: float, strict: bool) -> tuple[Any, Survivors]:
    """The same over hosts, or on one that was left of several: see transport/hosts/survivors.py."""
    found = Survivors(group.size)
    comm: Any = group.transport
    made, found.survival, found.members, found.estates = group._survival.shrink(
        comm, excluded, group.name, limit_s, group.timeout_s, strict
    )
    if hasattr(comm, "survival"):
        comm.survival = None  # the new group's now: closing the old one shall not end it
    return made, found


def _agree_once(comm: _core.Communicator, excluded: list[int], limit_s: float) -> tuple[list[int], list[int]]:
    try:
        return comm.agree(excluded, limit_s)
    except UnisonoError as error:
        error.op = "shrink"
        raise


def _also_lost(group: Group, lost: list[int]) -> PeerLostError:
    who = ", ".join(f"rank {r} (pid {group.transport.pids[r]})" for r in lost)
    error = PeerLostError(f'shrink of group "{group.name}": {who} is lost too; leave it out as well')
    return with_facts(error, "shrink", group.name, group.rank, lost)


def read_estate(rank: int, estate: _core.Estate) -> dict[str, Inherited]:
    """What a lost rank has kept, by name."""
    deadline = time.monotonic() + 2.0
    while not estate.is_final():
        # Its process may be on its way out: it left by an exception, and Python takes a moment to end.
        if time.monotonic() > deadline:
            raise ValueError(
                f"rank {rank} has left, but its process (pid {estate.pid}) still runs: its tensors are its own"
            )
        time.sleep(0.001)
    inherited = {}
    for name, dtype, shape, data, step, whole in estate.read():
        tensor = data.view(getattr(torch, dtype)).view(shape)
        inherited[name] = Inherited(tensor, step, whole)
    return inherited
