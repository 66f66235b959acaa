"""A call of a torch.distributed function as data, how a rank makes it, and how it checks the result.

`tests.calls.Call` says what is computed; a `DistCall` adds which function of torch is asked for it, and in which
group. Coalesced functions take several tensors: `parts` of them, each with its own counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import reference
from tests.calls import EQUAL_RESULTS, REDUCING, Call, Placed, Started, factor_of, given, input_counts, taken
from tests.torch_backend import world


@dataclass(frozen=True)
class DistCall(Call):
    function: str = ""
    group: str = "world"
    parts: tuple[Any, ...] = ()  # counts of each tensor of a coalesced function


@dataclass
class Asked:
    """What a function is called with, apart from tensors."""

    group: Any
    op: Any
    root: dict[str, int]  # for broadcast and scatter
    root_dst: dict[str, int]  # for reduce and gather
    async_op: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.async_op}


# --- a tensor, or input and output, in memory ---------------------------------------------------------------


def one_tensor(started: Started, rank: int, mine: Tensor, want: Tensor | None) -> tuple[Tensor]:
    kind = started.call.kinds[rank][0]
    placed = started.watch("tensor", Placed(mine, kind, started.call), mine if want is None else want)
    started.wrote.append(placed)
    return (placed.tensor,)


def output_and_input(started: Started, rank: int, mine: Tensor, want: Tensor | None) -> tuple[Any, Any]:
    """Lists where the function takes lists; None where this rank has none."""
    call = started.call
    in_kind, out_kind = call.kinds[rank]
    received, sent = _pieces(call, rank)
    output = None if want is None else taken(started, "output", want, out_kind, received)
    no_input = call.verb == "scatter" and rank != call.root
    return output, None if no_input else given(started, "input", mine, in_kind, sent)


def _pieces(call: Call, rank: int) -> tuple[list[int] | None, list[int] | None]:
    """Elements of each tensor of the output list and of the input list; None where it is one tensor."""
    if call.form != "list":
        return None, None
    if call.verb == "all_to_all":
        return [row[rank] for row in call.counts], list(call.counts[rank])
    counts = list(call.counts)
    return (counts, None) if call.verb in ("all_gather", "gather") else (None, counts)


# --- the functions ------------------------------------------------------------------------------------------


def _single(name: str) -> Callable[..., Any]:
    def ask(asked: Asked, built: list[tuple[Any, Any]]) -> Any:
        ((output, source),) = built
        return getattr(dist, name)(output, source, **asked.options)

    return ask


def _reducing_single(name: str) -> Callable[..., Any]:
    def ask(asked: Asked, built: list[tuple[Any, Any]]) -> Any:
        ((output, source),) = built
        return getattr(dist, name)(output, source, op=asked.op, **asked.options)

    return ask


def _all_reduce(asked: Asked, built: list[tuple[Any]]) -> Any:
    return dist.all_reduce(built[0][0], op=asked.op, **asked.options)


def _all_reduce_coalesced(asked: Asked, built: list[tuple[Any]]) -> Any:
    return dist.all_reduce_coalesced([tensor for (tensor,) in built], op=asked.op, **asked.options)


def _reduce(asked: Asked, built: list[tuple[Any]]) -> Any:
    return dist.reduce(built[0][0], op=asked.op, **asked.root_dst, **asked.options)


def _broadcast(asked: Asked, built: list[tuple[Any]]) -> Any:
    return dist.broadcast(built[0][0], **asked.root, **asked.options)


def _gather(asked: Asked, built: list[tuple[Any, Any]]) -> Any:
    ((output, source),) = built
    return dist.gather(source, output, **asked.root_dst, **asked.options)


def _scatter(asked: Asked, built: list[tuple[Any, Any]]) -> Any:
    ((output, source),) = built
    return dist.scatter(output, source, **asked.root, **asked.options)


def _all_gather_coalesced(asked: Asked, built: list[tuple[Any, Any]]) -> Any:
    by_rank = [list(tensors) for tensors in zip(*(output for output, _ in built), strict=True)]
    return dist.all_gather_coalesced(by_rank, [source for _, source in built], **asked.options)


def _managed(name: str, device: str | None = None) -> Callable[..., Any]:
    """All of the calls inside `_coalescing_manager`, with the device's name as FSDP2 does, or without."""

    def ask(asked: Asked, built: list[tuple[Any, ...]]) -> Any:
        options = {"op": asked.op} if "gather" not in name else {}
        where = None if device is None else torch.device(device)
        with dist._coalescing_manager(asked.group, where, async_ops=asked.async_op) as manager:
            for tensors in built:
                getattr(dist, name)(*tensors, group=asked.group, async_op=asked.async_op, **options)
        return manager if asked.async_op else None

    return ask


def _broadcast_managed(asked: Asked, built: list[tuple[Any]]) -> Any:
    with dist._coalescing_manager(asked.group, torch.device("cpu"), async_ops=asked.async_op) as manager:
        for (tensor,) in built:
            dist.broadcast(tensor, **asked.root, **asked.options)
    return manager if asked.async_op else None


def _all_to_all_single(asked: Asked, built: list[tuple[Any, Any]]) -> Any:
    raise AssertionError("all_to_all_single is asked for with its splits, see start")


