"""One fused matmul as data: its inputs on every rank, what it must give in float64, and a check that runs in a rank."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import unisono

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    rows: tuple[int, ...] = (5,)
    inner: tuple[int, ...] = (7,)
    columns: tuple[int, ...] = (9,)
    split_item: int = 0
    dtype: str = "float32"
    bias: str | None = None  # its dtype
    bias_mode: str = "mean"
    reduce_op: str = "sum"
    comm_turn: int = 0
    residual: bool = False
    scale: float = 1.0
    verb: str = "all_reduce"  # or "reduce_scatter", "all_gather"
    splits: tuple[tuple[int, ...], ...] | None = None  # rows per rank for every output (every x if gathering)
    totals: bool = True  # group_list as running totals
    weights: str = "plain"  # or "transposed", "prepared", "stacked"
    lead: bool = False  # x with a dimension more
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def one_x(self) -> bool:
        return self.split_item in (1, 3)

    @property
    def one_y(self) -> bool:
        return self.split_item in (2, 3)


@functools.lru_cache(maxsize=512)  # nobody writes to them
def numbers(*shape: int, dtype: torch.dtype, seed: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        sum(n * p for n, p in zip(seed, (1_000_003, 10_007, 101, 1), strict=True))
    )
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def x_of(case: Case, rank: int) -> list[torch.Tensor]:
    """A rank's x per group, whatever the split item; the gathered one if gathering (the same on all ranks)."""
    who = 0 if case.verb == "all_gather" else rank
    return [
        numbers(m, k, dtype=case.torch_dtype, seed=(case.seed, who, i, 1))
        for i, (m, k) in enumerate(zip(case.rows, case.inner, strict=True))
    ]


def weight_of(case: Case, rank: int) -> list[torch.Tensor]:
    weights = []
    for i, (k, n) in enumerate(zip(case.inner, case.columns, strict=True)):
        w = numbers(k, n, dtype=case.torch_dtype, seed=(case.seed, rank, i, 2))
        weights.append(w.t().contiguous().t() if case.weights == "transposed" else w)
    return weights


def bias_of(case: Case, rank: int) -> list[torch.Tensor] | None:
    if case.bias is None:
        return None
    dtype = getattr(torch, case.bias)
    return [numbers(n, dtype=dtype, seed=(case.seed, rank, i, 3)) for i, n in enumerate(case.columns)]


