"""Tensors that outlive their process: named in the heap, where survivors find them (see ``Group.inherit``)."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from .. import _core

_kept: dict[str, Kept] = {}


@dataclass(frozen=True)
class Inherited:
    """A tensor that a lost rank had kept, as its death left it.

    ``tensor`` is the lost rank's own memory, the same on every survivor: copy it before you change it. It lives as long
    as the tensor. ``step`` is the step of the last :meth:`Kept.update` that ended, None if there was none. ``whole`` is
    False if death came inside of an update: then the tensor is neither the old nor the new one.
    """

    tensor: Tensor
    step: int | None
    whole: bool


class Kept:
    """A tensor under a name; see :func:`keep`. ``step`` is that of the last update that ended, None before."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor
        self._slot = _core.Kept(name, tensor)
        self.step: int | None = None
        self._inside = False

    @contextmanager
    def update(self, step: int) -> Iterator[Tensor]:
        """Brackets a write to the tensor, by this process or by a collective: inside, it is not whole.

        An exception inside leaves it so until an update ends well.
        """
        if self._inside:
            raise RuntimeError(f'kept tensor "{self.name}" is being updated already')
        number = int(step)
        self._slot.begin()
        self._inside = True
        try:
            yield self.tensor
            self._slot.end(number)
            self.step = number
        finally:
            self._inside = False

    def drop(self) -> None:
        """Takes the name back; nobody inherits the tensor any more."""
        if _kept.get(self.name) is self:
            del _kept[self.name]
        self._slot.drop()


@atexit.register
def _end() -> None:
    """Lets go of the objects, or they are reported as leaked; what is in the heap stays, for those who inherit."""
    for kept in _kept.values():
        del kept._slot


def keep(name: str, tensor: Tensor) -> Kept:
    """Names a tensor in shared memory, so that the others can go on with it if this process dies.

    >>> import torch, unisono
    >>> kept = unisono.keep("optimizer", unisono.zeros(1000))
    >>> with kept.update(step=7) as state:
    ...     _ = state.add_(1)

    When the process is gone, ``new, lost = group.shrink()`` on the survivors and then
    ``new.inherit(lost[0])["optimizer"]`` give the tensor, its step and whether it is whole. The name is this process's
    own; a second tensor of the same name takes the place of the first. The tensor is held until ``kept.drop()``.

    A tensor of less than a page shares its page with others: if one of those is in a collective that fails beside a
    peer that does not answer, both are made private to this process, and the next ``update`` says so.
    """
    made = Kept(name, tensor)
    if (before := _kept.get(name)) is not None:
        before.drop()
    _kept[name] = made
    return made
