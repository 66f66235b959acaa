"""Groups of ranks, on one host or on several: how they are made, split, shrunk and left. The verbs are in verbs.py."""

from __future__ import annotations

import atexit
import secrets
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from .. import _core
from ..base import settings
from ..base.counter import Counter, number_of
from ..base.errors import ClosedError, MismatchError, make_argument_error, with_facts
from ..base.kept import Inherited
from . import rendezvous, survivors
from .ranks import different_ranks
from .verbs import Seconds, Verbs

_LINGER_S = 0.2  # how long close() waits for the others to close too
_open_groups: weakref.WeakSet[Group] = weakref.WeakSet()
_by_key: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
_numbers = Counter()


class Group(Verbs):
    """Ranks that call collectives together: on one host through shared memory, between hosts by gloo.

    Make one with :meth:`from_store`, :meth:`from_env` or :meth:`split`. ``rank`` is this process's number in the group,
    ``ranks`` the numbers its members have in the group it was split from, or those given to :meth:`from_store` (0 …
    size-1 if there are none). ``key`` is a name no other group of this process has: torch operators carry it, and any
    ``group`` argument takes it.

    >>> from unisono.testing import run_ranks
    >>> import torch
    >>> def add(group):
    ...     t = torch.full((2,), float(group.rank + 1))
    ...     group.all_reduce(t)
    ...     return t.tolist()
    >>> run_ranks(2, add)
    [[3.0, 3.0], [3.0, 3.0]]
    """

    rank: int = -1  #: This process's number in the group, 0 … size-1.
    size: int = 0  #: How many ranks there are.
    name: str = ""  #: What errors call the group.
    key: str = ""  #: A name that no other group of this process has.
    ranks: list[int]  #: The members' numbers in the group this one was split from.

    def __init__(
        self, comm: _core.Communicator, ranks: Sequence[int], timeout_s: float, store: Store | None = None
    ) -> None:
        self.transport = comm  # what moves the data; see transport/protocol.py
        self.rank = comm.rank
        self.size = comm.size
        self.name = comm.name
        self.key = f"{self.name}@unisono{_numbers.next()}"
        self.ranks = list(ranks)
        self.timeout_s = timeout_s
        self._store = store
        self._splits = Counter()
        self._estates: dict[int, _core.Estate | str] = {}  # of lost ranks; for those of other hosts, where they were
        self._survival: Any = getattr(comm, "survival", None)  # how a group over hosts shrinks
        _open_groups.add(self)
        _by_key[self.key] = self

    # -- coming and going

    @classmethod
    def from_store(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        ranks: Sequence[int] | None = None,
        name: str = "world",
        timeout_s: Seconds = None,
    ) -> Group:
        """Joins a group through a torch Store; every rank calls this with the same store, size, ranks and name.

        Ranks that were told different sizes or lists get MismatchError.

        Args:
            store: any torch Store that all ranks reach
            rank: this process's number, from 0
            size: how many ranks there are
            ranks: the numbers the members have elsewhere, in a world they come from; they become ``group.ranks``. None:
                0 … size-1
            name: what errors call the group; another name is another group on the same store
            timeout_s: seconds for joining, and for every later call that has no limit of its own; None: UNISONO_TIMEOUT

        Returns:
            The group.
        """
        limit = settings.timeout_s if timeout_s is None else timeout_s
        comm = rendezvous.meet(store, rank, size, ranks, name, limit, time.monotonic() + limit)
        return cls(comm, range(size) if ranks is None else ranks, limit, store)

    @classmethod
    def from_env(cls, *, name: str = "world", timeout_s: Seconds = None) -> Group:
        """Joins the group of all ranks that torchrun (or the same environment variables) describes.

        Args:
            name: what errors call the group
            timeout_s: seconds for joining, and for every later call that has no limit of its own; None: UNISONO_TIMEOUT

        Returns:
            The group.
        """
        if missing := rendezvous.missing_variables():
            raise ValueError(
                f"{missing}, or make the group with Group.from_store; tests and notebooks: unisono.testing.run_ranks"
            )
        limit = settings.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        store, rank, size = next(iter(torch_rendezvous("env://", timeout=timedelta(seconds=limit))))
        return cls(rendezvous.meet(store, rank, size, None, name, limit, deadline), range(size), limit, store)

    def split(self, ranks: Sequence[int] | None, *, name: str | None = None, timeout_s: Seconds = None) -> Group | None:
        """Makes a group of some of this group's ranks, in the order given. All ranks of this group call it together.

        Each rank gives the list it wants to be in, the same on all its members, or None to be in none. Two lists in one
        call make two groups::

            rank 0, 2: group.split([0, 2])   ->  ranks 0 and 1 of one new group
            rank 1, 3: group.split([3, 1])   ->  rank 3 is 0, rank 1 is 1 of another

        Args:
            ranks: the members of the group this rank wants to be in, or None
            name: what errors call the new group; the same on its members
            timeout_s: the new group's limit; None: as this group's

        Returns:
            The new group, or None where ``ranks`` is None.
        """
        members = [] if ranks is None else different_ranks("ranks", ranks, self.size)
        if ranks is not None and self.rank not in members:
            raise make_argument_error("ranks_with_own", "ranks", self.rank, members)
        number = self._splits.next()  # all ranks split together, so they agree on it
        child = f"{self.name}/{number}" if name is None else name
        block = self.transport.make_block(len(members)) if members else 0
        # Every rank shows whom it wants, by what name, where its control block is, and a number nobody had before.
        wanted = members + [-1] * (self.size - len(members))
        mine = torch.tensor([number_of(name), block, secrets.randbits(62), *wanted], dtype=torch.int64)
        gathered = torch.empty(self.size, len(mine), dtype=torch.int64)
        comm, known, limit = self.transport, True, self.timeout_s if timeout_s is None else timeout_s
        try:
            self.all_gather(gathered, mine)
            shown = gathered.tolist()
            if any(shown[r][3:] != wanted or shown[r][0] != shown[self.rank][0] for r in members):
                known = False  # whoever wants this rank finds the same
                raise self._split_mismatch(members, [(row[0], [r for r in row[3:] if r >= 0]) for row in shown])
            if not members:
                return None
            blocks = [shown[r][1] for r in members]
            identity = number_of(comm.id, shown, members) | 1
            made = comm.split(members, blocks, members.index(self.rank), child, identity, limit)
        except BaseException as error:
            # It may have gone well on other members: they learn that this rank does not come.
            if members:
                why = f"rank {self.rank} could not join the split: {error}"
                comm.drop_block(block, members.index(self.rank), why if known else None)
            raise
        return Group(made, [self.ranks[r] for r in members], limit)

    def _split_mismatch(self, members: list[int], wishes: list[tuple[int, list[int]]]) -> MismatchError:
        """``wishes`` are, by rank, the number of the name and the list that each rank gave."""
        mine = wishes[self.rank]
        differing = tuple(r for r in members if wishes[r] != mine)
        what = "the ranks" if any(wishes[r][1] != members for r in differing) else "the name"
        text = f'split of group "{self.name}": ranks disagree on {what}'
        for r, (name, wanted) in enumerate(wishes):
            text += f"\n  rank {r}   {wanted or 'none'}"
            if r in differing:
                text += "   <- differs" if name == mine[0] else "   <- another name"
        return with_facts(MismatchError(text), "split", self.name, self.rank, differing)

    def shrink(self, *, exclude: Sequence[int] = (), timeout_s: Seconds = None) -> tuple[Group, list[int]]:
        """Goes on without ranks that died or left: the group of those that are left, and who is not in it.

        Every survivor calls it, when a call has failed or at any other time; all get the same ranks, in their old
        order, also if another one dies meanwhile. This group is given up and closed::

            rank 1 of 0, 1, 2 dies     rank 0:  new, lost = group.shrink()  ->  rank 0 of 2, [1]
                                       rank 2:  new, lost = group.shrink()  ->  rank 1 of 2, [1]

        It needs no store, so it does not matter which rank had that. What the lost ranks have kept
        (:func:`unisono.keep`) is in :meth:`inherit` of the new group.

        Args:
            exclude: ranks to leave out although they are alive, such as stopped ones; the same on all callers
            timeout_s: how long to wait for a rank that lives and does not call it; None: the group's limit

        Returns:
            The group of the survivors, and the ranks of this group that are not in it.
        """
        return self._shrink(exclude, timeout_s, strict=False)

    def _shrink(self, exclude: Sequence[int], timeout_s: Seconds, strict: bool) -> tuple[Group, list[int]]:
        limit = self.timeout_s if timeout_s is None else timeout_s
        comm, found = survivors.agree(self, exclude, limit, strict)
        self._survival = None  # the new group's now
        self._leave("was shrunk", 0.0)
        new = Group(comm, [self.ranks[r] for r in found.members], self.timeout_s)
        new._estates, new._survival = found.estates, found.survival
        return new, sorted(found.estates)

    def inherit(self, rank: int) -> dict[str, Inherited]:
        """What a lost rank has kept, by name: see :class:`Inherited`.

        Args:
            rank: one of those that :meth:`shrink` named

        Returns:
            By name, what that rank kept: its tensor, its step, and whether it is whole.
        """
        if rank not in self._estates:
            raise ValueError(f"argument 'rank' must be one of the lost ranks {sorted(self._estates)}, got {rank}")
        estate = self._estates[rank]
        if isinstance(estate, str):
            raise ValueError(f"{estate} was on another host: what it kept can be read by ranks of that host only")
        return survivors.read_estate(rank, estate)

    def close(self) -> None:
        """Leaves the group. Pending calls end with an error, the others learn that this rank left. Twice is fine."""
        self._leave("closed the group", _LINGER_S)

    def _leave(self, reason: str, linger_s: float) -> None:
        comm, self.transport = self.transport, _Closed(self)  # type: ignore[assignment]
        survival, self._survival = self._survival, None
        _open_groups.discard(self)
        if not isinstance(comm, _Closed):
            comm.close(reason, linger_s)
        if survival is not None:
            survival.close()

    def abort(self, reason: str = "") -> None:
        """Gives the group up on all ranks: whoever waits in it, or calls it later, gets AbortedError.

        Args:
            reason: for the error's text
        """
        self.transport.abort(f"rank {self.rank} aborted" + (f": {reason}" if reason else ""))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<unisono.Group {self.name!r} rank {self.rank} of {self.size}>"

    def rename(self, name: str) -> None:
        """Changes what errors call this group, on this rank.

        Args:
            name: the new name
        """
        self.transport.rename(name)
        self.name = name

    @property
    def unisono_group(self) -> Group:
        """This group itself; process groups have their Group under the same name."""
        return self

    @property
    def calls(self) -> int:
        """Collectives this rank has begun in the group; the number behind ``#`` in errors."""
        return self.transport.calls

    @property
    def staged_bytes(self) -> int:
        """Bytes this rank has copied through the stage, or read from others' own memory; 0 as long as everything was in
        shared memory or small."""
        return self.transport.staged_bytes


def find_key(key: str) -> Group | None:
    """The group with this ``key``, as long as it lives."""
    return _by_key.get(key)


class _Closed:
    """Stands where a closed group's communicator was."""

    def __init__(self, group: Group) -> None:
        self._words = f'group "{group.name}" was closed on this rank'

    def __getattr__(self, name: str) -> Any:
        raise ClosedError(self._words)


@atexit.register
def _leave_all() -> None:
    """Tells the peers of every open group that this process ends, and stops progress threads before Python goes."""
    for group in list(_open_groups):
        group._leave("its process ended", 0.0)
