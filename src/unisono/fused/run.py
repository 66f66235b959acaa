"""How a planned fused matmul runs in a group of ranks: compute a piece, reduce it, round it once.

The products of a piece are written where the group's transport wants them, and its verb ``matmul_reduce`` reduces them,
scales, adds the residual and rounds. On a unisono group that is one pass, in which every rank reads all ranks' products
of an equal share and stores into everybody's output; pieces are as large as the caches allow, since a CPU has no second
engine that could reduce meanwhile. Other transports reduce in the background while the next piece is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from ..base.errors import MismatchError, make_argument_error
from ..base.handle import Handle
from ..base.tensors import is_shared
from ..transport.backend import round_products
from ..transport.protocol import Transport
from .gemm import DTYPES, is_one_subtree_each, multiply, plain_weight, subtrees, wide
from .plan import Piece, Plan, Shape, own_count

Cuts: TypeAlias = list[list[int]] | None  # every group's depth on every rank

_LEAST_PIECE = 1 << 16  # elements: 64 rows of 1024


class How(NamedTuple):
    """How products become results; ``pieces`` 0: chosen, ``parts``: in the tree order, see :func:`multiply`."""

    reduce_op: str = "sum"
    scale: float = 1.0
    bias_share: float = 1.0
    pieces: int = 0
    parts: int = 0


def run(
    transport: Transport | None,
    plan: Plan,
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    how: How,
    exact: bool = False,
) -> torch.Tensor:
    """The flat result in x's dtype: all of it, or this rank's part if the plan has counts.

    ``transport`` None: no group, this rank only. ``exact``: the result is not rounded to x's dtype.
    """
    like = x[0]
    dtype = wide(like.dtype)
    if how.parts and bias:
        return _with_bias(transport, plan, x, weight, bias, residual, how)
    result = like.new_empty(0, dtype=dtype) if exact else like
    cuts = _cuts(transport, plan, result, how.scale, residual is not None) if how.parts else None
    rows = x if len(x) == len(plan.rows) else torch.split_with_sizes(like, plan.rows)
    offsets = _bias_rows(bias, how.bias_share, dtype)

    def compute(piece: Piece, into: torch.Tensor) -> torch.Tensor:
        rows_of = piece.parts
        multiply(
            into,
            [rows[i] if end - begin == rows[i].shape[0] else rows[i][begin:end] for i, begin, end in rows_of],
            [weight[i] for i, _, _ in rows_of],
            [plan.columns[i] for i, _, _ in rows_of],
            [offsets[i] for i, _, _ in rows_of] if offsets else None,
            how.parts,
        )
        return into

    if transport is None:
        products = compute(plan.pieces(1)[0], like.new_empty(plan.total, dtype=dtype))
        out = result.new_empty(plan.total)
        round_products(products, out, how.scale, residual)
        return out
    out = _new(transport, result, own_count(plan.counts, transport.rank, transport.size, plan.total))
    if cuts is not None:
        sums = _own(transport, plan, _sum_of_subtrees(transport, plan, rows, weight, cuts, how.pieces))
        round_products(sums, out, how.scale, residual)
        return out
    if residual is not None and plan.counts and not is_shared(residual):
        residual = _copy(transport, residual)
    _reduce_pieces(transport, plan, compute, dtype, out, residual, how)
    return out


def _reduce_pieces(
    transport: Transport,
    plan: Plan,
    compute: Callable[[Piece, torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    how: How,
) -> None:
    """Computes piece after piece, in ``dtype``, and reduces it into its part of ``out``."""
    cut = plan.pieces(how.pieces or _pieces_for(transport, plan, dtype))
    in_place = out.dtype is dtype and not plan.counts  # products become sums where they are
    largest = max(piece.count for piece in cut)
    scratch, handles, done = None, [], 0
    for piece in cut:
        end = done + own_count(piece.counts, transport.rank, transport.size, piece.count)
        if scratch is None and not in_place:
            scratch = _new(transport, out, largest, dtype)
        products = compute(piece, out[done:end] if scratch is None else scratch[: piece.count])
        extra = None if residual is None else residual[done:end]
        handle = _reduce(transport, plan, products, out[done:end], how, extra, piece.counts)
        if handle is not None:
            handles.append(handle)
            scratch = None  # in use until the call is over
        done = end
    for handle in handles:
        handle.wait()


def _with_bias(
    transport: Transport | None,
    plan: Plan,
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    how: How,
) -> torch.Tensor:
    """In the tree order: the bias is added to the whole sum, since shares of it would be rounded with the products.

    A bias that all ranks hold alike is then the same bits for every number of ranks: their sum and its share are exact
    in float64.
    """
    sums = run(transport, plan, x, weight, (), None, How(pieces=how.pieces, parts=how.parts), exact=True)
    flat = reduce_values(transport, flat_of(bias).to(sums.dtype).double(), (), "sum") * how.bias_share
    rows = torch.split_with_sizes(flat.to(sums.dtype), plan.columns)
    whole = flat_of([row.expand(m, -1) for row, m in zip(rows, plan.rows, strict=True)])
    if transport is not None:
        whole = _own(transport, plan, whole)
    like = x[0]
    out = like.new_empty(sums.numel()) if transport is None else _new(transport, like, sums.numel())
    round_products(sums + whole, out, how.scale, residual)
    return out


def reduce_values(
    transport: Transport | None, values: torch.Tensor, counts: Sequence[int], reduce_op: str, label: str = ""
) -> torch.Tensor:
    """Flat values reduced over the ranks: all of them, or with counts (outputs × ranks) this rank's.

    ``label``: in the tree order, what must be the same on all ranks.
    """
    if label:
        _check_by_tree(transport)
    if transport is None:
        return values.clone(memory_format=torch.contiguous_format)
    out = _new(transport, values, own_count(counts, transport.rank, transport.size, values.numel()))
    if not counts:
        transport.all_reduce(values.contiguous(), out, reduce_op, None, None, False)
        return out
    plan = Plan(label or "reduce", (values.numel(),), (1,), (), tuple(counts))
    # The reduction may overwrite the copy.
    handle = _reduce(transport, plan, _copy(transport, values), out, How(reduce_op), None, counts)
    if handle is not None:
        handle.wait()
    return out


def gather_values(transport: Transport | None, values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The inverse of a scatter: every rank's flat values, in the order outputs × ranks of ``counts``."""
    rank, size = (0, 1) if transport is None else (transport.rank, transport.size)
    mine = list(counts[rank::size])
    if sum(mine) != values.numel():
        raise ValueError(f"expected {sum(mine)} values of this rank, got {values.numel()}")
    if transport is None:
        return values.clone(memory_format=torch.contiguous_format)
    whole = _new(transport, values, sum(counts))
    begin = 0
    for i, part in enumerate(torch.split_with_sizes(values.contiguous(), mine)):
        of_output = list(counts[i * size : (i + 1) * size])
        end = begin + sum(of_output)
        transport.all_gather(whole[begin:end], part, of_output, None, False)
        begin = end
    return whole


