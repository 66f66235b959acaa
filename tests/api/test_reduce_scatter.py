"""reduce_scatter: equal and uneven counts, lists of inputs, the output as own slice of the input."""

import pytest

from tests.calls import Call, all_kinds, check, sampled_calls, splits, threshold_counts, with_dtype_and_op
from tests.reference import REDUCTIONS

FORMS = ("plain", "in_place", "list")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sizes_equal_counts(pool, size):
    counts = [(count,) * size for count in threshold_counts("float32", size)]
    axes = {"counts": counts, "kinds": all_kinds(size), "form": FORMS, "shift": (0, 1)}
    check(pool, sampled_calls("reduce_scatter", 250 if size in (2, 3) else 120, **axes))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_uneven_counts(pool, size):
    totals = (1, 5, 11, 1024, 4099, 16_385, 65_537, 200_003)
    counts = [split for total in totals for split in splits(total, size)]
    axes = {
        "counts": counts,
        "kinds": all_kinds(size),
        "form": FORMS,
        "shift": (0, 1),
        "op": ("sum", "avg", "max", "premul_sum"),
    }
    check(pool, sampled_calls("reduce_scatter", 250 if size in (2, 3) else 120, **axes))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_dtypes_and_ops(pool, size):
    counts = [split for total in (9, 2049, 30_001) for split in splits(total, size)]
    axes = {
        "counts": counts,
        "kinds": all_kinds(size),
        "form": FORMS,
        "shift": (0, 1),
        "special": (False, True),
    }
    check(
        pool,
        sampled_calls("reduce_scatter", 3 * len(REDUCTIONS), fix=with_dtype_and_op, pair=REDUCTIONS, **axes),
    )


@pytest.mark.parametrize("size", [2, 3])
def test_rows_and_lists_of_both_memories(pool, size):
    axes = {
        "counts": [(6,) * size, (12, *(600,) * (size - 1))],
        "columns": (2, 3),
        "kinds": all_kinds(size),
        "form": FORMS,
    }
    calls = sampled_calls("reduce_scatter", 40, **axes)
    mixed = [("mh",) * size, ("mo",) * size, ("mh",) + ("oo",) * (size - 1)]
    calls += sampled_calls("reduce_scatter", 30, counts=splits(90_000, size), kinds=mixed, form=("list",))
    check(pool, calls)


@pytest.mark.parametrize("size", [2, 4])
def test_large(pool, size):
    calls = []
    for counts in splits(2_000_003, size):
        axes = {"kinds": all_kinds(size), "form": FORMS, "shift": (1, 0)}
        calls += sampled_calls("reduce_scatter", 3, counts=[counts], dtype=("float32", "bfloat16"), **axes)
    for kind in ("hh", "oo"):
        calls.append(Call("reduce_scatter", counts=splits(5_000_000, size)[2], kinds=(kind,) * size))
    check(pool, calls)
