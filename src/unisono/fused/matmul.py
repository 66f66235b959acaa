"""Matrix products fused with the collective before or after them: tensor parallelism in one call.

Every function here computes in float32 (float64 for float64), reduces over the ranks in float32 and rounds once, to the
dtype of x; all ranks get the same bits. A *group* of a grouped product is one pair of matrices; the ``group`` argument
says which ranks take part: None, a name, a torch ProcessGroup of any backend, or a unisono Group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ..calls.groups import place, transport
from ..calls.splits import named_numbers, splits_of_each
from ..group.names import GroupLike
from ..transport.protocol import Transport
from . import operators as fused_ops
from . import run as fused_run
from .arguments import (
    Options,
    check_dtypes,
    check_options,
    fit_bias,
    fit_residual,
    read_tensors,
)
from .gemm import PreparedWeight, is_one_subtree_each, subtrees
from .plan import Plan, planned
from .run import flat_of, parts_of

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
    order: str | None = None,
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

    ``order="tree"``: the same bits for 1, 2, 4, 8, … ranks, for every number of rows, piece and instruction set; see
    docs/same_bits.md. K must be cut between blocks, else it is an error; unequal parts and other numbers of ranks are
    fine if they are, but cost more.

    >>> import torch, unisono
    >>> from unisono.testing import run_ranks
    >>> def main(group):
    ...     x = [torch.full((2, 4), 1.0 + group.rank)]
    ...     weight = [torch.ones(4, 3)]
    ...     return unisono.grouped_matmul_all_reduce(x, weight, group, bias=[torch.ones(3)])[0].tolist()
    >>> run_ranks(2, main)
    [[[13.0, 13.0, 13.0], [13.0, 13.0, 13.0]], [[13.0, 13.0, 13.0], [13.0, 13.0, 13.0]]]

    Args:
        x: this rank's columns of every x: a list, or one tensor for split_item 1 and 3
        weight: this rank's rows of every weight; 2-D tensors or PreparedWeights, or one 3-D tensor
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        bias: one per weight, or None
        group_list: rows of each group, or their running totals; for split_item 1 and 3
        split_item: 0 to 3, see the table
        reduce_op: sum, avg, max or min
        comm_turn: pieces that are computed and reduced one after the other; 0: chosen
        bias_mode: "mean": a bias that is the same on all ranks is added once; "sum": every rank's in full
        residual: shaped like y, the same on all ranks; added at the end
        scale: multiplies the reduced product
        backward: "all_reduce", or "identity" where every rank computes the same loss from the result
        order: None, or "tree" for the same bits on any power of two of ranks

    Returns:
        A list: one tensor per group, or with split_item 2 and 3 one for all.
    """
    what, options = "grouped_matmul_all_reduce", Options(scale, reduce_op, comm_turn, bias_mode, backward, order)
    return _fused(what, "", x, weight, group, bias, residual, options, None, group_list, split_item)


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
    order: str | None = None,
) -> torch.Tensor:
    """Multiplies ``x [..., K]`` and ``weight [K, N]`` and sums the product over the ranks: ``[..., N]`` on all of them.

    One group of :func:`grouped_matmul_all_reduce`, with the same options::

        rank 0  [[1]] @ [[2, 3]]         [[42, 53]]
        rank 1  [[10]] @ [[4, 5]]    ->  [[42, 53]]

    Args:
        x: this rank's columns
        weight: this rank's rows; a tensor or a PreparedWeight
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        bias: ``[N]``, or None
        reduce_op: sum, avg, max or min
        comm_turn: pieces that are computed and reduced one after the other; 0: chosen
        bias_mode: "mean": a bias that is the same on all ranks is added once; "sum": every rank's in full
        residual: shaped like the result, the same on all ranks; added at the end
        scale: multiplies the reduced product
        backward: "all_reduce", or "identity" where every rank computes the same loss from the result
        order: None, or "tree" for the same bits on any power of two of ranks

    Returns:
        The sum, on every rank.
    """
    options = Options(scale, reduce_op, comm_turn, bias_mode, backward, order)
    return _fused("matmul_all_reduce", "", x, weight, group, bias, residual, options, one=True)[0]


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
    order: str | None = None,
) -> torch.Tensor:
    """Multiplies ``x [M, ..., K]`` and ``weight [K, N]``, sums the product over the ranks, gives each rank its rows.

    ``split_sizes`` are rows of dim 0 per rank, equal if None; zero is fine. ``residual`` is shaped like this rank's
    result. Otherwise as :func:`matmul_all_reduce`::

        split_sizes [1, 2]   rank 0  [[1], [2], [3]] @ [[1, 1]]        [[11, 11]]
                             rank 1  [[1], [2], [3]] @ [[10, 10]]  ->  [[22, 22], [33, 33]]

    Args:
        x: this rank's columns
        weight: this rank's rows; a tensor or a PreparedWeight
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        split_sizes: rows (not elements) of dimension 0 of each rank; None: all the same
        bias: ``[N]``, or None
        reduce_op: sum, avg, max or min
        comm_turn: pieces that are computed and reduced one after the other; 0: chosen
        bias_mode: "mean": a bias that is the same on all ranks is added once; "sum": every rank's in full
        residual: shaped like this rank's result; added at the end
        scale: multiplies the reduced product
        order: None, or "tree" for the same bits on any power of two of ranks

    Returns:
        This rank's rows of the sum.
    """
    what, options = "matmul_reduce_scatter", Options(scale, reduce_op, comm_turn, bias_mode, order=order)
    return _fused(what, "output", x, weight, group, bias, residual, options, split_sizes, one=True)[0]


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
    order: str | None = None,
) -> list[torch.Tensor]:
    """As :func:`grouped_matmul_all_reduce`, but each rank gets its rows of every output only.

    ``split_sizes`` has rows of dim 0 per rank: a list for every output (split_item 0 and 1), or one list for the one
    output (split_item 2 and 3); equal if None. ``residual`` is shaped like this rank's results.

    Args:
        x: as of :func:`grouped_matmul_all_reduce`
        weight: the same
        bias: the same
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        split_sizes: rows (not elements) of dimension 0 of each rank: a list for every output, or one for the one output
        group_list: rows of each group, or their running totals; for split_item 1 and 3
        split_item: 0 to 3, see the table of :func:`grouped_matmul_all_reduce`
        reduce_op: sum, avg, max or min
        comm_turn: pieces that are computed and reduced one after the other; 0: chosen
        bias_mode: "mean": a bias that is the same on all ranks is added once; "sum": every rank's in full
        residual: shaped like this rank's results; added at the end
        scale: multiplies the reduced product
        order: None, or "tree" for the same bits on any power of two of ranks

    Returns:
        A list: this rank's rows of every output.
    """
    what, options = "grouped_matmul_reduce_scatter", Options(scale, reduce_op, comm_turn, bias_mode, order=order)
    return _fused(what, "output", x, weight, group, bias, residual, options, split_sizes, group_list, split_item)


