"""How the members of a smaller group join it, in a way that can be given up: one of them may die meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from ...base.errors import UnisonoError
from ...group import rendezvous

_NAP_S = 0.001
_KEY_S = 300.0  # what torch's stores wait for a key


class Plan(NamedTuple):
    """Who joins, by which names, and how long that may take."""

    names: list[int]
    me: int
    key: str  # what all call the group while they join
    name: str  # what this rank calls it afterwards
    place: str
    timeout_s: float
    deadline_s: float


class Joining:
    """The making of the new group, in a thread that may be left alone: gloo connects in C++."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self.ended = threading.Event()
        self.made: Any = None
        self.error: Exception | None = None
        self.is_joined = False  # the barrier is left to do
        self.store, self._plan = UntilAbandoned(store), plan
        self._lock = threading.Lock()

    @property
    def _is_abandoned(self) -> bool:
        return self.store.is_abandoned

    def run(self) -> None:
        names, me, key, name, place, timeout_s, deadline_s = self._plan
        try:
            size = len(names)
            made = rendezvous.meet(self.store, names.index(me), size, names, key, timeout_s, deadline_s, place)
            with self._lock:
                self.made, self.is_joined = made, True
                is_abandoned = self._is_abandoned
            if is_abandoned:
                self._drop()
                return
            made.rename(name)
            made.barrier(max(0.001, deadline_s - time.monotonic()), False)
            with self._lock:
                if not self._is_abandoned:
                    self.ended.set()
                    return
            self._drop()
        except Exception as error:
            self._drop()
            self.error = None if self._is_abandoned else error
            self.ended.set()

    def _drop(self) -> None:
        with self._lock:
            made, self.made = self.made, None
        if made is not None:
            made.close("did not join the smaller group", 0.0)

    def abandon(self) -> None:
        """Nobody asks for the group any more."""
        with self._lock:
            self.store.is_abandoned = True
            made = self.made
        if made is not None:
            with contextlib.suppress(UnisonoError):
                made.abort("another rank did not join the smaller group")


class UntilAbandoned(Store):
    """A store for joining, also for gloo's: its waits end when the joining is abandoned."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.is_abandoned = False

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        end = time.monotonic() + (_KEY_S if limit is None else limit.total_seconds())
        while not self.check(keys):
            if time.monotonic() > end:
                raise RuntimeError(f"the store has no {keys}")
            time.sleep(_NAP_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._store.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        if self.is_abandoned:
            raise RuntimeError("the smaller group is not asked for any more")
        return self._store.check(keys)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._store.compare_set(key, expected, desired)
