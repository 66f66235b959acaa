"""gather: every root, equal and uneven counts, one output or a list; only the root gives one."""

import pytest

from tests.calls import Call, all_kinds, check, sampled_calls, splits, threshold_counts
from tests.reference import MOVABLE

FORMS = ("plain", "list")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sizes_kinds_and_roots(pool, size):
    counts = [(count,) * size for count in threshold_counts("float32", size)]
    counts += [split for total in (5, 4099, 16_385, 200_003) for split in splits(total, size)]
    axes = {"counts": counts, "root": range(size), "kinds": all_kinds(size), "form": FORMS, "shift": (0, 1)}
    check(pool, sampled_calls("gather", 200 if size in (2, 3) else 100, **axes))


@pytest.mark.parametrize("size", [2, 3])
def test_dtypes(pool, size):
    counts = [split for total in (9, 50_000) for split in splits(total, size)]
    axes = {"counts": counts, "root": range(size), "kinds": all_kinds(size), "form": FORMS, "columns": (1, 2)}
    check(pool, sampled_calls("gather", 4 * len(MOVABLE), dtype=MOVABLE, **axes))


@pytest.mark.parametrize("size", [2, 4])
def test_large(pool, size):
    calls = []
    for root, counts in enumerate(splits(2_000_003, size)):
        for kinds in (("hh",) * size, ("oo",) * size, ("oh",) * size):
            calls.append(Call("gather", counts=counts, root=root % size, kinds=kinds, form=FORMS[root % 2]))
    check(pool, calls)