#: Function -> the verb of the model, "list" where it takes lists, how to ask for it.
FUNCTIONS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "all_reduce": ("all_reduce", "in_place", _all_reduce),
    "all_reduce_coalesced": ("all_reduce", "in_place", _all_reduce_coalesced),
    "all_reduce, managed": ("all_reduce", "in_place", _managed("all_reduce")),
    "all_reduce, managed with device": ("all_reduce", "in_place", _managed("all_reduce", "cpu")),
    "reduce": ("reduce", "in_place", _reduce),
    "broadcast": ("broadcast", "in_place", _broadcast),
    "broadcast, managed with device": ("broadcast", "in_place", _broadcast_managed),
    "all_gather": ("all_gather", "list", _single("all_gather")),
    "all_gather_single": ("all_gather", "plain", _single("all_gather_single")),
    "all_gather_into_tensor": ("all_gather", "plain", _single("all_gather_into_tensor")),
    "all_gather_coalesced": ("all_gather", "list", _all_gather_coalesced),
    "all_gather_single, managed": ("all_gather", "plain", _managed("all_gather_single")),
    "all_gather_into_tensor, managed": ("all_gather", "plain", _managed("all_gather_into_tensor")),
    "reduce_scatter": ("reduce_scatter", "list", _reducing_single("reduce_scatter")),
    "reduce_scatter_single": ("reduce_scatter", "plain", _reducing_single("reduce_scatter_single")),
    "reduce_scatter_tensor": ("reduce_scatter", "plain", _reducing_single("reduce_scatter_tensor")),
    "reduce_scatter_single, managed": ("reduce_scatter", "plain", _managed("reduce_scatter_single")),
    "reduce_scatter_tensor, managed": ("reduce_scatter", "plain", _managed("reduce_scatter_tensor")),
    "gather": ("gather", "list", _gather),
    "scatter": ("scatter", "list", _scatter),
    "all_to_all": ("all_to_all", "list", _single("all_to_all")),
    "all_to_all_single": ("all_to_all", "plain", _all_to_all_single),
}


def torch_op(name: str, rank: int) -> Any:
    if name == "premul_sum":
        return dist._make_nccl_premul_sum(factor_of(rank))
    return getattr(dist.ReduceOp, name.upper())


def start(call: DistCall) -> Started | None:
    """Make the call on this rank; None if it is not in the group."""
    members = world.groups[call.group]
    if members.group is None:
        return None
    rank, size = members.rank, len(members.ranks)
    by_number = call.seed % 2 == 0  # a root is named by its rank in the default group, or in this one
    root = call.root if by_number else members.ranks[call.root]
    asked = Asked(
        None if call.group == "world" and call.seed % 3 else members.group,
        torch_op(call.op, rank) if call.verb in REDUCING else None,
        {"group_src" if by_number else "src": root},
        {"group_dst" if by_number else "dst": root},
        call.async_op,
    )
    parts = call.parts or (call.counts,)
    factors = [factor_of(r) for r in range(size)] if call.op == "premul_sum" else None
    started = Started(call)
    built = []
    for index, counts in enumerate(parts):
        piece = replace(call, counts=counts, seed=call.seed + 1000 * index)
        part = Started(piece, started.watched, None, started.wrote)
        # Inputs belong to ranks of the default group, so an order of ranks that is mixed up shows.
        inputs = [
            reference.make_input(call.dtype, count, members.ranks[r], piece.seed, call.special)
            for r, count in enumerate(input_counts(piece, size))
        ]
        want = reference.expected(rank, call.verb, inputs, counts, call.op, call.root, factors)
        build = one_tensor if isinstance(counts, int) else output_and_input
        built.append(build(part, rank, inputs[rank], want))
    if call.function == "all_to_all_single":
        started.handle = _ask_all_to_all_single(asked, call, rank, *built[0])
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch would rather have us use the new names
            started.handle = FUNCTIONS[call.function][2](asked, built)
    if not call.async_op and started.handle is not None:
        raise AssertionError(f"{call.function} without async_op returned {started.handle!r}, not None")
    return started


def _ask_all_to_all_single(asked: Asked, call: DistCall, rank: int, output: Tensor, source: Tensor) -> Any:
    """Splits are rows of dim 0; none where all are equal, or only one of the two."""
    received = [row[rank] // _columns(output) for row in call.counts]
    sent = [n // _columns(source) for n in call.counts[rank]]
    splits: list[Any] = [received, sent]
    if len({n for row in call.counts for n in row}) == 1 and call.seed % 4:
        splits = [[None, None], [received, None], [None, sent]][call.seed % 4 - 1]
    return dist.all_to_all_single(output, source, *splits, **asked.options)


def _columns(tensor: Tensor) -> int:
    return tensor.size(1) if tensor.dim() > 1 else 1


def run_calls(calls: Sequence[DistCall]) -> tuple[list[str], list[int | None]]:
    """On a rank: make every call, return complaints with the call in question, and the outputs' checksums."""
    complaints: list[str] = []
    checksums: list[int | None] = []
    for index, call in enumerate(calls):
        try:
            started = start(call)
            found, checksum = ([], None) if started is None else started.finish()
        except Exception as error:
            raise AssertionError(f"call {index} of {len(calls)}, {call}: {error!r}") from error
        complaints += [f"{line}\n      in {call}" for line in found]
        checksums.append(checksum)
    return complaints[:20], checksums


def check(ranks: Any, calls: Sequence[DistCall]) -> None:
    """In the test: make these calls on all ranks and fail with the cases that went wrong."""
    assert calls, "no calls to check"
    results = ranks.run(run_calls, list(calls))
    lines = [f"rank {rank}: {line}" for rank, (complaints, _) in enumerate(results) for line in complaints]
    for index, call in enumerate(calls):
        sums = {checksums[index] for _, checksums in results} - {None}
        if call.verb in EQUAL_RESULTS and len(sums) > 1:
            lines.append(f"ranks hold different bits {sums} after {call}")
    assert not lines, f"{len(lines)} complaints, the first are:\n  " + "\n  ".join(lines[:12])
