"""all_gather: equal and uneven counts, lists of outputs, the input as own slice of the output."""

import pytest

from tests.calls import Call, all_kinds, check, sampled_calls, splits, threshold_counts
from tests.reference import MOVABLE

FORMS = ("plain", "in_place", "list")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sizes_equal_counts(pool, size):
    counts = [(count,) * size for count in threshold_counts("float32", size)]
    axes = {"counts": counts, "kinds": all_kinds(size), "form": FORMS, "shift": (0, 1)}
    check(pool, sampled_calls("all_gather", 250 if size in (2, 3) else 120, **axes))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_uneven_counts(pool, size):
    totals = (1, 5, 11, 1024, 4099, 16_385, 65_537, 200_003)
    counts = [split for total in totals for split in splits(total, size)]
    axes = {"counts": counts, "kinds": all_kinds(size), "form": FORMS, "shift": (0, 1)}
    check(pool, sampled_calls("all_gather", 250 if size in (2, 3) else 120, **axes))


@pytest.mark.parametrize("size", [2, 3])
def test_dtypes(pool, size):
    counts = [split for total in (9, 8193, 50_000) for split in splits(total, size)]
    axes = {"counts": counts, "kinds": all_kinds(size), "form": FORMS, "shift": (0, 1)}
    check(pool, sampled_calls("all_gather", 6 * len(MOVABLE), dtype=MOVABLE, special=(False, True), **axes))


@pytest.mark.parametrize("size", [2, 3])
def test_rows_and_lists_of_both_memories(pool, size):
    axes = {
        "counts": [(6,) * size, (12, *(600,) * (size - 1))],
        "columns": (2, 3),
        "kinds": all_kinds(size),
        "form": FORMS,
    }
    calls = sampled_calls("all_gather", 40, **axes)
    mixed = [("hm",) * size, ("om",) * size, ("hm",) + ("oo",) * (size - 1)]
    calls += sampled_calls("all_gather", 30, counts=splits(90_000, size), kinds=mixed, form=("list",))
    check(pool, calls)


@pytest.mark.parametrize("size", [2, 4])
def test_large(pool, size):
    calls = []
    for counts in splits(2_000_003, size):
        calls += sampled_calls("all_gather", 3, counts=[counts], kinds=all_kinds(size), form=FORMS, shift=(1, 0))
    for kind in ("hh", "oo"):
        calls.append(Call("all_gather", counts=splits(5_000_000, size)[2], kinds=(kind,) * size))
    check(pool, calls)
