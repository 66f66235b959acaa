"""A collective call as data, how a rank makes it, and how it checks the result against the model.

A `Call` says everything: verb, dtype, counts, op, root, and for every rank where input and output lie. Every
rank can therefore make all ranks' inputs from the seed and compute alone what it must receive. Tensors have
guard bytes on both sides; what a call must not write is compared too.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import unisono
from tests import reference

LIMIT_S = 60.0  # per call, so that a rank that fails does not keep the others for the group's 300 s
GUARD_BYTES = 64
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
EQUAL_RESULTS = ("all_reduce", "broadcast", "all_gather")  # every rank receives the same bits


@dataclass(frozen=True)
class Call:
    verb: str
    dtype: str = "float32"
    counts: Any = 0  # one number; elements per rank; or for all_to_all row r = what rank r sends to each
    op: str = "sum"
    root: int = 0
    kinds: tuple[str, ...] = ()  # per rank two letters, input and output: h(eap), o(rdinary), m(ixed list)
    form: str = "plain"  # plain, in_place, list
    shift: int = 0  # elements between the allocation's aligned start and the tensor
    columns: int = 1
    async_op: bool = False
    special: bool = False  # NaN, infinities, denormals among the inputs
    seed: int = 0


class Placed:
    """A tensor with this content inside guard bytes, in heap or ordinary memory."""

    def __init__(self, content: Tensor, kind: str, call: Call) -> None:
        size_bytes = content.numel() * content.element_size()
        start = GUARD_BYTES + call.shift * content.element_size()
        total = start + size_bytes + GUARD_BYTES
        make = unisono.empty if kind == "h" else torch.empty
        self.bytes = make(total, dtype=torch.uint8)
        self.bytes[:start] = 0xA5
        self.bytes[start + size_bytes :] = 0xA5
        self.before, self.after = self.bytes[:start], self.bytes[start + size_bytes :]
        self.flat = self.bytes[start : start + size_bytes].view(content.dtype)
        self.flat.view(torch.uint8).copy_(reference.raw_bytes(content))
        whole = call.columns > 1 and content.numel() > 0 and content.numel() % call.columns == 0
        self.tensor = self.flat.view(-1, call.columns) if whole else self.flat

    def guards_hold(self) -> bool:
        return bool((self.before == 0xA5).all()) and bool((self.after == 0xA5).all())


def unwritten(count: int, dtype: torch.dtype) -> Tensor:
    """What an output holds before the call."""
    return torch.full((count * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype)


@dataclass
class Started:
    """A call in flight: what to wait for, and (label, tensor, wanted content) for everything it was given."""

    call: Call
    watched: list[tuple[str, Placed, Tensor]] = field(default_factory=list)
    handle: Any = None
    wrote: list[Placed] = field(default_factory=list)

    def watch(self, label: str, placed: Placed, want: Tensor) -> Placed:
        self.watched.append((label, placed, want))
        return placed

    def finish(self) -> tuple[list[str], int]:
        """Wait, compare; returns complaints and a checksum of the output's bits."""
        if self.handle is not None:
            self.handle.wait()
        signs = self.call.op not in ("min", "max")
        complaints = []
        for label, placed, want in self.watched:
            found = reference.difference(placed.flat, want, signs_of_zero=signs)
            if found:
                complaints.append(f"{label}: {found}")
            if not placed.guards_hold():
                complaints.append(f"{label}: bytes outside the tensor were written")
        checksum = 0
        if self.call.verb in EQUAL_RESULTS:
            for placed in self.wrote:
                checksum = zlib.crc32(reference.raw_bytes(placed.flat).numpy(), checksum)
        return complaints, checksum


def factor_of(rank: int) -> float:
    return 0.3 + 0.5 * rank


def input_counts(call: Call, size: int) -> list[int]:
    if isinstance(call.counts, int):
        return [call.counts] * size
    if call.verb in ("all_gather", "gather"):
        return list(call.counts)
    if call.verb == "all_to_all":
        return [sum(row) for row in call.counts]
    return [sum(call.counts)] * size


def start(group: unisono.Group, call: Call) -> Started:
    """Make the call on this rank."""
    rank, size = group.rank, group.size
    inputs = [
        reference.make_input(call.dtype, count, r, call.seed, call.special)
        for r, count in enumerate(input_counts(call, size))
    ]
    factors = [factor_of(r) for r in range(size)] if call.op == "premul_sum" else None
    want = reference.expected(rank, call.verb, inputs, call.counts, call.op, call.root, factors)
    options: dict[str, Any] = {"async_op": call.async_op, "timeout_s": LIMIT_S}
    if call.verb in REDUCING:
        options["op"] = call.op
        if factors:
            options["factor"] = factors[rank]
    started = Started(call)
    make = _one_tensor if isinstance(call.counts, int) else _chunks
    started.handle = make(group, call, started, inputs[rank], want, options)
    if not call.async_op and started.handle is not None:
        raise AssertionError(f"{call.verb} without async_op returned {started.handle!r}, not None")
    return started


