"""How a rank waits for words that another library's threads write into its memory, and that wake nobody.

For a moment it gives way and looks again, unless the machine is busy: then the others would take their whole turn. Then
it naps, the longer the longer it has waited. To sleep until something comes on the engine's connections does not do:
the engine's own thread, which wakes too, has often read it before this one looks, and then nothing tells this one.
"""

from __future__ import annotations

import os
import time
from ctypes import c_uint64

from .links import Word

_GIVE_WAY_S = 0.0003
_NAP_S = 0.00002  # the kernel makes 0.07 ms of it
_NAP_SHARE = 0.2  # of what was waited so far: nothing is noticed much later than it came
_LONG_TURN_S = 0.0004  # of giving way: somebody else had work to do
_REMEMBER_S = 2.0


def is_here(word: Word) -> bool:
    """Whether a word has its value."""
    return c_uint64.from_address(word[0]).value == word[1]


def are_here(words: list[Word]) -> bool:
    return is_here(words[0]) if len(words) == 1 else all(map(is_here, words))


class Naps:
    """How one group of one rank waits; it remembers whether the machine is busy."""

    def __init__(self) -> None:
        self._busy_until = 0.0

    def wait(self, words: list[Word], limit_s: float, is_long: bool) -> bool:
        """Waits for words, not much longer than ``limit_s``, a moment; whether they are here.

        ``is_long``: it was waited for long already, so nobody gives way any more, which would keep a processor busy.
        """
        begin = now = time.monotonic()
        give_way_until = begin if is_long or begin < self._busy_until else begin + _GIVE_WAY_S
        while not are_here(words):
            if now - begin > limit_s:
                return False
            if now < give_way_until:
                os.sched_yield()
                after = time.monotonic()
                if after - now > _LONG_TURN_S:
                    self._busy_until = after + _REMEMBER_S
                    give_way_until = after
                now = after
                continue
            time.sleep(max(_NAP_S, _NAP_SHARE * (now - begin)))
            now = time.monotonic()
        return True
