"""From the command line to rows: sizes, splits and cases."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.bench import plan
from unisono.bench.apart.cases import OPS


@pytest.mark.parametrize(
    "text, value",
    [("8", 8), ("64K", 64 << 10), ("256M", 256 << 20), ("1g", 1 << 30), ("4KiB", 4096), ("16mb", 16 << 20)],
)
def test_bytes(text, value):
    assert plan.parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "K", "-8", "8.5", "1T", "eight", "0"])
def test_bad_bytes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected bytes"):
        plan.parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "two", "2,,4", "", "2,-1"])
def test_bad_ranks(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected rank counts"):
        plan.parse_ranks(text)


@pytest.mark.parametrize("text", ["", "odd", "1:", ":3", "1:3,", "1:-3", "0:0"])
def test_bad_splits(text):
    with pytest.raises(argparse.ArgumentTypeError):
        plan.parse_splits(text)


def test_splits():
    assert plan.parse_splits("even,1:3,0:1,zipf") == ["even", "1:3", "0:1", "zipf"]
    assert plan.split_counts(8, "1:3", 2) == (2, 6)
    assert plan.split_counts(8, "1:3", 4) == (1, 3, 1, 3)  # weights repeat
    assert plan.split_counts(10, "1:2:3:4", 4) == (1, 2, 3, 4)
    assert plan.split_counts(5, "0:1", 2) == (0, 5)
    assert plan.split_counts(9, "0:0:1", 2) == (0, 9)  # of the weights used none is above 0
    assert plan.split_counts(22, "zipf", 3) == (12, 6, 4)


@given(st.integers(0, 10**9), st.sampled_from(["even", "1:3", "0:1", "1:15", "zipf", "7:0:2"]), st.integers(1, 64))
def test_splits_add_up(count, split, ranks):
    counts = plan.split_counts(count, split, ranks)
    assert len(counts) == ranks and sum(counts) == count and min(counts) >= 0


def test_sizes():
    assert plan.sizes_between(8, 8, 4) == [8]
    assert plan.sizes_between(8, 600, 8) == [8, 64, 512]


def test_items():
    items = plan.make_items(["all_reduce", "all_gather_uneven", "barrier"], [4, 8], None, 2)
    assert [(i.case.op, i.split) for i in items[::2]] == [
        ("all_reduce", "-"), ("all_gather", "1:3"), ("all_gather", "1:15"), ("all_gather", "0:1"),
        ("all_gather", "zipf"), ("barrier", "-"),
    ]  # fmt: skip
    # Two sizes that are the same number of elements are one row; p2p needs two ranks.
    assert len(plan.make_items(["reduce_scatter"], [1, 2, 4], None, 4)) == 1
    assert plan.make_items(["p2p_latency"], [8], None, 1) == []


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_cases_are_near_their_size(op, dtype, ranks):
    for split in ("even", "1:3", "zipf"):
        case = plan.make_case(op, 1 << 20, split, ranks, dtype, "sum")
        assert sum(case.counts) == case.count and case.ranks == ranks
        if op != "barrier":
            assert abs(case.size_bytes - (1 << 20)) < 8 * ranks
        if OPS[op].cut and split == "even":
            assert case.even
