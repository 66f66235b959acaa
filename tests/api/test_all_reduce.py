"""all_reduce: sizes around every threshold, dtypes, ops, memory kinds, in place and into `out`."""

import pytest

from tests.calls import Call, all_kinds, check, sampled_calls, threshold_counts, with_dtype_and_op
from tests.reference import REDUCTIONS, ops_of

FORMS = ("in_place", "plain")  # plain: out= is given


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_sizes_and_kinds(pool, size):
    counts = threshold_counts("float32", size)
    axes = {"counts": counts, "kinds": all_kinds(size), "form": FORMS, "shift": (0, 0, 1, 3)}
    check(pool, sampled_calls("all_reduce", 400 if size in (2, 3) else 150, **axes))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_dtypes_and_ops(pool, size):
    axes = {
        "counts": (1, 2, 5, 9, 33, 1023, 4097, 20_001),
        "kinds": all_kinds(size),
        "form": FORMS,
        "shift": (0, 1),
        "special": (False, True),
    }
    rounds = 6 if size in (2, 3) else 3
    check(
        pool,
        sampled_calls("all_reduce", rounds * len(REDUCTIONS), fix=with_dtype_and_op, pair=REDUCTIONS, **axes),
    )


@pytest.mark.parametrize("size", [2, 4])
def test_every_op_of_16_bit_types_at_every_threshold(pool, size):
    calls = []
    for dtype in ("float16", "bfloat16"):
        axes = {
            "dtype": (dtype,),
            "counts": threshold_counts(dtype, size),
            "op": ops_of(dtype),
            "kinds": all_kinds(size),
        }
        calls += sampled_calls("all_reduce", 100, form=FORMS, special=(False, True), **axes)
    check(pool, calls)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_large(pool, size):
    calls = [
        Call("all_reduce", "float32", 1_000_003, kinds=kinds, form=form, shift=shift, seed=shift)
        for kinds in all_kinds(size)
        for form, shift in (("in_place", 0), ("plain", 1))
    ]
    calls += [
        Call("all_reduce", "bfloat16", 3_000_001, op="avg", kinds=("hh",) * size, form="in_place"),
        Call("all_reduce", "int64", 500_009, op="max", kinds=("oo",) * size, form="in_place"),
        Call("all_reduce", "float32", (16 << 20) // 4 + 5, kinds=("hh",) * size, form="in_place"),
        Call("all_reduce", "float32", (16 << 20) // 4 + 5, kinds=("oo",) * size, form="plain"),
        Call("all_reduce", "float16", (36 << 20) // 2 + 1, kinds=("hh",) * size, form="plain"),
    ]
    check(pool, calls)


@pytest.mark.parametrize("size", [3])
def test_shapes(pool, size):
    axes = {"counts": (6, 600, 60_000), "columns": (2, 3), "kinds": all_kinds(size), "form": FORMS}
    check(pool, sampled_calls("all_reduce", 30, **axes))
