"""Tensors that outlive their process: named in the heap, where survivors find them (see ``Group.inherit``)."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from .. import _core
from .fork import fork_lock

_kept: dict[str, Kept] = {}
_lock = fork_lock()  # from the look at who has a name until the name has changed hands


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

    @contextmanager
    def update(self, step: int) -> Iterator[Tensor]:
        """Brackets a write to the tensor, by this process or by a collective: inside, it is not whole.

        An exception inside leaves it so until an update ends well. One update at a time, and the name stays the
        tensor's until it has ended: to drop it inside, or to keep another under its name, is a RuntimeError.

        Args:
            step: a number that grows; heirs compare it

        Returns:
            A context manager that gives the tensor.
        """
        number = int(step)
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"argument 'step' must be a whole number of 64 bits, got {number}")
        slot = self._slot  # held here too: the end of Python takes it away, perhaps while a thread is inside
        slot.begin(number)
        try:
            yield self.tensor
            slot.end()
            self.step = number
        finally:
            slot.leave()

    def drop(self) -> None:
        """Takes the name back; nobody inherits the tensor any more."""
        with _lock:
            self._slot.drop()  # first: inside of an update it raises, and nothing has changed
            if _kept.get(self.name) is self:
                del _kept[self.name]


@atexit.register
def _end() -> None:
    """Lets go of the objects, or they are reported as leaked; what is in the heap stays, for those who inherit."""
    for kept in list(_kept.values()):
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

    Args:
        name: by which the survivors find it
        tensor: a tensor in shared memory

    Returns:
        What :meth:`Kept.update` and :meth:`Kept.drop` are called on.
    """
    made = Kept(name, tensor)
    with _lock:
        if (before := _kept.get(name)) is not None:
            try:
                before._slot.drop()
            except RuntimeError:  # it is being updated
                made._slot.drop()
                raise
        _kept[name] = made
    return made
