"""Life after a death over several hosts: the ranks that are left agree on who they are, and make a group anew.

Vocabulary, as in core/group/shrink.h. Every survivor makes an *offer*: it takes part, without these ranks. The
*decider*, the lowest rank that is not gone, writes the *verdict*: who is a member. Both are keys of a store that the
decider puts behind its listener (presence.py), so it does not matter who had the store that the group was made with.
The members then join as any ranks do that meet in a store: the hosts' memory and the engine's connections are new ones,
since gloo's old ones may be stuck for good in the middle of a message.

Steps, the same on every survivor: go through the ranks from 0 up, past those that are gone. If it is this rank's own
turn: wait until every rank has made its offer or is gone, and write the verdict. If it is another's: wait for its
store, make the offer there, and take its verdict. Join the members, and make a barrier with them.

Why all agree: gone is gone for ever, and who lives is waited for, so all stand before the same decider in the end. A
decider may die with its verdict, or a member may: then nobody ends the barrier, or some do and others do not, and those
others come back for the next *round*. Whoever has ended it has the new group, whose calls now fail. It keeps its
listener and its numbers, so that shrinking that one leads to the same decider, into the same round. The result is the
same ranks for all; only from which group they count the lost ones differs.

A rank that comes for a round while others may still join that of the verdict before marks that one as failed: it will
not come to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from ... import _core
from ...base.errors import (
    AbortedError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    UnisonoError,
    lines_of_ranks,
    make_argument_error,
    with_facts,
)
from .control import FORKED, PEER_LOST, Cause
from .presence import Listener, Place, Presence, connect
from .rejoining import Joining, Plan

if TYPE_CHECKING:
    from .layout import Layout

_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.001, 0.02
_DIFFER_S = 2.0  # one whose time ran out may name others, and the rest soon will too
_TELL_LATE_S = 0.5
_STAYS_S, _DYING_S = 0.03, 2.0
_DEATH_SHOWS_S = 1.0  # joining failed: by then it is known whether that was because somebody died
_NO_OFFER = json.dumps({"wanted": []})  # in place of one that was taken back
SHRUNK = "was shrunk"  # why a survivor leaves the old group


class Found(NamedTuple):
    """What a rank gets: what moves the new group's data, its means to shrink again, and who is in it, by old ranks."""

    made: Any
    survival: Survival
    members: list[int]
    estates: dict[int, _core.Estate | str]  # of the lost: what they have kept, or where they were


class Survival:
    """What a rank of a group over hosts has for the case that others are lost.

    ``lineage`` is the number of the group that was not made by shrinking; ``names`` are the ranks' numbers there.
    """

    def __init__(
        self, lineage: int, rank: int, names: Sequence[int], places: Sequence[Place], place: str, listener: Listener
    ) -> None:
        self.lineage, self.rank, self.names, self.places = lineage, rank, list(names), list(places)
        self.place = place  # what this rank says of where it is, when it joins
        self.listener = listener
        self.had_verdict = False  # it was a member once: nobody has left it out
        self._store: Store | None = None  # of the last meeting: the engine holds only its part in C++
        self._pid = os.getpid()
        self._busy = threading.Lock()

    def among(self, members: Sequence[int], store: Store) -> Survival:
        """The same for the group of some ranks that were left, which have met in a store."""
        names, places = [self.names[r] for r in members], [self.places[r] for r in members]
        new = Survival(self.lineage, members.index(self.rank), names, places, self.place, self.listener)
        new._store = store
        return new

    def close(self) -> None:
        self.listener.close()

    def shrink(
        self, transport: Any, excluded: Sequence[int], name: str, limit_s: float, timeout_s: float, strict: bool
    ) -> Found:
        """The group of the ranks that are left, by the steps above.

        With ``strict`` none but ``excluded`` may be lost: PeerLostError names the others.
        """
        size, me = len(self.names), self.rank
        if os.getpid() != self._pid:
            text = "the group belongs to the parent of this process; make a new one after fork"
            raise Cause(FORKED, (), text).error("shrink", 0, name, me, False)
        for r in excluded:
            if not 0 <= r < size or r == me:
                raise make_argument_error("rank_range", "exclude", size - 1, r)
        if not self._busy.acquire(blocking=False):
            raise ValueError("another thread of this process is shrinking the group")
        try:
            _give_up(transport)
            # Apart: torch's stores and gloo wait in C++, where neither Ctrl-C nor the deadline reaches them.
            work = _Shrinking(self, transport, excluded, name, time.monotonic() + limit_s, timeout_s, strict)
            thread = threading.Thread(target=work.run, name="unisono-shrink", daemon=True)
            thread.start()
            try:
                if not work.ended.wait(limit_s):
                    raise self._too_late(transport, name, limit_s, work.late)
            except BaseException:
                work.abandon()
                raise
            if work.error is not None:
                raise work.error
            found = work.found
            assert found is not None
            if hasattr(found.made, "survival"):
                found.made.survival.close()  # it is known to the survivors only by this one
                found.made.survival = found.survival
            return found
        finally:
            self._busy.release()

    def _too_late(self, transport: Any, name: str, limit_s: float, late: list[int]) -> CollectiveTimeoutError:
        ranks = [self.names.index(n) for n in late if n in self.names]
        who = ", ".join(words_of(transport, r) for r in ranks)
        text = f'shrink of group "{name}": Timed out waiting {limit_s:.3g} s for other ranks to shrink it'
        text += f": {who} did not" if who else ""
        return with_facts(CollectiveTimeoutError(text), "shrink", name, self.rank, ranks)


