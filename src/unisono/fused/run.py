"""How a planned fused matmul runs in a group of ranks: compute a piece, reduce it, round it once.

On a unisono group the products of a piece are written into the heap, and the core's ``matmul_reduce`` lets every rank
read all ranks' products of an equal share, reduce, scale, add the residual, round, and store into everybody's output,
in one pass. Pieces are as large as the caches allow, since a CPU has no second engine that could reduce meanwhile. On
other groups the same happens with that backend's all-reduce of float32, and torch's rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import _core
from ..base.tensors import empty, is_shared
from ..group.group import Group
from ..group.names import native
from .gemm import multiply, wide
from .plan import Piece, Plan

_OPS = {name: _core.OPS[name] for name in ("sum", "avg", "min", "max")}
_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_LEAST_PIECE = 1 << 16  # elements: 64 rows of 1024

AnyGroup = Group | dist.ProcessGroup | None


def rank_and_size(group: AnyGroup) -> tuple[int, int]:
    """This process's rank in the group, and how many there are; None is a group of one."""
    if group is None:
        return 0, 1
    if isinstance(group, Group):
        return group.rank, group.size
    return group.rank(), group.size()


def run(
    group: AnyGroup,
    plan: Plan,
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    bias_share: float,
    residual: torch.Tensor | None,
    reduce_op: str,
    scale: float,
    pieces: int,
) -> torch.Tensor:
    """The flat result in x's dtype: all of it, or this rank's part if the plan has counts."""
    dtype = x[0].dtype
    rank, size = rank_and_size(group)
    rows = torch.split_with_sizes(x[0], plan.rows) if plan.one_x else x
    offsets = _bias_rows(bias, bias_share, wide(dtype))
    core = native(group) if group is not None else None
    count = sum(plan.counts[rank::size]) if plan.counts else plan.total

    def compute(piece: Piece, into: torch.Tensor) -> torch.Tensor:
        parts = piece.parts
        multiply(
            into,
            [rows[i] if end - begin == rows[i].shape[0] else rows[i][begin:end] for i, begin, end in parts],
            [weight[i] for i, _, _ in parts],
            [plan.columns[i] for i, _, _ in parts],
            [offsets[i] for i, _, _ in parts] if offsets else None,
        )
        return into

    if group is None or (core is None and size == 1):
        products = torch.empty(plan.total, dtype=wide(dtype), device=x[0].device)
        compute(plan.pieces(1)[0], products)
        return _rounded(products, dtype, scale, residual)
    if core is not None and x[0].device.type == "cpu":
        out = empty(count, dtype=dtype)
        if residual is not None and plan.counts and not is_shared(residual):
            residual = empty(count, dtype=dtype).copy_(residual)
        cut = plan.pieces(pieces or _pieces_for(core, plan, wide(dtype)))
        scratch = empty(max(piece.count for piece in cut), dtype=wide(dtype))
        done = 0
        for piece in cut:
            products = compute(piece, scratch[: piece.count])
            counts = _counts_of(plan, piece) if plan.counts else None
            mine = piece.count if counts is None else sum(counts[rank::size])
            extra = None if residual is None else residual[done : done + mine]
            _finish(core, plan, products, out[done : done + mine], reduce_op, scale, extra, counts)
            done += mine
        return out
    assert isinstance(group, dist.ProcessGroup)
    products = torch.empty(plan.total, dtype=wide(dtype), device=x[0].device)
    works = []
    for piece in plan.pieces(pieces or 1):
        part = compute(piece, products[piece.begin : piece.begin + piece.count])
        works.append(dist.all_reduce(part, _TORCH_OPS[reduce_op], group, async_op=True))
    for work in works:
        work.wait()
    if reduce_op == "avg":
        products /= size
    if plan.counts:
        products = torch.cat(torch.split_with_sizes(products, plan.counts)[rank::size])
    return _rounded(products, dtype, scale, residual)


