"""The all-gather that moves nothing: one buffer, mapped by every rank, into which all write."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from ..base.counter import number_of
from ..base.errors import HeapMemoryError, MismatchError, UnisonoError, with_facts
from ..base.tensors import empty
from .group import Group


class SharedGather:
    """An all-gather of zero bytes. Write to ``input``, call :meth:`gather`, read what all have written.

    ``counts`` are rows per rank, ``tail`` the shape of a row::

        counts [1, 2]      rank 0 writes [1]         gather() -> [1, 10, 20], the same memory on both ranks
                           rank 1 writes [10, 20]

    Outputs alias: they are the memory the ranks wrote to, so what one rank changes all see. There are two buffers,
    taken in turns: what ``gather`` returned stays as it is until some rank writes to its input after the next
    ``gather``, and ``input`` is another tensor after each call. Making, calling and closing it are collective. The
    memory is rank 0's; it is given back by :meth:`close`, or stays until rank 0's process ends.

    When :meth:`gather` raises, the object is over: :attr:`input` and ``gather`` raise the same error from then on, so
    that a rank that knows of the failure writes no more. A rank that does not know yet may still write to its input,
    and all ranks see that: this is the one place where promises about tensors after an error end, because the memory
    belongs to all. Tensors that were returned before stay readable, also after the death of rank 0 and after ``close``
    of the group; copy what must not change before the next ``gather``.
    """

    def __init__(self, group: Group, counts: Sequence[int], *tail: int, dtype: torch.dtype | None = None) -> None:
        if len(counts) != group.size or any(n < 0 for n in counts):
            raise ValueError(f"argument 'counts' must be {group.size} numbers from 0 up, got {list(counts)}")
        if hasattr(group.transport, "host_ranks"):
            raise ValueError(
                f'group "{group.name}" has ranks on several hosts, which share no memory; split it by hosts'
            )
        self._group = group
        self.counts = [int(n) for n in counts]
        shape = [sum(self.counts), *tail]
        kind = dtype or torch.get_default_dtype()
        # At least a page each: smaller tensors share pages, and a failure elsewhere may make a page private.
        room = max(math.prod(shape), -(-mmap.PAGESIZE // kind.itemsize))
        self._compare(kind, tail)
        places = torch.zeros(2, dtype=torch.int64)
        if group.rank == 0:
            try:
                self._outputs = [empty(room, dtype=kind)[: math.prod(shape)].view(shape) for _ in range(2)]
            except UnisonoError:
                group.broadcast(places.fill_(-1), 0)
                raise
            for i, output in enumerate(self._outputs):
                places[i] = group.transport.offset_of(output) if output.numel() else 0
        group.broadcast(places, 0)
        if places[0] < 0:
            raise HeapMemoryError(f'SharedGather in group "{group.name}": rank 0 has no memory for the buffers')
        if group.rank != 0:
            parts = [group.transport.peer_bytes(0, at, math.prod(shape) * kind.itemsize) for at in places.tolist()]
            self._outputs = [part.view(kind).reshape(shape) for part in parts]
        self._begin = sum(self.counts[: group.rank])
        self._turn = 0
        self._failure: Exception | None = None

    def _compare(self, dtype: torch.dtype, tail: tuple[int, ...]) -> None:
        """Raises on all ranks unless all were asked for the same: every rank writes where its own numbers say."""
        group = self._group
        asked = torch.empty(group.size, dtype=torch.int64)
        group.all_gather(asked, torch.tensor([number_of(self.counts, tail, str(dtype))]))
        differing = [r for r in range(group.size) if asked[r] != asked[0]]
        if differing:
            error = MismatchError(
                f'SharedGather in group "{group.name}": ranks {differing} were asked for something else than rank 0; '
                f"rank {group.rank}: counts {self.counts}, tail {tail}, {dtype}"
            )
            raise with_facts(error, "SharedGather", group.name, group.rank, differing)

    @property
    def input(self) -> torch.Tensor:
        """This rank's slot of the buffer whose turn it is; raises once a gather has failed."""
        if self._failure is not None:
            raise self._failure
        return self._outputs[self._turn][self._begin : self._begin + self.counts[self._group.rank]]

    def gather(self, *, timeout_s: float | None = None) -> torch.Tensor:
        """Waits until every rank has called it, then returns the whole; no byte is moved.

        Args:
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            The whole, in memory that all ranks share.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._group.barrier(timeout_s=timeout_s)
        except UnisonoError as error:
            self._failure = error.with_traceback(None)
            raise
        output = self._outputs[self._turn]
        self._turn = 1 - self._turn
        return output

    def close(self) -> None:
        """Gives the memory back; call it on all ranks, when none uses the tensors any more."""
        if self._outputs and self._failure is None:
            self._group.barrier()
        self._outputs = []