def _one_tensor(group, call: Call, started: Started, mine: Tensor, want: Tensor | None, options):
    """all_reduce, reduce, broadcast: one count, the tensor itself or `out`."""
    in_kind, out_kind = call.kinds[group.rank]
    if call.verb == "broadcast":
        placed = started.watch("tensor", Placed(mine, in_kind, call), want)
        started.wrote.append(placed)
        return group.broadcast(placed.tensor, call.root, **options)
    arguments = () if call.verb == "all_reduce" else (call.root,)
    verb = getattr(group, call.verb)
    if call.form == "in_place" or want is None:
        placed = started.watch("tensor", Placed(mine, in_kind, call), mine if want is None else want)
        started.wrote.append(placed)
        return verb(placed.tensor, *arguments, **options)
    source = started.watch("tensor (input)", Placed(mine, in_kind, call), mine)
    out = started.watch("out", Placed(unwritten(want.numel(), want.dtype), out_kind, call), want)
    started.wrote.append(out)
    return verb(source.tensor, *arguments, out=out.tensor, **options)


def _chunks(group, call: Call, started: Started, mine: Tensor, want: Tensor | None, options):
    """The verbs with counts: a whole and its chunks, as one tensor or as a list."""
    rank = group.rank
    in_kind, out_kind = call.kinds[rank]
    verb = getattr(group, call.verb)
    is_list = call.form == "list"
    if call.verb == "all_to_all":
        sent, received = list(call.counts[rank]), [row[rank] for row in call.counts]
        source = given(started, "input", mine, in_kind, sent if is_list else None)
        output = taken(started, "output", want, out_kind, received if is_list else None)
        if is_list or (len({n for row in call.counts for n in row}) == 1 and call.seed % 2):
            return verb(output, source, **options)
        return verb(output, source, received, sent, **options)

    counts = list(call.counts)
    pieces = counts if is_list else None
    stated = None if (is_list or len(set(counts)) == 1) and call.seed % 2 else counts
    if call.form == "in_place":
        return _chunks_in_place(group, call, started, mine, want, stated, options)
    if call.verb == "all_gather":
        source = given(started, "input", mine, in_kind, None)
        return verb(taken(started, "output", want, out_kind, pieces), source, stated, **options)
    if call.verb == "gather":
        source = given(started, "input", mine, in_kind, None)
        output = None if want is None else taken(started, "output", want, out_kind, pieces)
        return verb(output, source, call.root, stated, **options)
    if call.verb == "reduce_scatter":
        source = given(started, "input", mine, in_kind, pieces)
        return verb(taken(started, "output", want, out_kind, None), source, stated, **options)
    assert call.verb == "scatter", call.verb
    source = given(started, "input", mine, in_kind, pieces) if rank == call.root else None
    return verb(taken(started, "output", want, out_kind, None), source, call.root, stated, **options)


def given(started: Started, label: str, content: Tensor, kind: str, counts: list[int] | None):
    """An input, which must not change."""
    pieces = _placed_pieces(started, label, content, content, kind, counts)
    return pieces[0].tensor if counts is None else [piece.tensor for piece in pieces]


def taken(started: Started, label: str, want: Tensor, kind: str, counts: list[int] | None):
    """An output, full of a pattern until the call writes it."""
    pieces = _placed_pieces(started, label, unwritten(want.numel(), want.dtype), want, kind, counts)
    started.wrote.extend(pieces)
    return pieces[0].tensor if counts is None else [piece.tensor for piece in pieces]


def _placed_pieces(started: Started, label, content: Tensor, want: Tensor, kind: str, counts) -> list[Placed]:
    if counts is None:
        return [started.watch(label, Placed(content, "h" if kind == "m" else kind, started.call), want)]
    pieces = []
    for index in range(len(counts)):
        span = reference.span(counts, index)
        memory = kind if kind != "m" else "ho"[index % 2]
        placed = Placed(content[span], memory, started.call)
        pieces.append(started.watch(f"{label}[{index}]", placed, want[span]))
    return pieces


def _chunks_in_place(group, call: Call, started: Started, mine: Tensor, want: Tensor, stated, options):
    """all_gather from the own slice of the output, reduce_scatter into the own slice of the input."""
    kind = call.kinds[group.rank][0]
    span = reference.span(call.counts, group.rank)
    if call.verb == "all_gather":
        before = unwritten(want.numel(), want.dtype)
        before.view(torch.uint8)[_byte_span(span, want)] = reference.raw_bytes(mine)
        whole = started.watch("output", Placed(before, kind, call), want)
        started.wrote.append(whole)
        return group.all_gather(whole.tensor, whole.flat[span], stated, **options)
    assert call.verb == "reduce_scatter", call.verb
    after = mine.clone()
    after.view(torch.uint8)[_byte_span(span, want)] = reference.raw_bytes(want)
    whole = started.watch("input", Placed(mine, kind, call), after)
    return group.reduce_scatter(whole.flat[span], whole.tensor, stated, **options)


def _byte_span(span: slice, like: Tensor) -> slice:
    return slice(span.start * like.element_size(), span.stop * like.element_size())


