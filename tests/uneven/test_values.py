"""Values of the uneven pair and all_to_all_vc, by bits, on our groups and on gloo."""

import pytest

from tests.reference import MOVABLE, REDUCTIONS
from tests.uneven.cases import KINDS, Case, check, splits_for

SIZES = [2, 3, 4]
# Rows of two, also around which gloo's reduce-scatter no longer fits into letters: on 4, 3 and 2 ranks.
UNITS = (1, 3, 240, 5000, 21_472, 21_473, 32_736, 32_737, 65_504, 65_505)


def gather_and_reduce(**facts):
    return [Case("all_gather", **facts), Case("reduce_scatter", **facts)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, *SIZES])
def test_splits_and_shapes(pool, size, kind, tmp_path):
    cases = []
    for i, splits in enumerate(s for unit in UNITS[:4] for s in splits_for(size, unit)):
        for row in ((), (1,), (4,), (2, 3)):
            cases += gather_and_reduce(splits=splits, row=row, seed=i, heap=i % 2 == 0, flat_part=i % 3 == 0)
    check(pool, kind, tmp_path, cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_larger(pool, size, kind, tmp_path):
    cases = []
    for i, splits in enumerate(s for unit in UNITS[4:] for s in splits_for(size, unit)):
        cases += gather_and_reduce(splits=splits, row=(2,), seed=i, heap=i % 2 == 0)
    check(pool, kind, tmp_path, cases)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("size", [2, 3])
def test_little_beside_much(pool, size, kind, tmp_path):
    """Chunks that fit into a descriptor or a slot, beside one that goes past the caches."""
    cases = []
    for i, little in enumerate((0, 1, 200, 20_000)):
        for splits in ((little,) * (size - 1) + (3_500_003,), (3_500_003,) + (little,) * (size - 1)):
            cases += gather_and_reduce(splits=splits, seed=i, heap=True)
    check(pool, kind, tmp_path, cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_in_place(pool, size, kind, tmp_path):
    cases = []
    for i, splits in enumerate(s for unit in (2, 241, 70_001) for s in splits_for(size, unit)):
        cases += gather_and_reduce(splits=splits, row=(2,), seed=i, in_place=True, heap=i % 2 == 0)
    check(pool, kind, tmp_path, cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_equal_splits(pool, size, kind, tmp_path):
    cases = []
    for rows in (0, size, 5 * size):
        cases += gather_and_reduce(splits=None, rows=rows, row=(3,))
        cases += gather_and_reduce(splits=(), rows=rows, row=(3,))
    check(pool, kind, tmp_path, cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_op(pool, size, kind, tmp_path):
    cases = []
    for i, (dtype, op) in enumerate(REDUCTIONS):
        for unit in (5, 3001):
            splits = splits_for(size, unit)[1 + i % 4]
            cases.append(Case("reduce_scatter", splits, row=(2,), dtype=dtype, op=op, seed=i))
    cases += [Case("all_gather", splits_for(size, 700)[1], row=(2,), dtype=dtype) for dtype in MOVABLE]
    check(pool, kind, tmp_path, cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_exchange(pool, size, kind, tmp_path):
    cases = []
    for cell in (1, 300, 6000):
        for matrix in (
            tuple((cell,) * size for _ in range(size)),
            tuple(tuple(cell * ((r * 5 + c * 3) % 4) for c in range(size)) for r in range(size)),
            tuple(tuple(0 if r == 0 else cell + c for c in range(size)) for r in range(size)),
            tuple((0,) * size for _ in range(size)),
        ):
            cases += [Case("all_to_all", matrix, dtype=dtype) for dtype in ("int64", "bfloat16", "bool")]
    check(pool, kind, tmp_path, cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_several_in_flight(pool, size, kind, tmp_path):
    cases = []
    for i, splits in enumerate(s for unit in (1, 300, 20_001) for s in splits_for(size, unit)):
        cases += gather_and_reduce(splits=splits, row=(2,), seed=i)
        cases.append(Case("all_to_all", tuple(splits for _ in range(size)), seed=i))
    check(pool, kind, tmp_path, cases, in_flight=9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [8])
def test_eight_ranks(pool, size, kind, tmp_path):
    splits = tuple(r + 1 for r in range(size))
    cases = gather_and_reduce(splits=splits) + gather_and_reduce(splits=splits, row=(400,), dtype="bfloat16")
    check(pool, kind, tmp_path, cases)
