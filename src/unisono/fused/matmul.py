"""Matrix products fused with the collective before or after them: tensor parallelism in one call.

Every function here computes in float32 (float64 for float64), reduces over the ranks in float32 and rounds once, to the
dtype of x; all ranks get the same bits. A *group* of a grouped product is one pair of matrices; the ``group`` argument
says which ranks take part: None, a name, a torch ProcessGroup of any backend, or a unisono Group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ..calls.groups import member, transport
from ..group import names as groups
from ..group.names import GroupLike
from . import operators as fused_ops
from . import run as fused_run
from .arguments import flat_residual, number_list, read_groups, read_pair, split_lists, tensor_list
from .gemm import PreparedWeight
from .plan import Plan, check_reduction, check_splits, planned_scatter, product_of

Weight: TypeAlias = torch.Tensor | PreparedWeight
Numbers: TypeAlias = Sequence[int] | torch.Tensor

__all__ = [
    "PreparedWeight",
    "all_gather_grouped_matmul",
    "all_gather_matmul",
    "grouped_matmul_all_reduce",
    "grouped_matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]


def grouped_matmul_all_reduce(
    x: Sequence[torch.Tensor] | torch.Tensor,
    weight: Sequence[Weight] | Weight,
    group: GroupLike = None,
    *,
    bias: Sequence[torch.Tensor | None] | None = None,
    group_list: Numbers | None = None,
    split_item: int = 0,
    reduce_op: str = "sum",
    comm_turn: int = 0,
    bias_mode: str = "mean",
    residual: Sequence[torch.Tensor] | torch.Tensor | None = None,
    scale: float = 1.0,
    backward: str = "all_reduce",
) -> list[torch.Tensor]:
    """Multiplies pairs of matrices and sums each product over the ranks.

    Rank r holds columns of x and the same rows of the weights; group i is ``Σ_r x_ir @ weight_ir + Σ_r bias_ir / n``::

        rank 0  x [[1]]   weight [[2, 3]]       y [[2 + 40, 3 + 50]]
        rank 1  x [[10]]  weight [[4, 5]]   ->  y [[2 + 40, 3 + 50]]

    ========== ============ ========== ================ ======================
    split_item x            group_list weight           y, always a list
    ========== ============ ========== ================ ======================
    0          E, 2-D or up none       E × [K_i, N_i]   E × [..., N_i]
    1          one [M, K]   E entries  E × [K, N_i]     E × [M_i, N_i]
    2          E × [M_i, K] none       E × [K_i, N]     one [ΣM_i, N]
    3          one [M, K]   E entries  E × [K, N], or   one [M, N]
                                       one [E, K, N]
    ========== ============ ========== ================ ======================

    ``group_list`` holds counts of rows, or their running totals; empty groups are fine. A bias that is the same on all
    ranks is added once; with ``bias_mode="sum"`` every rank's is added in full. ``scale`` multiplies the reduced
    product, ``residual`` (shaped like y, the same on all ranks) is added after that. ``comm_turn`` is the number of
    pieces that are computed and reduced one after the other, 0 to choose.

    The gradient is that of the sum of all ranks' losses: the gradients of y are summed over the ranks first. Where
    every rank computes the same loss from y, say ``backward="identity"``: the gradient is taken as it is.

    >>> from unisono.testing import run_ranks
    >>> def main(group):
    ...     x = [torch.full((2, 4), 1.0 + group.rank)]
    ...     weight = [torch.ones(4, 3)]
    ...     return unisono.grouped_matmul_all_reduce(x, weight, group, bias=[torch.ones(3)])[0].tolist()
    >>> run_ranks(2, main)                                                                    # doctest: +SKIP
    [[[13.0, 13.0, 13.0], [13.0, 13.0, 13.0]], [[13.0, 13.0, 13.0], [13.0, 13.0, 13.0]]]
    """
    what = "grouped_matmul_all_reduce"
    xs, weights, biases, plan = read_groups(what, x, weight, bias, group_list, split_item)
    check_reduction(reduce_op, bias_mode, comm_turn, backward, bool(biases))
    flat = _run(group, plan, xs, weights, biases, residual, reduce_op, scale, bias_mode, comm_turn, backward)
    return _outputs(flat, plan)


def matmul_all_reduce(
    x: torch.Tensor,
    weight: Weight,
    group: GroupLike = None,
    *,
    bias: torch.Tensor | None = None,
    reduce_op: str = "sum",
    comm_turn: int = 0,
    bias_mode: str = "mean",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    backward: str = "all_reduce",
) -> torch.Tensor:
    """Multiplies ``x [..., K]`` and ``weight [K, N]`` and sums the product over the ranks: ``[..., N]`` on all of them.

    One group of :func:`grouped_matmul_all_reduce`, with the same options::

        rank 0  [[1]] @ [[2, 3]]         [[42, 53]]
        rank 1  [[10]] @ [[4, 5]]    ->  [[42, 53]]
    """
    xs, weights, biases, plan = read_pair("matmul_all_reduce", x, weight, bias)
    check_reduction(reduce_op, bias_mode, comm_turn, backward, bool(biases))
    flat = _run(group, plan, xs, weights, biases, residual, reduce_op, scale, bias_mode, comm_turn, backward)
    return _outputs(flat, plan)[0]


def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: Weight,
    group: GroupLike = None,
    *,
    split_sizes: Numbers | None = None,
    bias: torch.Tensor | None = None,
    reduce_op: str = "sum",
    comm_turn: int = 0,
    bias_mode: str = "mean",
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Multiplies ``x [M, ..., K]`` and ``weight [K, N]``, sums the product over the ranks, gives each rank its rows.

    ``split_sizes`` are rows of dim 0 per rank, equal if None; zero is fine. ``residual`` is shaped like this rank's
    result. Otherwise as :func:`matmul_all_reduce`::

        split_sizes [1, 2]   rank 0  [[1], [2], [3]] @ [[1, 1]]        [[11, 11]]
                             rank 1  [[1], [2], [3]] @ [[10, 10]]  ->  [[22, 22], [33, 33]]
    """
    xs, weights, biases, plan = read_pair("matmul_reduce_scatter", x, weight, bias)
    check_reduction(reduce_op, bias_mode, comm_turn, "all_reduce", bool(biases))
    splits = None if split_sizes is None else (number_list(split_sizes, "split_sizes"),)
    plan = planned_scatter(plan, splits, *_seat(group)[1:])
    flat = _run(group, plan, xs, weights, biases, residual, reduce_op, scale, bias_mode, comm_turn, "")
    return _outputs(flat, plan)[0]