# --- many calls in one trip to the ranks --------------------------------------------------------------------


def run_calls(group: unisono.Group, calls: Sequence[Call]) -> tuple[list[str], list[int]]:
    """On a rank: make every call, return complaints with the call in question, and the outputs' checksums."""
    complaints, checksums = [], []
    for index, call in enumerate(calls):
        try:
            found, checksum = start(group, call).finish()
        except Exception as error:
            raise AssertionError(f"call {index} of {len(calls)}, {call}: {error!r}") from error
        complaints += [f"{line}\n      in {call}" for line in found]
        checksums.append(checksum)
    return complaints[:20], checksums


def check(pool: Any, calls: Sequence[Call]) -> None:
    """In the test: make these calls on all ranks and fail with the cases that went wrong."""
    assert calls, "no calls to check"
    results = pool.run(run_calls, list(calls))
    lines = [f"rank {rank}: {line}" for rank, (complaints, _) in enumerate(results) for line in complaints]
    for index, call in enumerate(calls):
        sums = [checksums[index] for _, checksums in results]
        if call.verb in EQUAL_RESULTS and len(set(sums)) > 1:
            lines.append(f"ranks hold different bits {sums} after {call}")
    assert not lines, f"{len(lines)} complaints, the first are:\n  " + "\n  ".join(lines[:12])


# --- making cases -------------------------------------------------------------------------------------------

THRESHOLD_BYTES = (40, 456, 4096, 16384, 32768, 65536, 131072, 262144, 1048576)


def threshold_counts(dtype: str, size: int, limit_bytes: int = 1048576) -> list[int]:
    """0, 1, odd, and one element around every size at which the method changes."""
    item = reference.dtype_of(dtype).itemsize
    counts = {0, 1, 2, 3, 7, 1021}
    for edge in THRESHOLD_BYTES:
        if edge <= limit_bytes:
            counts |= {max(0, edge // item + by) for by in (-1, 0, 1)} | {edge // size // item + 1}
    return sorted(counts)


def all_kinds(size: int) -> list[tuple[str, ...]]:
    """Heap or ordinary, for input and output, equal on all ranks and mixed between them."""
    mixed = [("hh",) + ("oo",) * (size - 1), ("hh",) * (size - 1) + ("oo",)] if size > 1 else []
    return [("hh",) * size, ("oo",) * size, ("ho",) * size, ("oh",) * size, *mixed]


def splits(total: int, size: int) -> list[tuple[int, ...]]:
    """Ways to cut `total` elements into `size` chunks: equal, 1:3, 1:15, 0:1, zipf, all to one."""
    if size == 1:
        return [(total,), (0,)]
    few = [total * (1 if r % 2 == 0 else 3) // (4 * ((size + 1) // 2)) for r in range(size)]
    skewed = [total // 16 if r != 1 else total - total // 16 * (size - 1) for r in range(size)]
    weight = sum(1 / (r + 1) for r in range(size))
    zipf = [int(total / (r + 1) / weight) for r in range(size)]
    return [
        (total // size,) * size,
        tuple(few),
        tuple(max(0, n) for n in skewed),
        (0,) + (total // size,) * (size - 1),
        tuple(zipf),
        (0,) * (size - 1) + (total,),
        (0,) * size,
    ]


def matrices(total: int, size: int) -> list[tuple[tuple[int, ...], ...]]:
    """What each rank sends to each: equal, uneven rows, the diagonal, one silent rank, nothing at all."""
    cell = max(1, total // size)
    spread_rows = [tuple(cell * ((r * 5 + c * 3) % 4) // 2 for c in range(size)) for r in range(size)]
    return [
        tuple((cell,) * size for _ in range(size)),
        tuple(spread_rows),
        tuple(tuple(cell if r == c else 0 for c in range(size)) for r in range(size)),
        tuple(tuple(0 if r == 0 else cell + c for c in range(size)) for r in range(size)),
        tuple((0,) * size for _ in range(size)),
    ]


def sampled(limit: int, **axes: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """`limit` combinations in which every value of every axis appears equally often, always the same ones."""
    chance = random.Random(repr(sorted(axes)))
    turns: dict[str, list[Any]] = {name: [] for name in axes}
    for _ in range(limit):
        picked = {}
        for name, values in axes.items():
            if not turns[name]:
                turns[name] = list(values)
                chance.shuffle(turns[name])
            picked[name] = turns[name].pop()
        yield picked


def sampled_calls(verb: str, limit: int, fix: Callable | None = None, **axes: Any) -> list[Call]:
    """Calls from `sampled`, each with its own seed; `fix` completes a combination."""
    calls = []
    for seed, picked in enumerate(sampled(limit, **axes)):
        calls.append(Call(verb, seed=seed, **(fix(picked) if fix else picked)))
    return calls


def with_dtype_and_op(picked: dict[str, Any]) -> dict[str, Any]:
    """For `fix`: the axis "pair" holds (dtype, op)."""
    dtype, op = picked.pop("pair")
    return {**picked, "dtype": dtype, "op": op}
