"""What a user of gloo could write for a case: its own call where there is one, else every workaround people take.

The fastest of a row's choices is the one that is compared with.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .apart.cases import ROOT
from .apart.turns import Call
from .jobs import REDOPS, Job, torch_call


def gloo_calls(job: Job, group: Any) -> dict[str, Call]:
    """Choices by name."""
    case, op = job.case, job.case.op
    if op == "reduce_scatter":
        return _reduce_scatter_choices(job, group)
    if op in ("all_gather", "gather", "scatter") and not case.even:
        x: Any = job.input
        y: Any = job.output
        counts = list(case.counts)
        if op == "all_gather":
            return _all_gather_choices(job, group)
        if op == "gather":
            slots = None if y is None else list(y.split(counts))
            return {"send and recv": partial(_gather_by_p2p, slots, x, job.rank, group)}
        slices = [] if x is None else list(x.split(counts))
        return {"send and recv": partial(_scatter_by_p2p, y, slices, job.rank, group)}
    return {op: torch_call(job, group)}


def _all_gather_choices(job: Job, group: Any) -> dict[str, Call]:
    x: Any = job.input
    y: Any = job.output
    counts = list(job.case.counts)
    slots = list(y.split(counts))
    most = max(counts)
    padded = x.new_zeros(most)
    wide = y.new_zeros(most * job.case.ranks)
    return {
        "broadcast loop": partial(_gather_by_broadcasts, slots, x, job.rank, group),
        "padded gather": partial(_gather_padded, y, x, padded, wide, counts, group),
        "all to all": partial(_gather_by_all_to_all, y, x, counts, job.rank, group),
        "send and recv": partial(_all_gather_by_p2p, slots, x, job.rank, group),
    }


def _reduce_scatter_choices(job: Job, group: Any) -> dict[str, Call]:
    x: Any = job.input
    y: Any = job.output
    counts, redop = list(job.case.counts), REDOPS[job.case.redop]
    copies: Any = torch.empty_like(x)
    whole: Any = torch.empty_like(x)
    choices: dict[str, Call] = {
        "list reduce_scatter": partial(dist.reduce_scatter, y, list(x.split(counts)), redop, group=group),
        "all_reduce of a copy": partial(
            _scatter_by_all_reduce, y, x, whole, whole.split(counts)[job.rank], redop, group
        ),
        "all_reduce per rank": partial(
            _scatter_by_reduces, y, list(x.split(counts)), list(copies.split(counts)), job.rank, redop, group
        ),
    }
    if job.case.even:
        choices["reduce_scatter_tensor"] = torch_call(job, group)
    return choices


def _wait(works: list[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _gather_by_broadcasts(slots: list[torch.Tensor], x: torch.Tensor, rank: int, group: Any) -> None:
    slots[rank].copy_(x)
    _wait([dist.broadcast(slot, r, group=group, async_op=True) for r, slot in enumerate(slots) if slot.numel()])


def _gather_padded(
    y: torch.Tensor, x: torch.Tensor, padded: torch.Tensor, wide: torch.Tensor, counts: list[int], group: Any
) -> None:
    padded[: x.numel()].copy_(x)
    into: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    into(wide, padded, group=group)
    most, start = padded.numel(), 0
    for r, count in enumerate(counts):
        y[start : start + count].copy_(wide[r * most : r * most + count])
        start += count


def _gather_by_all_to_all(y: torch.Tensor, x: torch.Tensor, counts: list[int], rank: int, group: Any) -> None:
    ranks = len(counts)
    dist.all_to_all_single(y, x.repeat(ranks), counts, [counts[rank]] * ranks, group=group)


def _all_gather_by_p2p(slots: list[torch.Tensor], x: torch.Tensor, rank: int, group: Any) -> None:
    others = [r for r in range(len(slots)) if r != rank]
    works = [dist.irecv(slots[r], r, group=group) for r in others if slots[r].numel()]
    if x.numel():
        works += [dist.isend(x, r, group=group) for r in others]
    slots[rank].copy_(x)
    _wait(works)


def _scatter_by_all_reduce(
    y: torch.Tensor, x: torch.Tensor, whole: torch.Tensor, mine: torch.Tensor, redop: Any, group: Any
) -> None:
    whole.copy_(x)
    dist.all_reduce(whole, redop, group=group)
    y.copy_(mine)


def _scatter_by_reduces(
    y: torch.Tensor, slices: list[torch.Tensor], copies: list[torch.Tensor], rank: int, redop: Any, group: Any
) -> None:
    for mine, theirs in zip(copies, slices, strict=True):
        if mine.numel():
            mine.copy_(theirs)
            dist.all_reduce(mine, redop, group=group)
    y.copy_(copies[rank])


def _gather_by_p2p(slots: list[torch.Tensor] | None, x: torch.Tensor, rank: int, group: Any) -> None:
    if slots is None:
        if x.numel():
            dist.send(x, ROOT, group=group)
        return
    works = [dist.irecv(slot, r, group=group) for r, slot in enumerate(slots) if r != rank and slot.numel()]
    slots[rank].copy_(x)
    _wait(works)


def _scatter_by_p2p(y: torch.Tensor, slices: list[torch.Tensor], rank: int, group: Any) -> None:
    if rank != ROOT:
        if y.numel():
            dist.recv(y, ROOT, group=group)
        return
    works = [dist.isend(part, r, group=group) for r, part in enumerate(slices) if r != rank and part.numel()]
    y.copy_(slices[rank])
    _wait(works)