def grouped_matmul_reduce_scatter(
    x: Sequence[torch.Tensor] | torch.Tensor,
    weight: Sequence[Weight] | Weight,
    group: GroupLike = None,
    *,
    split_sizes: Sequence[Any] | torch.Tensor | None = None,
    bias: Sequence[torch.Tensor | None] | None = None,
    group_list: Numbers | None = None,
    split_item: int = 0,
    reduce_op: str = "sum",
    comm_turn: int = 0,
    bias_mode: str = "mean",
    residual: Sequence[torch.Tensor] | torch.Tensor | None = None,
    scale: float = 1.0,
) -> list[torch.Tensor]:
    """As :func:`grouped_matmul_all_reduce`, but each rank gets its rows of every output only.

    ``split_sizes`` has rows of dim 0 per rank: a list for every output (split_item 0 and 1), or one list for the one
    output (split_item 2 and 3); equal if None. ``residual`` is shaped like this rank's results.
    """
    what = "grouped_matmul_reduce_scatter"
    xs, weights, biases, plan = read_groups(what, x, weight, bias, group_list, split_item)
    check_reduction(reduce_op, bias_mode, comm_turn, "all_reduce", bool(biases))
    plan = planned_scatter(plan, split_lists(split_sizes, split_item in (2, 3)), *_seat(group)[1:])
    flat = _run(group, plan, xs, weights, biases, residual, reduce_op, scale, bias_mode, comm_turn, "")
    return _outputs(flat, plan)


