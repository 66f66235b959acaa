"""One send or receive between hosts that is under way, and the lock under which they are looked at."""

from __future__ import annotations

import threading
import weakref
from ctypes import c_uint64
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..backend import flat
from ..pending import ThreadPending
from .links import Word

if TYPE_CHECKING:
    from .messages import Mailbox


class Message(ThreadPending):
    """One send or receive."""

    def __init__(
        self, mailbox: Mailbox, verb: str, tensor: Tensor, peer: int | None, tag: int, deadline: float
    ) -> None:
        super().__init__()
        self._mailbox = weakref.ref(mailbox)  # whoever drops the group closes it
        self.verb, self.tensor, self.peer, self.tag, self.deadline = verb, flat(tensor), peer, tag, deadline
        self.slot = 0
        self.word: Word | None = None  # of a receive: it waits for this, with which its data ends
        self.refusal: tuple[int, Exception] | None = None  # of a receive: how much it expected instead, and its error
        self.inside: Any = None  # of a receive from anyone: that of a message inside the host, while it is under way
        self.held: list[Any] = []
        self.has_ended = False  # it is over, or will be as soon as the mailbox's lock is free

    def withdraw(self) -> None:
        mailbox = self._mailbox()
        if mailbox is not None:
            mailbox.withdraw(self)

    def has_word(self) -> bool:
        return self.word is not None and c_uint64.from_address(self.word[0]).value == self.word[1]


class Lock:
    """Guards a mailbox; messages that end meanwhile are completed by whoever lets it go last, with no lock held.

    Completing one calls the user's callbacks, which may call the group again or wait for other threads that do.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._ended: list[tuple[Message, Exception | None]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        ended: list[tuple[Message, Exception | None]] = []
        self._depth -= 1
        if not self._depth:
            ended, self._ended = self._ended, ended
        self._lock.release()
        for message, error in ended:
            if message.done():
                continue
            if error is None:
                message.set_result(None)
            else:
                message.set_exception(error)

    def end(self, message: Message, error: Exception | None) -> None:
        """A message is over; the first that says so counts. Only while the lock is held."""
        message.held.clear()
        if not message.has_ended:
            message.has_ended = True
            self._ended.append((message, error))