def expected(case: Case, rank: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs in float64 without the residual, and how much rounding in float32 may cost them."""
    outputs, slack = [], []
    sources = [rank] if case.verb == "all_gather" else range(size)
    share = 1 / size if case.reduce_op == "sum" and case.bias_mode == "mean" and case.verb != "all_gather" else 1
    held = [(x_of(case, r), weight_of(case, r), bias_of(case, r)) for r in sources]
    for i in range(len(case.rows)):
        products, sizes = [], []
        for xs, weights, bias in held:
            x, w = xs[i].double(), weights[i].double()
            b = torch.zeros(case.columns[i]).double() if bias is None else bias[i].double()
            products.append(x @ w + b * share)
            sizes.append(x.abs() @ w.abs() + b.abs())
        stack = torch.stack(products)
        if case.reduce_op in ("sum", "avg"):
            total = stack.sum(0) / (len(products) if case.reduce_op == "avg" else 1)
        else:
            total = stack.amax(0) if case.reduce_op == "max" else stack.amin(0)
        outputs.append(total * case.scale)
        slack.append(torch.stack(sizes).sum(0) * abs(case.scale))
    if case.one_y:
        outputs, slack = [torch.cat(outputs)], [torch.cat(slack)]
    return outputs, slack


def splits_of(case: Case, size: int, rows: Sequence[int]) -> list[tuple[int, ...]]:
    return list(case.splits) if case.splits else [(m // size,) * size for m in rows]


def run(
    case: Case, group: Any, rank: int, size: int, shapes: list[torch.Size]
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """The call itself: outputs and the residuals it was given."""
    xs, weights = x_of(case, rank), weight_of(case, rank)
    arguments: dict[str, Any] = {"bias": bias_of(case, rank), "scale": case.scale}
    if case.one_x:
        xs = [torch.cat(xs)]
        arguments["group_list"] = (
            [sum(case.rows[: i + 1]) for i in range(len(case.rows))] if case.totals else list(case.rows)
        )
    if case.verb == "all_gather":
        splits = splits_of(case, size, [len(t) for t in xs])
        xs = [t.split(split)[rank] for t, split in zip(xs, splits, strict=True)]
        if case.splits:
            arguments["split_sizes"] = splits[0] if case.one_x else splits
    else:
        arguments |= {"reduce_op": case.reduce_op, "comm_turn": case.comm_turn, "bias_mode": case.bias_mode}
    if case.verb == "reduce_scatter":
        splits = splits_of(case, size, [shape[0] for shape in shapes])
        shapes = [torch.Size((split[rank], shape[1])) for split, shape in zip(splits, shapes, strict=True)]
        if case.splits:
            arguments["split_sizes"] = splits[0] if case.one_y else splits
    residual = None
    if case.residual:
        # The same on all ranks, or this rank's own if results differ.
        who = 0 if case.verb == "all_reduce" else rank
        residual = [
            numbers(*shape, dtype=case.torch_dtype, seed=(case.seed, who, i, 4)) for i, shape in enumerate(shapes)
        ]
        arguments["residual"] = residual
    if case.lead:
        xs = [t.view(t.shape[0], 1, t.shape[1]) for t in xs]
        if residual:
            arguments["residual"] = [t.view(t.shape[0], 1, t.shape[1]) for t in residual]
    given: Any = weights
    if case.weights == "prepared":
        given = [unisono.PreparedWeight(w) for w in weights]
    elif case.weights == "stacked":
        given = torch.stack(weights)
    name = {
        "all_reduce": "grouped_matmul_all_reduce",
        "reduce_scatter": "grouped_matmul_reduce_scatter",
        "all_gather": "all_gather_grouped_matmul",
    }[case.verb]
    before = [t.clone() for t in xs]
    outputs = getattr(unisono, name)(xs, given, group, split_item=case.split_item, **arguments)
    for kept, now in zip(before, xs, strict=True):
        assert torch.equal(kept, now), "an input was changed"
    assert isinstance(outputs, list)
    if case.lead:
        assert all(y.dim() == 3 for y in outputs)
        outputs = [y.squeeze(1) for y in outputs]
    return outputs, residual


def check(group: Any, case: Case, rank: int | None = None, size: int | None = None) -> str:
    """Runs a case on this rank, compares it with float64, and returns a digest of the bits."""
    rank = group.rank if rank is None else rank
    size = group.size if size is None else size
    wanted, slack = expected(case, rank, size)
    outputs, residual = run(case, group, rank, size, [y.shape for y in wanted])
    if case.verb == "reduce_scatter":
        splits = splits_of(case, size, [len(y) for y in wanted])
        wanted = [y.split(split)[rank] for y, split in zip(wanted, splits, strict=True)]
        slack = [y.split(split)[rank] for y, split in zip(slack, splits, strict=True)]
    assert len(outputs) == len(wanted)
    digest = hashlib.sha256()
    for i, (y, ref, most) in enumerate(zip(outputs, wanted, slack, strict=True)):
        assert y.dtype == case.torch_dtype
        assert y.shape == ref.shape, (y.shape, ref.shape)
        if residual:
            ref = ref + residual[i].double()
        # Half a step of the result's dtype, and the float32 sums behind it.
        half_step = torch.finfo(y.dtype).eps / 2
        unit = torch.finfo(torch.float64 if y.dtype is torch.float64 else torch.float32).eps
        tiny = torch.finfo(y.dtype).smallest_normal * torch.finfo(y.dtype).eps
        limit = ref.abs() * half_step * (1 + 1e-3) + (most + ref.abs()) * unit * 8 + tiny
        error = (y.double() - ref).abs()
        assert bool((error <= limit).all()), f"{case}: off by {(error / limit).max():.3g} times what is allowed"
        digest.update(y.contiguous().view(torch.uint8).numpy().tobytes() if y.numel() else b"")
    return digest.hexdigest()


def check_all(group: Any, cases: list[Case]) -> list[str]:
    return [check(group, case) for case in cases]


def same_on_all_ranks(results: list[list[str]], cases: list[Case]) -> None:
    for i, case in enumerate(cases):
        if case.verb == "all_reduce":
            assert len({digests[i] for digests in results}) == 1, f"{case}: ranks differ"