def flat_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors' elements one behind the other."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])


def parts_of(flat: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Tensors of these shapes, one behind the other; views made one by one, so that users may write to them."""
    if len(shapes) == 1:
        return [flat.view(shapes[0])]
    parts, at = [], 0
    for shape in shapes:
        end = at + prod(shape)
        parts.append(flat[at:end].view(shape))
        at = end
    return parts


def _new(transport: Transport, like: torch.Tensor, count: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A flat tensor where the transport wants those of fused matmuls."""
    made = transport.new_rows(like.new_empty(0, dtype=dtype), count)
    if made is None:
        raise make_argument_error("device", "x", "cpu", str(like.device))
    return made


def _copy(transport: Transport, flat: torch.Tensor) -> torch.Tensor:
    """A copy where peers can read it."""
    return _new(transport, flat, flat.numel()).copy_(flat)


def _reduce(
    transport: Transport,
    plan: Plan,
    products: torch.Tensor,
    out: torch.Tensor,
    how: How,
    residual: torch.Tensor | None,
    counts: Sequence[int] | None,
) -> Handle | None:
    number = _with_options(plan.number, out.dtype, how.scale, residual is not None)

    def words() -> str:
        return f"{plan.words}  {how.reduce_op}  {str(out.dtype).removeprefix('torch.')}"

    return transport.matmul_reduce(products, out, how.reduce_op, how.scale, residual, counts, number, words, None)


def _with_options(number: int, dtype: torch.dtype, scale: float, has_residual: bool) -> int:
    """What ranks must agree on beside the plan: dtype of the output, scale, and whether there is a residual."""
    options = (DTYPES.index(dtype) * 2 + has_residual) * 0x9E3779B97F4A7C15
    return (number ^ options ^ hash(scale) * 0xC2B2AE3D27D4EB4F) & 0xFFFF_FFFF_FFFF_FFFF


def _cuts(transport: Transport | None, plan: Plan, like: torch.Tensor, scale: float, extra: bool) -> Cuts:
    """In the tree order: every group's depth on every rank; None where every rank has one subtree.

    A rank knows its own depths only, so they are gathered; then all ranks go the same way, or raise the same error.
    ``like`` has the dtype of the output, ``extra``: there is a residual.
    """
    _check_by_tree(transport)
    if transport is None or transport.size == 1:
        return None
    agreed = _with_options(plan.agreed, like.dtype, scale, extra) >> 1
    mine = torch.tensor([agreed, *plan.depths], dtype=torch.int64)
    every = torch.empty(transport.size, len(mine), dtype=torch.int64)
    transport.all_gather(every.view(-1), mine, None, None, False)
    if bool((every[:, 0] != agreed).any()):
        raise MismatchError(f"ranks disagree on the shapes or options\n  rank {transport.rank}: {plan.words}")
    cuts = every[:, 1:].t().tolist()
    for i, depths in enumerate(cuts):
        subtrees(depths, i)
    return None if all(is_one_subtree_each(depths) for depths in cuts) else cuts


def _sum_of_subtrees(
    transport: Transport,
    plan: Plan,
    rows: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    cuts: Sequence[Sequence[int]],
    pieces: int,
) -> torch.Tensor:
    """All sums, where a rank's part of a depth may be several subtrees: their sums are gathered and added in order."""
    sums = rows[0].new_empty(plan.total, dtype=torch.float32)
    at = 0
    for piece in plan.pieces(pieces or _pieces_for(transport, plan, sums.dtype)):
        for i, begin, end in piece.parts:
            n, count = plan.columns[i], (end - begin) * plan.columns[i]
            unit, of_ranks = subtrees(cuts[i], i)
            mine = of_ranks[transport.rank]
            held = weight[i] if len(mine) == 1 else plain_weight(weight[i], n)
            partial = _new(transport, sums, len(mine) * count)
            for to, (first, last, _) in zip(partial.view(len(mine), count), mine, strict=True):
                x, w = (rows[i], held) if len(mine) == 1 else (rows[i][:, first:last], held[first:last])
                multiply(to, [x[begin:end]], [w], [n], None, unit=unit)
            every = _new(transport, sums, sum(map(len, of_ranks)) * count)
            transport.all_gather(every, partial, [len(rank) * count for rank in of_ranks], None, False)
            waiting: list[torch.Tensor] = []
            trees = [tree for rank in of_ranks for tree in rank]
            for part, (_, _, joins) in zip(every.view(len(trees), count), trees, strict=True):
                for _ in range(joins):
                    part = waiting.pop() + part
                waiting.append(part)
            sums[at : at + count] = waiting[0] if waiting else 0.0
            at += count
    return sums


def _own(transport: Transport, plan: Plan, flat: torch.Tensor) -> torch.Tensor:
    """This rank's part of all elements, if the plan has counts."""
    if not plan.counts:
        return flat
    return torch.cat(torch.split_with_sizes(flat, plan.counts)[transport.rank :: transport.size])


def _check_by_tree(transport: Transport | None) -> None:
    if transport is not None and transport.size > 1 and not transport.by_tree:
        raise ValueError("order 'tree' needs a group of unisono: other backends sum over the ranks in their own order")


def _bias_rows(bias: Sequence[torch.Tensor], share: float, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """This rank's share of every bias, in the dtype of the products."""
    if not bias:
        return ()
    flat = flat_of(bias).to(dtype)
    flat = flat * share if share != 1 else flat.contiguous()
    return torch.split_with_sizes(flat, [b.numel() for b in bias])


def _pieces_for(transport: Transport, plan: Plan, dtype: torch.dtype) -> int:
    """As many as it takes for all ranks' products of a piece to stay in half of the last cache; the same everywhere."""
    if not transport.cache_bytes:
        return 1
    most = transport.cache_bytes // 2 // (transport.size * dtype.itemsize)
    return max(1, -(-plan.total // max(most, _LEAST_PIECE)))
