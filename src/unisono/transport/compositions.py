"""Uneven collectives on process groups of other backends, made of what that backend has: exact chunks, never padding.

Words: a *whole* tensor is cut into one *chunk* per rank, ``counts`` are the chunks' elements; a *part* is what one rank
brings to an all-gather or gets from a reduce-scatter. All tensors here are flat, contiguous and checked. Which
composition a group uses follows from its backend's name alone, which is the same on all ranks:

    gloo               Direct    send and receive in place; a reduction happens where its result is wanted
    nccl, hccl, xccl   Lists     the backend's own list forms, which take unequal tensors
    mpi, ucc, others   Rooted    one broadcast, or one reduce, per rank
    hccl + torch_npu   Ascend    torch_npu's own uneven calls, where the installed version has them

Before data is touched the ranks compare what they were asked for, so that different splits raise MismatchError on every
rank instead of a hang, a crash or wrong numbers. A group without a backend for CPU tensors cannot be asked without
stopping its device's stream; there the comparison is left out.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import _core
from ..base.counter import Counter
from .agreement import NO_OP, OP_NAMES, Request, compare
from .composed_work import JoinedWork
from .gloo import Direct

__all__ = ["Composition", "Lists", "Rooted", "composition_of"]

_PREMUL_SUM = _core.OPS["premul_sum"]

_PIECE_BYTES = 4 << 20  # of a chunk that has to be copied before a reduce that would overwrite it


class Composition(Protocol):
    """The verbs of a group of another backend; each returns None, or a Work if ``async_op``."""

    def all_gather(self, whole: Tensor, part: Tensor, counts: Sequence[int], async_op: bool) -> dist.Work | None: ...

    def reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> dist.Work | None: ...

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        matrix: Sequence[int],
        async_op: bool,
    ) -> dist.Work | None: ...


_chosen: weakref.WeakKeyDictionary[ProcessGroup, dict[str, Composition]] = weakref.WeakKeyDictionary()


def composition_of(pg: ProcessGroup, device: torch.device) -> Composition:
    """The composition for tensors of this device on this group, chosen at the first call."""
    by_device = _chosen.get(pg)
    if by_device is None:
        by_device = _chosen[pg] = {}
    composition = by_device.get(device.type)
    if composition is None:
        composition = by_device[device.type] = _choose(pg, device)
    return composition


def _choose(pg: ProcessGroup, device: torch.device) -> Composition:
    name = pg._get_backend(device).name().lower()
    if name == "gloo" and device.type == "cpu":
        return Direct(pg)
    if name == "hccl":
        native = getattr(sys.modules.get("torch_npu"), "distributed", None)
        if all(hasattr(native, verb) for verb in Ascend.CALLS):
            return Ascend(pg, native)
    if name in ("nccl", "hccl", "xccl"):
        return Lists(pg)
    return Rooted(pg, keeps_input=name in ("mpi", "ucc"))


class _Asking:
    """A group whose ranks compare their requests by a small all-gather, if it has a backend for CPU tensors."""

    def __init__(self, pg: ProcessGroup) -> None:
        self._pg = weakref.ref(pg)  # what is kept for a group must not keep the group
        self.rank = pg.rank()
        self.size = pg.size()
        self._calls = Counter()
        self.can_ask = any(device.type == "cpu" for device in pg._device_types)

    @property
    def pg(self) -> ProcessGroup:
        pg = self._pg()
        assert pg is not None  # the caller of a verb holds it
        return pg

    def ask(self, request: Request) -> None:
        seq = self._calls.next()
        if self.can_ask:
            # Not over Python's bytes: a backend's thread may let go of the tensors when Python has ended.
            mine = torch.tensor(list(request.bytes), dtype=torch.uint8)
            shown = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(shown, mine, group=self.pg)
            compare(self.pg, seq, request, [bytes(letter.tolist()) for letter in shown])

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        matrix: Sequence[int],
        async_op: bool,
    ) -> dist.Work | None:
        self.ask(Request("all_to_all", input.dtype, NO_OP, matrix))
        work: dist.Work | None = dist.all_to_all_single(
            output, input, list(output_counts), list(input_counts), group=self.pg, async_op=async_op
        )
        return work


def _torch_op(op: int, factor: float) -> Any:
    if op == _PREMUL_SUM:
        return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
    return getattr(dist.ReduceOp, OP_NAMES[op].upper())


class Lists(_Asking):
    """A backend whose list forms take unequal tensors."""

    def all_gather(self, whole: Tensor, part: Tensor, counts: Sequence[int], async_op: bool) -> dist.Work | None:
        self.ask(Request("all_gather", part.dtype, NO_OP, counts))
        chunks = list(torch.split(whole, list(counts)))
        work: dist.Work | None = dist.all_gather(chunks, part, group=self.pg, async_op=async_op)
        return work

    def reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> dist.Work | None:
        self.ask(Request("reduce_scatter", part.dtype, op, counts, factor))
        chunks = list(torch.split(whole, list(counts)))
        op_of_torch = _torch_op(op, factor)
        work: dist.Work | None = dist.reduce_scatter(part, chunks, op_of_torch, group=self.pg, async_op=async_op)
        return work


class Ascend(_Asking):
    """hccl with a torch_npu that has the uneven calls itself."""

    CALLS = ("all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven")

    def __init__(self, pg: ProcessGroup, native: Any) -> None:
        super().__init__(pg)
        self.native = native

    def all_gather(self, whole: Tensor, part: Tensor, counts: Sequence[int], async_op: bool) -> dist.Work | None:
        self.ask(Request("all_gather", part.dtype, NO_OP, counts))
        work = self.native.all_gather_into_tensor_uneven(
            whole, part, output_split_sizes=list(counts), group=self.pg, async_op=async_op
        )
        return work if async_op else None

    def reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> dist.Work | None:
        self.ask(Request("reduce_scatter", part.dtype, op, counts, factor))
        work = self.native.reduce_scatter_tensor_uneven(
            part, whole, input_split_sizes=list(counts), op=_torch_op(op, factor), group=self.pg, async_op=async_op
        )
        return work if async_op else None


class Rooted(_Asking):
    """A backend of which nothing is known but broadcast and reduce: one of them per rank, all under way at once.

    A backend's reduce may use the tensors of the other ranks as its scratch (gloo's does). Unless it is known to keep
    them, and for PREMUL_SUM, chunks are copied piece by piece before they are reduced, one after the other.
    """

    def __init__(self, pg: ProcessGroup, keeps_input: bool) -> None:
        super().__init__(pg)
        self.keeps_input = keeps_input

    def all_gather(self, whole: Tensor, part: Tensor, counts: Sequence[int], async_op: bool) -> dist.Work | None:
        self.ask(Request("all_gather", part.dtype, NO_OP, counts))
        chunks = torch.split(whole, list(counts))
        _copy_unless_same(chunks[self.rank], part)
        works = [
            dist.broadcast(chunk, group_src=root, group=self.pg, async_op=True)
            for root, chunk in enumerate(chunks)
            if chunk.numel()
        ]
        return _joined(JoinedWork(works, whole), async_op)

    def reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> dist.Work | None:
        self.ask(Request("reduce_scatter", part.dtype, op, counts, factor))
        name = OP_NAMES[op]
        torch_op = dist.ReduceOp.SUM if name in ("avg", "premul_sum") else getattr(dist.ReduceOp, name.upper())
        copies = not self.keeps_input or name == "premul_sum"
        works = []
        for root, chunk in enumerate(torch.split(whole, list(counts))):
            if root == self.rank:
                _copy_unless_same(part, chunk)
                if name == "premul_sum":
                    part.mul_(factor)
                chunk = part
            piece_elements = max(1, _PIECE_BYTES // chunk.element_size()) if copies else max(1, chunk.numel())
            for piece in torch.split(chunk, piece_elements) if chunk.numel() else ():
                if copies and root != self.rank:
                    piece = piece * factor if name == "premul_sum" else piece.clone()
                work = dist.reduce(piece, group_dst=root, op=torch_op, group=self.pg, async_op=True)
                if copies:
                    work.wait()
                else:
                    works.append(work)

        def divide() -> None:
            part.div_(self.size, rounding_mode=None if part.is_floating_point() or part.is_complex() else "trunc")

        return _joined(JoinedWork(works, part, divide if name == "avg" else None), async_op)


def _copy_unless_same(to: Tensor, source: Tensor) -> None:
    if to.data_ptr() != source.data_ptr():
        to.copy_(source)


def _joined(work: JoinedWork, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None
