"""broadcast: every root, every dtype including those that are only moved, sizes around every threshold."""

import pytest

from tests.calls import Call, all_kinds, check, sampled_calls, threshold_counts
from tests.reference import MOVABLE


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sizes_kinds_and_roots(pool, size):
    axes = {
        "counts": threshold_counts("float32", size),
        "root": range(size),
        "kinds": all_kinds(size),
        "shift": (0, 1, 5),
    }
    check(pool, sampled_calls("broadcast", 200 if size in (2, 3) else 100, **axes))


@pytest.mark.parametrize("size", [2, 3])
def test_dtypes(pool, size):
    axes = {
        "counts": (1, 3, 41, 4097, 70_001),
        "root": range(size),
        "kinds": all_kinds(size),
        "shift": (0, 1),
    }
    check(pool, sampled_calls("broadcast", 6 * len(MOVABLE), dtype=MOVABLE, special=(False, True), **axes))


@pytest.mark.parametrize("size", [2, 4])
def test_large(pool, size):
    calls = [
        Call("broadcast", "float32", 1_000_003, root=root, kinds=kinds, shift=root)
        for kinds in all_kinds(size)
        for root in (0, size - 1)
    ]
    calls += [Call("broadcast", "uint8", (33 << 20) + 7, kinds=(kind,) * size, shift=1) for kind in ("hh", "oo")]
    check(pool, calls)