def all_gather_matmul(
    x: torch.Tensor,
    weight: Weight,
    group: GroupLike = None,
    *,
    split_sizes: Numbers | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    order: str | None = None,
) -> torch.Tensor:
    """Puts every rank's rows ``x [m_r, ..., K]`` behind one another and multiplies all of them by this rank's weight.

    ``split_sizes`` are the rows of dim 0 of every rank, equal if None. The bias is added in full::

        split_sizes [1, 2]   rank 0  [[1]],        weight [[1, 1]]        [[1, 1], [2, 2], [3, 3]]
                             rank 1  [[2], [3]],   weight [[10]]      ->  [[10], [20], [30]]

    The gradient of x is summed over the ranks.

    Args:
        x: this rank's rows
        weight: this rank's columns; a tensor or a PreparedWeight
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        split_sizes: rows (not elements) of dimension 0 of each rank; None: all the same
        bias: ``[N]``, added in full
        residual: shaped like the result; added at the end
        scale: multiplies the reduced product
        order: None, or "tree" for the same bits on any power of two of ranks

    Returns:
        All rows times this rank's weight.
    """
    what, options = "all_gather_matmul", Options(scale, order=order)
    return _fused(what, "x", x, weight, group, bias, residual, options, split_sizes, one=True)[0]


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
    order: str | None = None,
) -> list[torch.Tensor]:
    """Puts every rank's rows of each x behind one another, then multiplies group by group, as with split_item above.

    ``split_sizes`` has rows of dim 0 per rank: a list for every x (split_item 0 and 2), or one list for the one x
    (split_item 1 and 3); equal if None. ``group_list`` speaks of the gathered rows. The bias is added in full.

    Args:
        x: this rank's rows of every x: a list, or one tensor for split_item 1 and 3
        weight: as of :func:`grouped_matmul_all_reduce`
        bias: the same
        group: None for the default group, a name, a torch ProcessGroup of any backend, or a unisono.Group
        split_sizes: rows (not elements) of dimension 0 of each rank: a list for every x, or one for the one x
        group_list: rows of each group, or their running totals; for split_item 1 and 3
        split_item: 0 to 3, see the table of :func:`grouped_matmul_all_reduce`
        residual: shaped like the results; added at the end
        scale: multiplies the reduced product
        order: None, or "tree" for the same bits on any power of two of ranks

    Returns:
        A list: one tensor per group, or with split_item 2 and 3 one for all.
    """
    what, options = "all_gather_grouped_matmul", Options(scale, order=order)
    return _fused(what, "x", x, weight, group, bias, residual, options, split_sizes, group_list, split_item)


