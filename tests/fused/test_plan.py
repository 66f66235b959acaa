"""Arguments: both readings of group_list, every error with its argument, group and numbers, and how pieces are cut."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono
from unisono import _core
from unisono.fused import gemm as fused_gemm
from unisono.fused.plan import plan_groups, row_totals


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    with unisono.Group.from_store(store, 0, 1, name="alone") as group:
        yield group


# -- group_list


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_counts_and_totals_mean_the_same(counts):
    totals = [sum(counts[: i + 1]) for i in range(len(counts))]
    assert row_totals(counts, sum(counts)) == tuple(counts) == row_totals(totals, sum(counts))


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, np.array, torch.Size])
def test_group_list_forms(alone, form):
    x, weight = ones(6, 2), [ones(2, 3), ones(2, 3), ones(2, 3)]
    for numbers in ([2, 5, 6], [2, 3, 1]):
        y = unisono.grouped_matmul_all_reduce([x], weight, alone, group_list=form(numbers), split_item=1)
        assert [t.shape[0] for t in y] == [2, 3, 1]


@pytest.mark.parametrize(
    "group_list, words",
    [
        ([1, 2, 3], "end in the 7 rows of x, or counts that add up to them, got [1, 2, 3]: the last is 3, the sum 6"),
        ([7, 0, 1], "the last is 1, the sum 8"),
        ([-1, 4, 7], "must not be negative, got -1 for group 0"),
    ],
)
def test_wrong_group_list(alone, group_list, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        unisono.grouped_matmul_all_reduce([ones(7, 2)], [ones(2, 3)] * 3, alone, group_list=group_list, split_item=3)


# -- errors: what is called, what it must say

TWO = {"x": [ones(2, 3), ones(2, 3)], "weight": [ones(3, 4), ones(3, 4)]}
ERRORS = [
    ({"x": []}, ValueError, "Neither x nor weight could be empty."),
    ({"weight": []}, ValueError, "Neither x nor weight could be empty."),
    ({"split_item": 5}, ValueError, "The given split_item [5] is invalid, which must be one of 0/1/2/3"),
    ({"split_item": -1}, ValueError, "The given split_item [-1] is invalid"),
    ({"split_item": 1.0}, TypeError, "argument 'split_item' must be 0, 1, 2 or 3, got 1.0"),
    (
        {"x": [ones(2, 3)]},
        ValueError,
        "When split_item = 0 or 2, the num of x tensors must equal the num of weight tensors, and there is supposed "
        "not to be group_list input\n  got 1 x tensors, 2 weight tensors",
    ),
    ({"group_list": [2, 2]}, ValueError, "and there is supposed not to be group_list input\n  got 2 x tensors"),
    (
        {"split_item": 1, "group_list": [1, 1]},
        ValueError,
        "When split_item = 1, the num of x tensors must equal 1, and the num of weight tensors is supposed to equal "
        "the length of group_list\n  got 2 x tensors, 2 weight tensors, 2 entries in group_list",
    ),
    ({"split_item": 3, "x": [ones(2, 3)]}, ValueError, "When split_item = 3, the num of x tensors must equal 1"),
    ({"split_item": 3, "x": [ones(2, 3)], "group_list": [2]}, ValueError, "2 weight tensors, 1 entries in group_list"),
    ({"x": [ones(2, 3), ones(2, 5)]}, ValueError, "group 1: the columns of x[1] must match the rows of weight[1]"),
    ({"x": [ones(2, 3), ones(2, 5)]}, ValueError, "5 against 3"),
    (
        {"split_item": 3, "x": [ones(4, 2)], "group_list": [1, 3]},
        ValueError,
        "group 0: the columns of x[0] must match the rows of weight[0], got x [4, 2] and weight [3, 4]: 2 against 3",
    ),
    (
        {"x": [ones(2, 3), ones(3)]},
        ValueError,
        "argument 'x[1]' must have 2 or more dimensions, the last of K, got [3]",
    ),
    ({"x": [ones(1, 2, 3), ones(2, 3)], "split_item": 2}, ValueError, "argument 'x[0]' must have 2 dimensions [M, K]"),
    ({"weight": [ones(3, 4), ones(3)]}, ValueError, "argument 'weight[1]' must have 2 dimensions [K, N], got [3]"),
    (
        {"weight": [ones(3, 4), ones(3, 5)], "split_item": 2},
        ValueError,
        "all weights must have the same number of columns: weight[0] has 4, weight[1] has 5",
    ),
    ({"x": [ones(2, 3), 7]}, TypeError, "argument 'x[1]' must be a torch.Tensor, got int"),
    ({"x": 7}, TypeError, "argument 'x' must be a list of tensors, got int"),
    ({"weight": [ones(3, 4), None]}, TypeError, "argument 'weight[1]' must be a torch.Tensor, got NoneType"),
    (
        {"weight": [ones(3, 4), ones(3, 4, dtype=torch.float16)]},
        TypeError,
        "argument 'weight[1]' must have the dtype of x[0], torch.float32, got torch.float16",
    ),
    ({"x": [ones(2, 3), ones(2, 3).double()]}, TypeError, "argument 'x[1]' must have the dtype of x[0]"),
    ({"x": [ones(2, 3).int()] * 2}, TypeError, "argument 'x[0]' must have one of the dtypes float16, bfloat16"),
    (
        {"weight": [ones(3, 4), ones(3, 4, dtype=torch.float32).to("meta")]},
        ValueError,
        "argument 'weight[1]' must be on",
    ),
    ({"bias": [ones(4)]}, ValueError, "argument 'bias' must have one tensor per weight: expected 2, got 1"),
    (
        {"bias": [ones(4), ones(5)]},
        ValueError,
        "group 1: argument 'bias[1]' must have the 4 columns of weight[1], got [5]",
    ),
    (
        {"bias": [ones(4), None]},
        ValueError,
        "group 1: argument 'bias[1]' must have the 4 columns of weight[1], got None",
    ),
    ({"bias": [ones(4), ones(4).int()]}, TypeError, "argument 'bias[1]' must be of a floating-point dtype"),
    ({"bias": "no"}, TypeError, "argument 'bias' must be a list of tensors, got str"),
    ({"bias": [1, 2]}, TypeError, "argument 'bias[0]' must be a torch.Tensor, got int"),
    ({"reduce_op": "prod"}, ValueError, "argument 'reduce_op' must be one of sum, avg, max, min, got 'prod'"),
    ({"comm_turn": -1}, ValueError, "argument 'comm_turn' must be a number of pieces, 0 to choose, got -1"),
    ({"comm_turn": 1.5}, ValueError, "argument 'comm_turn' must be a number of pieces"),
    ({"bias_mode": "none"}, ValueError, "argument 'bias_mode' must be 'mean' or 'sum', got 'none'"),
    (
        {"bias_mode": "sum", "reduce_op": "avg", "bias": [ones(4), ones(4)]},
        ValueError,
        "argument 'bias_mode' may be 'sum' for reduce_op 'sum' only, got reduce_op 'avg'",
    ),
    ({"scale": float("nan")}, ValueError, "argument 'scale' must be a finite number, got nan"),
    ({"residual": [ones(2, 4)]}, ValueError, "argument 'residual' must have one tensor per output: expected 2, got 1"),
    (
        {"residual": [ones(2, 4), ones(4, 2)]},
        ValueError,
        "argument 'residual[1]' must be shaped like the output, [2, 4], got [4, 2]",
    ),
    ({"residual": [ones(2, 4), ones(2, 4).half()]}, TypeError, "argument 'residual[1]' must have the dtype of x"),
    ({"backward": "mean"}, ValueError, "argument 'backward' must be 'all_reduce' or 'identity', got 'mean'"),
    (
        {"group_list": [1.5], "split_item": 1},
        TypeError,
        "argument 'group_list' must be a list of whole numbers, got 1.5",
    ),
    ({"group": 7}, TypeError, "argument 'group' must be None, a name, a ProcessGroup or a unisono.Group, got int"),
]


@pytest.mark.parametrize("change, kind, words", ERRORS, ids=[f"{i}-{'-'.join(e[0])}" for i, e in enumerate(ERRORS)])
def test_errors(alone, change, kind, words):
    before = alone.transport.calls
    with pytest.raises(kind, match=re.escape(words)):
        unisono.grouped_matmul_all_reduce(**{"group": alone, **TWO, **change})
    assert alone.transport.calls == before, "something was sent"


@pytest.mark.parametrize("bias", [None, [], [None], [None, None], [torch.empty(0)], [torch.empty(0)] * 2])
def test_forms_of_no_bias(alone, bias):
    y = unisono.grouped_matmul_all_reduce(**TWO, group=alone, bias=bias)
    assert y[1].tolist() == [[3.0] * 4] * 2


SCATTER_ERRORS = [
    (None, "output 0 has 3 rows, which do not divide equally between 2 ranks; give 'split_sizes'"),
    (
        [1, 1],
        "argument 'split_sizes' must add up to the 3 rows of output 0\n  expected splits that add up to 3, got [1",
    ),
    ([4, -1], "argument 'split_sizes' must not be negative, for output 0\n  expected 0 or more rows each, got [4, -1]"),
    ([3], "argument 'split_sizes' must have one number per rank, for output 0\n  expected 2 splits, got 1"),
]


def scatter_errors(group):
    said = []
    for splits, _ in SCATTER_ERRORS:
        try:
            unisono.matmul_reduce_scatter(ones(3, 2), ones(2, 4), group, split_sizes=splits)
        except ValueError as error:
            said.append(str(error))
    try:
        unisono.all_gather_matmul(ones(3, 2), ones(2, 4), group, split_sizes=[1, 2])
    except ValueError as error:
        said.append(str(error))
    else:
        raise AssertionError("expected an error")
    return said


@pytest.mark.parametrize("size", [2])
def test_split_errors(pool, size):
    for rank, said in enumerate(pool.run(scatter_errors)):
        *scattered, gathered = said
        for text, (_, words) in zip(scattered, SCATTER_ERRORS, strict=True):
            assert words in text
        assert gathered == f"argument 'x[0]' must have the {rank + 1} rows of rank {rank}, got 3"


# -- ranks that disagree


def disagreeing(group, what):
    x, weight, options = ones(4, 2), ones(2, 8), {}
    if group.rank == 1:
        if what == "rows":
            x, weight = ones(8, 2), ones(2, 4)  # as many elements
        elif what == "scale":
            options = {"scale": 2.0}
        elif what == "residual":
            options = {"residual": ones(4, 8)}
        elif what == "op":
            options = {"reduce_op": "max"}
        elif what == "dtype":
            x, weight = x.half(), weight.half()
    try:
        unisono.matmul_all_reduce(x, weight, group, **options)
    except unisono.MismatchError as error:
        # The group can still be used.
        return str(error), unisono.matmul_all_reduce(ones(1, 2), ones(2, 1), group).item()
    raise AssertionError("expected a MismatchError")


@pytest.mark.parametrize("what", ["rows", "scale", "residual", "op", "dtype"])
@pytest.mark.parametrize("size", [2])
def test_ranks_that_disagree(pool, size, what):
    for text, after in pool.run(disagreeing, what):
        assert "ranks disagree on " in text and "matmul_all_reduce" in text and "test_plan.py" in text
        assert after == 4.0
    if what == "rows":
        assert "rows [4]  columns [8]" in text and "rows [8]  columns [4]" in text


# -- pieces


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=8),
    st.integers(1, 40),
)
def test_pieces_cover_every_row_once(groups, wanted):
    weights = tuple((2, n) for _, n in groups)
    plan = plan_groups("test", tuple((m, 2) for m, _ in groups), weights, None, 0)
    rows = dict.fromkeys(range(len(groups)), 0)
    at = 0
    pieces = plan.pieces(wanted)
    for piece in pieces:
        assert piece.begin == at
        count = 0
        for i, begin, end in piece.parts:
            assert begin == rows[i] and end > begin
            rows[i] = end
            count += (end - begin) * plan.columns[i]
        assert count == piece.count
        at += count
    assert at == plan.total
    assert all(rows[i] == m for i, (m, n) in enumerate(groups) if n)
    assert len(pieces) <= wanted


# -- PreparedWeight


def test_prepared_weight():
    w = ones(3, 4, dtype=torch.float16)
    prepared = unisono.PreparedWeight(w)
    assert (
        prepared.shape == (3, 4) and prepared.dtype is torch.float16 and repr(prepared).startswith("PreparedWeight([3")
    )
    assert torch.equal(fused_gemm.plain_weight(prepared.for_rows(8, by_tree=False), 4), w.float())


@pytest.mark.parametrize("k", [6, 7])
def test_prepared_bfloat16_is_laid_out_where_it_is_used_so(k, monkeypatch):
    monkeypatch.setattr(fused_gemm.settings, "gemm", "")
    w = ones(k, 4, dtype=torch.bfloat16)
    prepared = unisono.PreparedWeight(w)
    assert torch.equal(fused_gemm.plain_weight(prepared.for_rows(8, by_tree=True), 4), w.float())
    pairs = _core.isa() == "avx512_bf16" and k % 2 == 0
    assert (prepared.for_rows(8, by_tree=False) is prepared.weight) == pairs
    # Few rows are read where they are, but by torch, whose product it is where only scalar kernels are in use.
    assert (prepared.for_rows(1, by_tree=True) is prepared.weight) == (_core.isa() != "scalar")


@pytest.mark.parametrize("wrong", [ones(3), ones(2, 2).int(), torch.ones(2, 2, device="meta")])
def test_prepared_weight_errors(wrong):
    with pytest.raises(ValueError, match=re.escape("PreparedWeight takes a floating-point matrix [K, N] on the CPU")):
        unisono.PreparedWeight(wrong)
    with pytest.raises(TypeError, match=re.escape("PreparedWeight takes a torch.Tensor, got list")):
        unisono.PreparedWeight([1])