def all_gather_matmul(
    x: torch.Tensor,
    weight: Weight,
    group: GroupLike = None,
    *,
    split_sizes: Numbers | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Puts every rank's rows ``x [m_r, ..., K]`` behind one another and multiplies all of them by this rank's weight.

    ``split_sizes`` are the rows of dim 0 of every rank, equal if None. The bias is added in full::

        split_sizes [1, 2]   rank 0  [[1]],        weight [[1, 1]]        [[1, 1], [2, 2], [3, 3]]
                             rank 1  [[2], [3]],   weight [[10]]      ->  [[10], [20], [30]]

    The gradient of x is summed over the ranks.
    """
    _, weights, biases, _ = read_pair("all_gather_matmul", x, weight, bias)
    seat = _seat(group)
    splits = None if split_sizes is None else (number_list(split_sizes, "split_sizes"),)
    (gathered,) = _gathered([x], splits, seat)
    *_, plan = read_pair("all_gather_matmul", gathered, weight, bias)
    flat = _run(None, plan, [gathered], weights, biases, residual, "sum", scale, "sum", 0, "", without_group=True)
    return _outputs(flat, plan)[0]


def all_gather_grouped_matmul(
    x: Sequence[torch.Tensor] | torch.Tensor,
    weight: Sequence[Weight] | Weight,
    group: GroupLike = None,
    *,
    split_sizes: Sequence[Any] | torch.Tensor | None = None,
    bias: Sequence[torch.Tensor | None] | None = None,
    group_list: Numbers | None = None,
    split_item: int = 0,
    residual: Sequence[torch.Tensor] | torch.Tensor | None = None,
    scale: float = 1.0,
) -> list[torch.Tensor]:
    """Puts every rank's rows of each x behind one another, then multiplies group by group, as with split_item above.

    ``split_sizes`` has rows of dim 0 per rank: a list for every x (split_item 0 and 2), or one list for the one x
    (split_item 1 and 3); equal if None. ``group_list`` speaks of the gathered rows. The bias is added in full.
    """
    what = "all_gather_grouped_matmul"
    one = split_item in (1, 3)
    xs = tensor_list(x, "x")
    gathered = _gathered(xs, split_lists(split_sizes, one), _seat(group)) if xs else xs
    xs, weights, biases, plan = read_groups(what, gathered, weight, bias, group_list, split_item)
    flat = _run(None, plan, xs, weights, biases, residual, "sum", scale, "sum", 0, "", without_group=True)
    return _outputs(flat, plan)


# -- the way of a call


def _seat(group: GroupLike) -> tuple[str, int, int]:
    """The group's name, this process's rank in it, and how many there are."""
    found = member("a fused matmul", group)
    return groups.name_of(found), *groups.rank_and_size(found)


# torch.compile runs it while it traces; torch.compiler.assume_constant_result would import all of the compiler.
setattr(_seat, "_dynamo_marked_constant", True)  # noqa: B010


def _run(
    group: GroupLike,
    plan: Plan,
    x: Sequence[torch.Tensor],
    weights: Sequence[Weight],
    biases: list[torch.Tensor],
    residual: Any,
    reduce_op: str,
    scale: float,
    bias_mode: str,
    comm_turn: int,
    backward: str,
    without_group: bool = False,
) -> torch.Tensor:
    if not torch.compiler.is_compiling() and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"argument 'scale' must be a finite number, got {scale!r}")
    extra = flat_residual(residual, plan, x[0].dtype)
    xs = [t if t.dim() == 2 else t.reshape(m, k) for t, m, k in zip(x, plan.rows, plan.inner, strict=False)]
    ready = [w.for_rows(m) if isinstance(w, PreparedWeight) else w for w, m in zip(weights, plan.rows, strict=True)]
    needs_grad = torch.is_grad_enabled() and any(
        t.requires_grad for t in (*xs, *ready, *biases, *(() if extra is None else (extra,)))
    )
    if needs_grad or torch.compiler.is_compiling():
        name, rank, size = ("", 0, 1) if without_group else _seat(group)
        share = 1 / size if reduce_op == "sum" and bias_mode == "mean" else 1.0
        return fused_ops.matmul_reduce(  # type: ignore[no-any-return]
            xs, ready, biases, extra, plan.what, name, list(plan.rows), list(plan.columns), list(plan.counts),
            reduce_op, float(scale), share, comm_turn, backward, rank, size,
        )  # fmt: skip
    found = None if without_group else transport("a fused matmul", group, xs[0])
    size = 1 if found is None else found.size
    share = 1 / size if reduce_op == "sum" and bias_mode == "mean" else 1.0
    return fused_run.run(found, plan, xs, ready, biases, share, extra, reduce_op, float(scale), comm_turn)


def _outputs(flat: torch.Tensor, plan: Plan) -> list[torch.Tensor]:
    """The outputs as parts of the flat result."""
    if len(plan.outputs) == 1:
        return [flat.view(plan.outputs[0])]
    outputs, at = [], 0
    for shape in plan.outputs:
        count = product_of(shape)
        outputs.append(flat[at : at + count].view(shape))
        at += count
    return outputs


def _gathered(
    x: list[torch.Tensor], splits: tuple[tuple[int, ...], ...] | None, seat: tuple[str, int, int]
) -> list[torch.Tensor]:
    """Every rank's rows of each x, behind one another."""
    name, rank, size = seat
    for i, t in enumerate(x):
        if t.dim() < 2:
            raise ValueError(f"argument 'x[{i}]' must have 2 or more dimensions, got {list(t.shape)}")
    if splits is None:
        splits = tuple((t.shape[0],) * size for t in x)
    check_splits(splits, [sum(split) for split in splits] if len(splits) == len(x) else [0] * len(x), size, "x")
    for i, (t, split) in enumerate(zip(x, splits, strict=True)):
        if t.shape[0] != split[rank]:
            raise ValueError(f"argument 'x[{i}]' must have the {split[rank]} rows of rank {rank}, got {t.shape[0]}")
    counts = [rows * product_of(t.shape[1:]) for t, split in zip(x, splits, strict=True) for rows in split]
    flat = torch.cat([t.reshape(-1) for t in x]) if len(x) > 1 else x[0].reshape(-1)
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and flat.requires_grad):
        whole = fused_ops.gather_values(flat, name, counts, rank, size)
    else:
        whole = fused_run.gather_values(transport("a fused matmul", name, flat), flat, counts)
    parts, at = [], 0
    for t, split in zip(x, splits, strict=True):
        shape = (sum(split), *t.shape[1:])
        parts.append(whole[at : at + product_of(shape)].view(shape))
        at += product_of(shape)
    return parts