def reduce_values(group: AnyGroup, values: torch.Tensor, counts: Sequence[int], reduce_op: str) -> torch.Tensor:
    """Flat values reduced over the ranks: all of them, or with counts (outputs × ranks) this rank's."""
    rank, size = rank_and_size(group)
    core = native(group) if group is not None else None
    if core is not None and values.device.type == "cpu":
        plan = Plan("reduce", (values.numel(),), (0,), (1,), (), False, tuple(counts))
        shared = values if is_shared(values) and values.is_contiguous() else empty(values.numel(), dtype=values.dtype)
        if shared is not values:
            shared.copy_(values)
        out = empty(sum(counts[rank::size]) if counts else values.numel(), dtype=values.dtype)
        _finish(core, plan, shared, out, reduce_op, 1.0, None, counts or None)
        return out
    reduced = values.clone(memory_format=torch.contiguous_format)
    if group is not None:
        assert isinstance(group, dist.ProcessGroup)
        dist.all_reduce(reduced, _TORCH_OPS[reduce_op], group)
    if reduce_op == "avg":
        reduced /= size
    return torch.cat(torch.split_with_sizes(reduced, counts)[rank::size]) if counts else reduced


def gather_values(group: AnyGroup, values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The inverse of a scatter: every rank's flat values, in the order outputs × ranks of ``counts``."""
    rank, size = rank_and_size(group)
    mine = list(counts[rank::size])
    if sum(mine) != values.numel():
        raise ValueError(f"expected {sum(mine)} values of this rank, got {values.numel()}")
    if group is None:
        return values.clone(memory_format=torch.contiguous_format)
    core = native(group) if values.device.type == "cpu" else None
    whole = empty(sum(counts), dtype=values.dtype) if core else values.new_empty(sum(counts))
    targets = torch.split_with_sizes(whole, counts)
    for i, part in enumerate(torch.split_with_sizes(values.contiguous(), mine)):
        parts = targets[i * size : (i + 1) * size]
        if core is not None:
            begin = sum(counts[: i * size])
            of_output = list(counts[i * size : (i + 1) * size])
            core.all_gather(whole[begin : begin + sum(of_output)], part, of_output)
            continue
        assert isinstance(group, dist.ProcessGroup)
        parts[rank].copy_(part)
        for source, target in enumerate(parts):
            if target.numel():
                dist.broadcast(target, group=group, group_src=source)
    return whole


def _finish(
    core: Group,
    plan: Plan,
    products: torch.Tensor,
    out: torch.Tensor,
    reduce_op: str,
    scale: float,
    residual: torch.Tensor | None,
    counts: Sequence[int] | None,
) -> None:
    # What ranks must agree on beside the plan: dtype of the output, scale, and whether there is a residual.
    options = (_DTYPE_NUMBERS[out.dtype] * 2 + (residual is not None)) * 0x9E3779B97F4A7C15
    number = (plan.number ^ options ^ hash(scale) * 0xC2B2AE3D27D4EB4F) & 0xFFFF_FFFF_FFFF_FFFF
    core._comm.matmul_reduce(
        products,
        out,
        _OPS[reduce_op],
        scale,
        residual,
        counts,
        number,
        lambda: f"{plan.words}  {reduce_op}  {str(out.dtype).removeprefix('torch.')}",
        0.0,
    )


_DTYPE_NUMBERS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float64: 4}


def _bias_rows(bias: Sequence[torch.Tensor], share: float, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """This rank's share of every bias, in the dtype of the products."""
    if not bias:
        return ()
    flat = torch.cat([b.reshape(-1) for b in bias]) if len(bias) > 1 else bias[0].reshape(-1)
    flat = flat.to(dtype)
    flat = flat * share if share != 1 else flat.contiguous()
    return torch.split_with_sizes(flat, [b.numel() for b in bias])


def _rounded(products: torch.Tensor, dtype: torch.dtype, scale: float, residual: torch.Tensor | None) -> torch.Tensor:
    if scale != 1:
        products *= scale
    if residual is not None:
        products += residual
    return products.to(dtype)


def _pieces_for(group: Group, plan: Plan, dtype: torch.dtype) -> int:
    """As many as it takes for all ranks' products of a piece to stay in half of the last cache; the same everywhere."""
    most = group._comm.cache_bytes // 2 // (group.size * dtype.itemsize)
    return max(1, -(-plan.total // max(most, _LEAST_PIECE)))


def _counts_of(plan: Plan, piece: Piece) -> list[int]:
    """The part of the plan's counts that lies in a piece."""
    begin, end, at = piece.begin, piece.begin + piece.count, 0
    counts = []
    for n in plan.counts:
        counts.append(max(0, min(end, at + n) - max(begin, at)))
        at += n
    return counts
