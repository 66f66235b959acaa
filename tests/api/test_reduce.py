"""reduce: the result on the root only, every root, and nobody else's tensor touched."""

import pytest

from tests.calls import Call, all_kinds, check, sampled_calls, threshold_counts, with_dtype_and_op
from tests.reference import REDUCTIONS

FORMS = ("in_place", "plain")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sizes_kinds_and_roots(pool, size):
    axes = {
        "counts": threshold_counts("float32", size),
        "root": range(size),
        "kinds": all_kinds(size),
        "form": FORMS,
        "shift": (0, 1),
    }
    check(pool, sampled_calls("reduce", 200 if size in (2, 3) else 100, **axes))


@pytest.mark.parametrize("size", [2, 3])
def test_dtypes_and_ops(pool, size):
    axes = {"counts": (1, 4, 31, 2049, 20_001), "root": range(size), "kinds": all_kinds(size), "form": FORMS}
    check(
        pool,
        sampled_calls(
            "reduce",
            2 * len(REDUCTIONS),
            fix=with_dtype_and_op,
            pair=REDUCTIONS,
            special=(False, True),
            **axes,
        ),
    )


@pytest.mark.parametrize("size", [2, 4])
def test_large(pool, size):
    calls = [
        Call("reduce", "float32", 1_000_003, root=size - 1, kinds=kinds, form=form)
        for kinds in all_kinds(size)
        for form in FORMS
    ]
    calls.append(Call("reduce", "bfloat16", (17 << 20) // 2, kinds=("hh",) * size, form="plain"))
    check(pool, calls)
