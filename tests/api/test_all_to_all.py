"""all_to_all: equal cells, count matrices with empty and uneven cells, tensors and lists."""

import pytest

from tests.calls import Call, all_kinds, check, matrices, sampled_calls
from tests.reference import MOVABLE

FORMS = ("plain", "list")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sizes_and_kinds(pool, size):
    totals = (1, 2, 9, 10, 11, 1023, 1025, 4095, 4097, 8193, 16_383, 16_385, 32_769, 65_537)
    counts = [matrix for total in totals for matrix in matrices(total, size)]
    axes = {"counts": counts, "kinds": all_kinds(size), "form": FORMS, "shift": (0, 1)}
    check(pool, sampled_calls("all_to_all", 250 if size in (2, 3) else 120, **axes))


@pytest.mark.parametrize("size", [2, 3])
def test_dtypes(pool, size):
    counts = [matrix for total in (8, 20_000) for matrix in matrices(total, size)]
    axes = {"counts": counts, "kinds": all_kinds(size), "form": FORMS, "columns": (1, 2)}
    check(pool, sampled_calls("all_to_all", 4 * len(MOVABLE), dtype=MOVABLE, **axes))


@pytest.mark.parametrize("size", [2, 4])
def test_lists_of_both_memories(pool, size):
    mixed = [("mm",) * size, ("hm",) * size, ("mo",) * size]
    check(pool, sampled_calls("all_to_all", 40, counts=matrices(40_000, size), kinds=mixed, form=("list",)))


@pytest.mark.parametrize("size", [2, 4])
def test_large(pool, size):
    calls = [
        Call("all_to_all", counts=matrix, kinds=kinds, form=form, shift=1)
        for matrix in matrices(1_000_003, size)
        for kinds in (("hh",) * size, ("oo",) * size)
        for form in FORMS
    ]
    calls.append(Call("all_to_all", counts=matrices(5_000_000, size)[1], kinds=("hh",) * size))
    check(pool, calls)
