"""Every form of the fused matmuls against float64, on unisono groups: values, shapes, same bits on all ranks."""

import itertools
import random

import pytest
import torch

import unisono
from tests.fused.cases import Case, check_all, same_on_all_ranks
from unisono.testing import run_ranks

DTYPES = ("float16", "bfloat16", "float32", "float64")
ROWS = [(5,), (1, 8), (3, 0, 4), (0, 0), (64, 1, 30), (2, 2, 2, 2, 2, 2, 2, 2, 2)]


def shaped(chance: random.Random, rows: tuple[int, ...], split_item: int) -> dict:
    """k and n of every group that suit the split item."""
    groups = len(rows)
    inner = [chance.choice((1, 7, 33, 64)) for _ in rows]
    columns = [chance.choice((1, 9, 16, 40)) for _ in rows]
    if split_item in (1, 3):
        inner = [inner[0]] * groups
    if split_item in (2, 3):
        columns = [columns[0]] * groups
    return {"rows": rows, "inner": tuple(inner), "columns": tuple(columns), "split_item": split_item}


def cut(chance: random.Random, m: int, size: int) -> tuple[int, ...]:
    at = sorted(chance.randint(0, m) for _ in range(size - 1))
    return tuple(b - a for a, b in itertools.pairwise([0, *at, m]))


def sampled(verb: str, size: int, limit: int) -> list[Case]:
    chance = random.Random(size * 31 + len(verb))
    cases = []
    for seed in range(limit):
        split_item = seed % 4
        shape = shaped(chance, chance.choice(ROWS), split_item)
        outer = shape["rows"]
        whole = [sum(outer)] if (split_item in (1, 3) if verb == "all_gather" else split_item in (2, 3)) else outer
        splits = tuple(cut(chance, m, size) for m in whole) if verb != "all_reduce" else None
        weights = chance.choice(("plain", "plain", "transposed", "prepared"))
        if len(set(shape["columns"])) == 1 and split_item == 3 and chance.random() < 0.3:
            weights = "stacked"
        op = chance.choice(("sum", "sum", "sum", "avg", "max", "min")) if verb != "all_gather" else "sum"
        bias = chance.choice((None, *DTYPES))
        cases.append(
            Case(
                **shape,
                verb=verb,
                dtype=DTYPES[seed // 4 % 4],
                bias=bias,
                bias_mode=chance.choice(("mean", "sum")) if op == "sum" or bias is None else "mean",
                reduce_op=op,
                comm_turn=chance.choice((0, 0, 1, 3)),
                residual=chance.random() < 0.3,
                scale=chance.choice((1.0, 1.0, 0.5, -3.0)),
                splits=splits,
                totals=chance.random() < 0.5,
                weights=weights,
                lead=split_item == 0 and chance.random() < 0.3,
                seed=seed,
            )
        )
    return cases


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sampled(pool, size, verb):
    cases = sampled(verb, size, 96 if size == 2 else 48)
    same_on_all_ranks(pool.run(check_all, cases), cases)


@pytest.mark.parametrize("size", [2, 3])
def test_larger_than_a_slot_and_in_pieces(pool, size):
    shape = {"rows": (130, 257), "inner": (300, 520), "columns": (96, 160)}
    cases = [
        Case(
            **shape, dtype=dtype, comm_turn=turn, bias="float32", residual=residual, scale=scale, verb=verb, splits=cut
        )
        for dtype in DTYPES
        for turn, residual, scale in ((0, False, 1.0), (4, True, 0.25), (40, False, 1.0))
        for verb, cut in (
            ("all_reduce", None),
            ("reduce_scatter", ((100, 30) + (0,) * (size - 2), (7, 250) + (0,) * (size - 2))),
        )
    ]
    same_on_all_ranks(pool.run(check_all, cases), cases)


@pytest.mark.parametrize("size", [2])
def test_equal_splits_when_none_are_given(pool, size):
    cases = [
        Case(rows=(4, 6), inner=(3, 3), columns=(5, 5), split_item=item, verb=verb, dtype="bfloat16")
        for item in range(4)
        for verb in ("reduce_scatter", "all_gather")
    ]
    pool.run(check_all, cases)


@pytest.mark.parametrize("size", [2])
def test_more_than_64_groups(pool, size):
    groups = 200
    case = Case((3,) * groups, (8,) * groups, (4,) * groups, split_item=3, dtype="float16", bias="float16")
    same_on_all_ranks(pool.run(check_all, [case]), [case])


def ranks_with_different_k(group):
    import unisono

    k = 4 + group.rank
    x, weight = torch.ones(3, k), torch.full((k, 2), 2.0)
    return unisono.matmul_all_reduce(x, weight, group).tolist()


@pytest.mark.parametrize("size", [3])
def test_k_may_differ_between_ranks(pool, size):
    assert pool.run(ranks_with_different_k) == [[[30.0, 30.0]] * 3] * 3


def special_numbers(group, dtype):
    import unisono

    x = torch.zeros(4, 3, dtype=dtype)
    x[0, 0] = float("nan") if group.rank == 0 else 1
    x[1, 0] = float("inf")
    x[2, 0] = float("inf") * (1 if group.rank == 0 else -1)
    weight = torch.ones(3, 40, dtype=dtype)
    y = unisono.matmul_all_reduce(x, weight, group)
    return y.view(torch.uint8).tolist(), y[:, 0].double().tolist()


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
@pytest.mark.parametrize("size", [2])
def test_nan_and_infinity(pool, size, dtype):
    (bits, values), (others, _) = pool.run(special_numbers, dtype)
    assert bits == others
    nan, infinite, undefined, zero = values
    assert nan != nan and infinite == float("inf") and undefined != undefined and zero == 0


def _only_one_has_a_ring(group):
    """A long broadcast from ordinary memory gives the root alone a ring; products around its slots' limit follow."""
    group.broadcast(torch.zeros(2_000_000), 0)
    wrong = []
    for rows in (8, 11, 15, 20, 24, 31, 40):
        x, w = torch.full((rows, 4), 1.0 + group.rank), torch.ones(4, 1024)
        y = unisono.matmul_all_reduce(x, w, group)
        if not bool((y == 4.0 * sum(range(1, group.size + 1))).all()):
            wrong.append(rows)
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_with_and_without_a_ring(size):
    assert run_ranks(size, _only_one_has_a_ring) == [[]] * size
