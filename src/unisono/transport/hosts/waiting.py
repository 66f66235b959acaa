"""How a rank waits for words that another library's threads write into its memory, and that wake nobody.

For a moment it gives way and looks again, unless the machine is busy: then the others would take their whole turn. Then
it naps, the longer the longer it has waited. What takes long it sleeps for until something comes on the engine's
connections, which is when the engine's own thread wakes too. That one may have read it before this rank looks, and then
nothing tells this rank: so it does not sleep so for short waits.
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
_DOZE_SHARE = 0.2  # of what was waited so far
_SHORT_S = 0.002
_LONG_TURN_S = 0.0004  # of giving way: somebody else had work to do
_REMEMBER_S = 2.0
_NAP_S = 0.001


def is_here(word: Word) -> bool:
    """Whether a word has its value."""
    return c_uint64.from_address(word[0]).value == word[1]


def are_here(words: list[Word]) -> bool:
    return is_here(words[0]) if len(words) == 1 else all(map(is_here, words))


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

    def _poll(self) -> bool | None:
        """Sleeps for a moment; whether anything came, None if another thread has closed the group."""
        assert self._epoll is not None
        try:
            return bool(self._epoll.poll(_NAP_S, 1))
        except (OSError, ValueError):  # before, or in the middle of it
            if not self._epoll.closed:
                raise
            return None

    def wait(self, words: list[Word], limit_s: float) -> bool:
        """Waits for words, not much longer than ``limit_s``; whether they are here."""
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
            elif now - begin < _SHORT_S:
                time.sleep(max(_DOZE_S, _DOZE_SHARE * (now - begin)))
            elif (found := self._poll()) is None:
                return False
            elif found:
                # The engine's thread was woken too, and reads it now, or as soon as it gets a processor.
                doze_until = time.monotonic() + _NAP_S
                if now > self._busy_until:
                    awake_until = now + _AWAKE_S
            now = time.monotonic()
        return True
