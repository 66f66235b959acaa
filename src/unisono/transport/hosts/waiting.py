"""How a rank waits for words that another library's threads write into its memory, and that wake nobody.

For a moment it gives way and looks again, unless the machine is busy: then the others would take their whole turn. Then
it sleeps until something comes on the engine's connections, which is when the engine's own thread wakes too.
"""

from __future__ import annotations

import os
import time
from ctypes import c_uint64
from typing import TYPE_CHECKING

from .links import Word

if TYPE_CHECKING:
    from .engine import Engine

_GIVE_WAY_S = 0.0003
_AWAKE_S = 0.0001  # after something came
_DOZE_S = 0.00002  # the kernel makes 0.07 ms of it
_LONG_TURN_S = 0.0004  # of giving way: somebody else had work to do
_REMEMBER_S = 2.0
_NAP_S = 0.001


def are_here(words: list[Word]) -> bool:
    """Whether each word has its value."""
    return all(c_uint64.from_address(address).value == value for address, value in words)


class Arrivals:
    """What tells one group of one rank that something has come."""

    def __init__(self, engine: Engine) -> None:
        self._epoll = engine.arrivals()
        self._busy_until = 0.0

    @property
    def can_wait(self) -> bool:
        return self._epoll is not None

    def close(self) -> None:
        """Nobody will wait any more; whoever does soon sees that the group is closed."""
        if self._epoll is not None:
            self._epoll.close()

    def wait(self, words: list[Word], limit_s: float) -> bool:
        """Waits for words, not much longer than ``limit_s``; whether they are here."""
        assert self._epoll is not None
        begin = now = time.monotonic()
        awake_until = begin + _GIVE_WAY_S if begin > self._busy_until else begin
        doze_until = 0.0
        while not are_here(words):
            if now - begin > limit_s:
                return False
            if now < awake_until:
                os.sched_yield()
                after = time.monotonic()
                if after - now > _LONG_TURN_S:
                    self._busy_until = after + _REMEMBER_S
                    awake_until = after
                now = after
                continue
            if now < doze_until:
                time.sleep(_DOZE_S)
            elif self._epoll.closed:
                return False
            elif self._epoll.poll(_NAP_S, 1):
                # The engine's thread was woken too, and reads it now, or as soon as it gets a processor.
                doze_until = time.monotonic() + _NAP_S
                if now > self._busy_until:
                    awake_until = now + _AWAKE_S
            now = time.monotonic()
        return True