def local_matmul(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, order: str | None = None
) -> torch.Tensor:
    """``x [m, k] @ weight + bias`` of this rank alone, by the same products as the others."""
    options = Options(1.0, order=order)
    return _fused("local_matmul", "none", x, weight, None, bias, None, options, one=True)[0]


# -- the way of a call


class _Seat(NamedTuple):
    """Where this rank takes part: its group's transport, or where torch sees operators the group's name."""

    transport: Transport | None = None
    rank: int = 0
    size: int = 1
    name: str | None = None


_ALONE = _Seat()


def _fused(
    what: str,
    cut: str,
    x: Any,
    weight: Any,
    group: GroupLike,
    bias: Any,
    residual: Any,
    options: Options,
    split_sizes: Any = None,
    group_list: Any = None,
    split_item: Any = 0,
    one: bool = False,
) -> list[torch.Tensor]:
    """The way of every call: read, plan, check, gather x, multiply and reduce, cut out the outputs.

    ``cut`` says what split_sizes are about, "x" (gathered) or "output" (scattered), or "none" if only this rank takes
    part; ``one``: x and weight are tensors, not lists. Torch sees operators if it takes gradients or compiles, else
    they are passed by.
    """
    xs, weights, biases, residuals = _tensors(x, weight, bias, residual, one)
    if isinstance(split_item, bool) or not isinstance(split_item, int):
        raise TypeError(f"argument 'split_item' must be 0, 1, 2 or 3, got {split_item!r}")
    totals = None if group_list is None else named_numbers(group_list, "group_list")
    splits = splits_of_each(split_sizes, one or split_item in ((1, 3) if cut == "x" else (2, 3)))
    seen = torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in xs + weights + biases + residuals)
    )
    seat = _ALONE if cut == "none" else _seat(group, xs[0], seen)

    shapes = tuple([t.shape for t in xs]), tuple([w.shape for w in weights])
    tree = options.order == "tree"
    plan = planned(what, *shapes, totals, split_item, cut, splits, seat.rank, seat.size, tree)
    biases = fit_bias(biases, plan.columns) if biases else biases
    check_dtypes(xs, weights, biases, tree)
    check_options(options, bool(biases))
    parts = _tree_parts(plan, cut, seat.size, seen) if tree else (0, 0)
    extra = None if residual is None else fit_residual(residuals, plan, xs[0].dtype)

    if cut == "x":
        xs, seat = _gather(plan, xs, seat, seen, tree), _ALONE  # the products are this rank's alone
    return parts_of(_multiply(plan, xs, weights, biases, extra, options, seat, seen, parts), plan.outputs)