def words_of(transport: Any, rank: int) -> str:
    layout: Layout | None = getattr(transport, "layout", None)
    return f"rank {rank}" if layout is None else layout.words(rank)


def _give_up(transport: Any) -> None:
    """Nobody shall wait for this rank in the old group any more."""
    if hasattr(transport, "stop_for_shrinking"):
        transport.stop_for_shrinking()
    else:
        with contextlib.suppress(UnisonoError):
            transport.agree([], 0.001)  # the core's own way; what it finds is not asked for


class _Again(Exception):
    """The round is over without a group."""


class _Round(NamedTuple):
    number: int
    keys: Store  # of the lineage, at the decider
    apart: Store  # the same store by another connection: on one, somebody's wait would hold all others up
    is_decider: bool


class _Shrinking:
    """One call of shrink, in a thread of its own."""

    def __init__(
        self, survival: Survival, transport: Any, excluded: Sequence[int], name: str, deadline_s: float,
        timeout_s: float, strict: bool,
    ) -> None:  # fmt: skip
        self.ended = threading.Event()
        self.found: Found | None = None
        self.error: Exception | None = None
        self.late: list[int] = []  # names of those that are waited for
        self._survival, self._transport, self._excluded = survival, transport, set(excluded)
        self._name, self._deadline_s, self._timeout_s, self._strict = name, deadline_s, timeout_s, strict
        self._me = survival.names[survival.rank]
        self._others = {r: Presence(place) for r, place in enumerate(survival.places) if r != survival.rank}
        self._lock = threading.Lock()  # guards what follows, and that `found` is not set behind it
        self._is_abandoned = False

    def abandon(self) -> None:
        """The caller has gone: takes the offer back, and closes what was or will be made."""
        with self._lock:
            self._is_abandoned = True
            self._transport = None  # the thread may wait for long: it shall not hold the old group
            found, self.found = self.found, None
        if found is not None:
            found.made.close("could not be waited for", 0.0)

    def run(self) -> None:
        try:
            while self.found is None:
                with contextlib.suppress(_Again):
                    self._take_part(self._meet())
                self.check_time()
            self.ended.set()
        except _Abandoned:
            pass  # nobody waits for the end
        except Exception as error:
            self.error = error
            self.ended.set()
        finally:
            self._transport = None
            for presence in self._others.values():
                presence.close()

    # -- where to meet

    def _meet(self) -> _Round:
        """Finds the decider, and the round that it is in."""
        nap = _Nap(self)
        for r in range(len(self._survival.names)):
            while r not in self._excluded:
                if r == self._survival.rank:
                    store = self._survival.listener.serve()
                    return self._round(store, True)
                self.late = [self._survival.names[r]]
                if self._others[r].is_gone():
                    break
                if self._has_stayed(r):
                    try:
                        return self._round(connect(self._survival.places[r]), False)
                    except RuntimeError as error:
                        if isinstance(error, UnisonoError):
                            raise  # else it goes, as will be seen
                nap.take()
        raise AssertionError("this rank is one of them")

    def _has_stayed(self, rank: int) -> bool:
        """Whether a rank is there and does not seem to go: connecting to its store takes long if it does meanwhile.

        A process that ends closes its sockets one after the other, and those of the engine may have been first.
        """
        cause = getattr(self._transport, "failure", None)
        lost = cause is not None and cause.code == PEER_LOST and rank in cause.peers
        return self._others[rank].reached_s() > (_DYING_S if lost else _STAYS_S)

    def _round(self, store: Store, is_decider: bool) -> _Round:
        self._check()
        prefix = f"{self._survival.lineage:x}"
        keys = PrefixStore(prefix, store)
        number = int(keys.add("round", 0))
        if number:
            before = json.loads(keys.get(f"{number - 1}/verdict"))
            if self._me in before.get("members", [self._me]):
                self._void(keys, number - 1)
            else:
                raise self._left_out()
        apart = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        return _Round(number, keys, apart, is_decider)

    def _left_out(self) -> AbortedError:
        text = f'shrink of group "{self._name}": the others left this rank out of the smaller group'
        return with_facts(AbortedError(text), "shrink", self._name, self._survival.rank, ())

    def _void(self, keys: Store, number: int) -> None:
        keys.set(self._failed_key(number), f"rank {self._me} does not join the smaller group")

    def _failed_key(self, number: int) -> str:
        return f"{number}/group/unisono/{self._key}/1/failed"  # as rendezvous.meet has it

    @property
    def _key(self) -> str:
        """What all call the new group while they join, whichever group they count from."""
        return f"{self._survival.lineage:x}"

    # -- offer and verdict

    def _take_part(self, at: _Round) -> None:
        survival = self._survival
        wanted = [name for r, name in enumerate(survival.names) if r not in self._excluded]
        key, offer = f"{at.number}/offer/{self._me}", json.dumps({"wanted": wanted, "call": secrets.randbits(62)})
        try:
            at.keys.set(key, offer)
            verdict = self._decide(at, wanted) if at.is_decider else self._await_verdict(at)
        except _Abandoned:
            with contextlib.suppress(RuntimeError):
                at.keys.compare_set(key, offer, _NO_OFFER)  # unless the caller has come back with another
            raise
        except RuntimeError as error:
            if isinstance(error, UnisonoError):
                raise
            raise _Again from error  # the decider is gone
        if "lists" in verdict:
            raise self._mismatch({int(name): wanted for name, wanted in verdict["lists"].items()})
        names = verdict["members"]
        if self._me not in names:
            raise self._left_out()
        survival.had_verdict = True
        members = [survival.names.index(name) for name in names]
        lost = [r for r in range(len(survival.names)) if r not in members]
        if self._strict and not set(lost) <= self._excluded:
            raise self._also_lost([r for r in lost if r not in self._excluded])
        if self._excluded and hasattr(self._transport, "leave_out"):
            self._transport.leave_out(self._excluded)
        made, store = self._join(at, names)
        self._check()
        found = Found(made, survival.among(members, store), members, {r: self._estate(r) for r in lost})
        with self._lock:
            if not self._is_abandoned:
                self.found = found
                return
        made.close("could not be waited for", 0.0)
        raise _Abandoned

    def _await_verdict(self, at: _Round) -> Any:
        nap = _Nap(self)
        while not at.keys.check([f"{at.number}/verdict"]):
            if at.keys.check([f"{at.number}/late"]):
                self.late = json.loads(at.keys.get(f"{at.number}/late"))
            nap.take()
        return json.loads(at.keys.get(f"{at.number}/verdict"))

    def _decide(self, at: _Round, wanted: list[int]) -> Any:
        survival, nap, began, differ_since = self._survival, _Nap(self), time.monotonic(), 0.0
        heard: set[int] = set()  # one that was here may have run out of time a moment ago
        while True:
            here = [r for r, n in enumerate(survival.names) if n in wanted and (n == self._me or not self._is_gone(r))]
            names = [survival.names[r] for r in here]
            offers = self._offers(at, names)
            heard |= {n for n in names if offers.get(n)}
            missing = [n for n in names if not offers.get(n)]
            self.late = [n for n in missing if n not in heard]
            self._check_shrunk()
            known = {*names, *(survival.names[r] for r in self._excluded if not self._is_gone(r))}
            if not missing and all(known & set(offers[n]) == set(names) for n in names):
                return self._write_verdict(at, {"members": names, "number": secrets.randbits(62)})
            if missing:
                differ_since = 0.0
                if time.monotonic() > began + _TELL_LATE_S:
                    at.keys.set(f"{at.number}/late", json.dumps(self.late))
            elif not differ_since:
                differ_since = time.monotonic()
            elif time.monotonic() > differ_since + _DIFFER_S:
                return self._write_verdict(at, {"lists": offers})
            nap.take()

    def _is_gone(self, rank: int) -> bool:
        return self._others[rank].is_gone()

    def _offers(self, at: _Round, names: Sequence[int]) -> dict[int, list[int]]:
        keys = [f"{at.number}/offer/{n}" for n in names]
        if not at.keys.check(keys):
            there = [key for key in keys if at.keys.check([key])]
            names, keys = [int(key.rpartition("/")[2]) for key in there], there
        return {n: json.loads(offer)["wanted"] for n, offer in zip(names, at.keys.multi_get(keys), strict=True)}

    def _write_verdict(self, at: _Round, verdict: dict[str, Any]) -> Any:
        at.keys.set(f"{at.number}/verdict", json.dumps(verdict))
        at.keys.add("round", 1)
        return json.loads(json.dumps(verdict))

    def _check_shrunk(self) -> None:
        """One that was left out while it was stopped may be the lowest rank: nobody comes to it."""
        was_shrunk = getattr(self._transport, "was_shrunk", None)
        if was_shrunk is not None and not self._survival.had_verdict and was_shrunk():
            raise self._left_out()

    def _mismatch(self, lists: dict[int, list[int]]) -> MismatchError:
        names = self._survival.names
        without = {
            names.index(name): [r for r, n in enumerate(names) if n not in wanted] for name, wanted in lists.items()
        }
        differing = [r for r, list_ in without.items() if list_ != without[self._survival.rank]]
        lines = lines_of_ranks({r: f"without {list_}" for r, list_ in sorted(without.items())})
        text = f'shrink of group "{self._name}": ranks disagree on whom to leave out{lines}'
        return with_facts(MismatchError(text), "shrink", self._name, self._survival.rank, differing)

    def _also_lost(self, ranks: list[int]) -> PeerLostError:
        who = ", ".join(words_of(self._transport, r) for r in ranks)
        text = f'shrink of group "{self._name}": {who} is lost too; leave it out as well'
        return with_facts(PeerLostError(text), "shrink", self._name, self._survival.rank, ranks)

    def _estate(self, rank: int) -> _core.Estate | str:
        layout: Layout | None = getattr(self._transport, "layout", None)
        if layout is None:
            return self._transport.estate(rank)  # type: ignore[no-any-return]
        if layout.host_of[rank] == layout.host:
            return self._transport.comm.estate(layout.mine.index(rank))  # type: ignore[no-any-return]
        return layout.words(rank)

    # -- the new group

    def _join(self, at: _Round, names: list[int]) -> tuple[Any, Store]:
        """The members' new transport, and the store they have met in.

        It is no longer waited for once one of them has gone or given up.
        """
        new_name, survival = f"{self._name}/shrunk", self._survival
        plan = Plan(names, self._me, self._key, new_name, survival.place, self._timeout_s, self._deadline_s)
        joining = Joining(PrefixStore(f"{at.number}/group", at.apart), plan)
        threading.Thread(target=joining.run, name="unisono-join", daemon=True).start()
        self.late = []
        try:
            while not joining.ended.wait(_LONGEST_NAP_S):
                self._check()
                self._look_at_joining(at, names, joining)
        except BaseException:
            joining.abandon()
            raise
        error, joining.error = joining.error, None  # else its traceback would keep what was made
        if error is None:
            return joining.made, joining.store
        with contextlib.suppress(RuntimeError):  # or the decider is gone
            was_told = at.keys.check([self._failed_key(at.number)])
            self._void(at.keys, at.number)
            if was_told:
                raise _Again
        if isinstance(error, (PeerLostError, AbortedError)) and joining.is_joined:
            raise _Again  # one of them died in the barrier
        end = time.monotonic() + _DEATH_SHOWS_S
        while time.monotonic() < end:
            for n in names:
                if n != self._me and self._is_gone(self._survival.names.index(n)):
                    raise _Again
            time.sleep(_LONGEST_NAP_S)
        raise error

    def _look_at_joining(self, at: _Round, names: list[int], joining: Joining) -> None:
        try:
            is_over = at.keys.check([self._failed_key(at.number)])
            if at.is_decider and not is_over:
                gone = [n for n in names if n != self._me and self._is_gone(self._survival.names.index(n))]
                if gone and not joining.ended.is_set():
                    is_over = True
                    at.keys.set(self._failed_key(at.number), f"rank {gone[0]} is gone")
        except RuntimeError as error:
            if joining.is_joined:
                return  # the decider is gone: the new group finds out, or all of it had been there
            raise _Again from error
        if is_over and not joining.ended.is_set():
            raise _Again

    # -- whether to go on

    def _check(self) -> None:
        if self._is_abandoned:
            raise _Abandoned

    def check_time(self) -> None:
        self._check()
        if time.monotonic() > self._deadline_s:
            raise _Abandoned


class _Abandoned(Exception):
    """Whoever called has gone."""


class _Nap:
    """Pauses between two looks, longer and longer."""

    def __init__(self, work: _Shrinking) -> None:
        self._work, self._nap_s = work, _SHORTEST_NAP_S

    def take(self) -> None:
        self._work.check_time()
        time.sleep(self._nap_s)
        self._nap_s = min(1.5 * self._nap_s, _LONGEST_NAP_S)
