"""Ways to be wrong: each gives a change, a function that puts a mistake into this process's torch backend.

`applied` undoes it again. Nothing here has any effect on a package whose mutant nobody has chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import unisono
from unisono import ProcessGroupUnisono
from unisono.base import ops as reduce_ops
from unisono.base.work import Work

Change = Callable[[], None]
Spoil = Callable[[list[Tensor]], None]
When = Callable[[Any, Any, list[Tensor]], bool]

_undo: list[tuple[Any, str, Any]] = []


def put(owner: Any, name: str, wrong: Any) -> None:
    """Puts a wrong thing into the place of a right one, in the class that has it."""
    home = _home(owner, name)
    _undo.append((home, name, home.__dict__[name]))
    setattr(home, name, wrong)


def _home(owner: Any, name: str) -> Any:
    """The class among `owner` and its bases that defines a name; a module itself."""
    return next(home for home in getattr(owner, "__mro__", [owner]) if name in home.__dict__)


@contextlib.contextmanager
def applied(change: Change | None) -> Iterator[None]:
    """Makes the backend wrong inside of the block."""
    if change is not None:
        change()
    try:
        yield
    finally:
        while _undo:
            owner, name, right = _undo.pop()
            setattr(owner, name, right)


def instead(owner: Any, name: str, wrong: Any) -> Change:
    """Another function or value in the place of one."""
    return lambda: put(owner, name, wrong)


def flat(value: Any) -> list[Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else [t for part in value for t in flat(part)]


def off_by_one(tensors: list[Tensor]) -> None:
    for t in tensors:
        if t.dtype == torch.bool:
            t.logical_not_()
        elif t.dtype.is_floating_point and t.dtype.itemsize > 1:
            t.add_(1)
        else:  # by bytes: some of these dtypes cannot be added to
            t.view(torch.uint8).add_(1)


def one_bit(tensors: list[Tensor]) -> None:
    """The least bit of one element."""
    for t in tensors[:1]:
        if t.numel():
            t.view(-1)[t.numel() // 2 :].view(torch.uint8)[:1].bitwise_xor_(1)


def spoiled(work: Work, spoil: Callable[[], None]) -> Work:
    """The handle of a call whose result gets wrong when it is over."""
    if not work._handles:
        spoil()
        return work
    pending = [spoil]
    wait = work.wait

    class Spoiled(Work):
        def wait(self, *args: Any) -> bool:
            done = wait(*args)
            if pending:
                pending.pop()()
            return done

    work.__class__ = Spoiled
    return work


def around(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], owner: Any = None) -> Change:
    """A wrong function made from the right one."""
    owner = owner or ProcessGroupUnisono
    return lambda: put(owner, name, make(_home(owner, name).__dict__[name]))


# Where a method's outputs and inputs are among its arguments.
OUTPUT_FIRST = (
    "allgather", "all_gather_single", "allgather_coalesced", "all_gather_single_coalesced", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "gather", "scatter", "alltoall", "all_to_all_single",
)  # fmt: skip


def output_wrong(method: str, spoil: Spoil, when: When | None = None) -> Change:
    """After the call the outputs are spoiled."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Any, first: Any, *rest: Any, **options: Any) -> Any:
            work = right(self, first, *rest, **options)
            tensors, opts = flat(first), rest[-1] if rest else None
            if when is not None and not when(self, opts, tensors):
                return work
            return spoiled(work, lambda: spoil(tensors))

        return wrong

    return around(method, make)


def last_element_lost(method: str, when: When | None = None) -> Change:
    """The last element of every output keeps what it had before."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Any, first: Any, *rest: Any, **options: Any) -> Any:
            ends = [t.view(-1)[-1:] for t in flat(first) if t.numel()]
            before = [t.clone() for t in ends]
            work = right(self, first, *rest, **options)
            if when is not None and not when(self, rest[-1] if rest else None, flat(first)):
                return work
            return spoiled(work, lambda: [t.copy_(b) for t, b in zip(ends, before, strict=True)] and None)

        return wrong

    return around(method, make)


def part_dropped(method: str) -> Change:
    """The last rank takes part with zeros."""

    def zeros(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.zeros_like(value)
        return [zeros(part) for part in value]

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Any, first: Any, *rest: Any, **options: Any) -> Any:
            if self.rank() == self.size() - 1:
                if method in OUTPUT_FIRST:
                    rest = (zeros(rest[0]), *rest[1:])
                else:
                    for t in flat(first):
                        t.zero_()
            return right(self, first, *rest, **options)

        return wrong

    return around(method, make)


def op_changed(method: str, ops: dict[str, str]) -> Change:
    """Another reduce operation than the one asked for."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Any, *arguments: Any) -> Any:
            opts = arguments[-1]
            name = reduce_ops.name_of(reduce_ops.read(opts.reduceOp)[0])
            other = ops.get(name, ops.get("*"))
            if other is not None:
                opts.reduceOp = getattr(dist.ReduceOp, other.upper())
            return right(self, *arguments)

        return wrong

    return around(method, make)


def argument_changed(method: str, place: int, other: Callable[[Any, Any], Any], owner: Any = None) -> Change:
    """One argument is another one: `other(group, argument)`."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Any, *arguments: Any, **options: Any) -> Any:
            changed = list(arguments)
            changed[place] = other(self, changed[place])
            return right(self, *changed, **options)

        return wrong

    return around(method, make, owner)


def wrong_root(group: Any, opts: Any) -> Any:
    opts.rootRank = (opts.rootRank + 1) % group.size()
    return opts


def rotated(group: Any, tensors: Any) -> Any:
    """Lists of tensors one further; parts of a tensor one further."""
    if isinstance(tensors, Tensor):
        n = tensors.numel() // group.size()
        return torch.cat([tensors.reshape(-1)[n:], tensors.reshape(-1)[:n]]).reshape(tensors.shape)
    if tensors and not isinstance(tensors[0], Tensor):
        return [rotated(group, tensors[0])]
    return [*tensors[1:], *tensors[:1]]


def parts_rotated(tensors: list[Tensor]) -> None:
    """Each rank's part is where the next one's belongs."""
    if len(tensors) > 1 and len({t.numel() for t in tensors}) == 1:
        for t, other in zip(tensors, [t.clone() for t in [*tensors[1:], tensors[0]]], strict=True):
            t.copy_(other)
    elif len(tensors) == 1:
        raw = tensors[0].view(-1).view(torch.uint8)
        raw.copy_(raw.roll(tensors[0].numel() // 3 * tensors[0].element_size()))


# --- conditions ---------------------------------------------------------------------------------------------


def in_async(group: Any, opts: Any, tensors: list[Tensor]) -> bool:
    return bool(opts.asyncOp)


def in_sync(group: Any, opts: Any, tensors: list[Tensor]) -> bool:
    return not opts.asyncOp


def in_subgroup(group: Any, opts: Any, tensors: list[Tensor]) -> bool:
    return group is not dist.group.WORLD


def on_last_rank(group: Any, opts: Any, tensors: list[Tensor]) -> bool:
    return bool(group.rank() == group.size() - 1)


def in_heap(group: Any, opts: Any, tensors: list[Tensor]) -> bool:
    return any(unisono.is_shared(t) for t in tensors)


def when_large(group: Any, opts: Any, tensors: list[Tensor]) -> bool:
    return any(t.numel() * t.element_size() > 1 << 20 for t in tensors)


def when_uneven(group: Any, opts: Any, tensors: list[Tensor]) -> bool:
    return len({t.numel() for t in tensors}) > 1