def _tensors(x: Any, weight: Any, bias: Any, residual: Any, one: bool) -> tuple[list[Any], ...]:
    """The tensors of a call, all as lists."""
    if isinstance(weight, torch.Tensor) and weight.dim() == 3 and not one:
        weight = weight.unbind(0)
    xs, weights = read_tensors(x, "x", one), read_tensors(weight, "weight", one, PreparedWeight)
    biases = [] if bias is None else read_tensors(bias, "bias", also=type(None))
    residuals = [] if residual is None else read_tensors(residual, "residual")
    if not xs or not weights:
        raise ValueError(
            f"Neither x nor weight could be empty.\n  got {len(xs)} tensors in x, {len(weights)} in weight"
        )
    return xs, weights, biases, residuals


def _seat(group: GroupLike, tensor: torch.Tensor, seen: bool) -> _Seat:
    if seen:
        return _Seat(None, *place("a fused matmul", group))
    found = transport("a fused matmul", group, tensor)
    return _Seat(found, found.rank, found.size)


def _tree_parts(plan: Plan, cut: str, size: int, seen: bool) -> tuple[int, int]:
    """In the tree order: of how many parts the depth of a product is one, and that of the gradient of x."""
    if cut != "x":
        return size, 1
    if not seen:
        return 1, 1
    for i, n in enumerate(plan.columns):  # the gradient of x is summed over all ranks' columns
        if not is_one_subtree_each([n] * size):
            raise ValueError(
                f"order 'tree': the gradient of {plan.what} needs a number of ranks that is a power of two, got {size}"
            )
        subtrees([n] * size, i)
    return 1, size


def _gather(plan: Plan, xs: list[torch.Tensor], seat: _Seat, seen: bool, tree: bool) -> list[torch.Tensor]:
    """Every x with the rows of all ranks."""
    flat = flat_of(xs)
    if not seen:
        return parts_of(fused_run.gather_values(seat.transport, flat, plan.x_counts), plan.gathered)
    if tree:
        flat = flat.float()  # so that gradients are summed before they are rounded
    label = f"the gradient of {plan.what} in the tree order  columns {plan.columns}" if tree else ""
    whole = fused_ops.gather_values(flat, seat.name, plan.x_counts, seat.rank, seat.size, label)
    return parts_of(whole, plan.gathered)


def _multiply(
    plan: Plan,
    xs: list[torch.Tensor],
    weights: list[Any],
    biases: list[torch.Tensor],
    residual: torch.Tensor | None,
    options: Options,
    seat: _Seat,
    seen: bool,
    parts: tuple[int, int],
) -> torch.Tensor:
    """The products, reduced over the ranks, one behind the other."""
    dtype = weights[0].dtype
    xs = [t if t.dim() == 2 else t.reshape(m, t.shape[-1]) for t, m in zip(xs, plan.rows, strict=False)]
    by_tree = bool(parts[0])
    ready = [
        w.for_rows(m, by_tree) if isinstance(w, PreparedWeight) else w for w, m in zip(weights, plan.rows, strict=True)
    ]
    share = 1 / seat.size if options.reduce_op == "sum" and options.bias_mode == "mean" else 1.0
    how = options.reduce_op, float(options.scale), share, options.comm_turn
    if not seen:
        return fused_run.run(seat.transport, plan, xs, ready, biases, residual, fused_run.How(*how, parts[0]))
    sizes = list(plan.rows), list(plan.columns), list(plan.counts)
    rest = options.backward, *parts, seat.rank, seat.size
    flat = fused_ops.matmul_reduce(xs, ready, biases, residual, plan.what, seat.name, *sizes, *how, *rest)
    return flat.to(dtype)  # type: ignore[no-any-return]
