"""The same numbers by every path: message sizes, heap or ordinary memory, one call or its equivalent."""

import pytest
import torch

import unisono
from tests.reference import difference, make_input

CUTS = (1, 9, 10, 11, 300, 1023, 1025, 4097, 8191, 8193, 16_385, 33_000, 70_001, 140_003)
DTYPES = ("float32", "float16", "bfloat16")


def _copy_to(kind, content):
    t = unisono.empty(content.numel(), dtype=content.dtype) if kind == "heap" else torch.empty_like(content)
    return t.copy_(content)


def _whole_and_parts(group, dtype, op):
    """One all_reduce of a long vector, then of its parts, each part in turn in heap and ordinary memory."""
    total = sum(CUTS)
    mine = make_input(dtype, total, group.rank, seed=11)
    factor = 0.3 + group.rank if op == "premul_sum" else None
    whole = _copy_to("heap", mine)
    group.all_reduce(whole, op, factor=factor)
    complaints = []
    ordinary = mine.clone()
    group.all_reduce(ordinary, op, factor=factor)
    if found := difference(ordinary, whole):
        complaints.append(f"{dtype} {op} whole, ordinary against heap: {found}")
    start = 0
    for cut in CUTS:
        for kind in ("heap", "ordinary"):
            part = _copy_to(kind, mine[start : start + cut])
            group.all_reduce(part, op, factor=factor)
            if found := difference(part, whole[start : start + cut]):
                complaints.append(f"{dtype} {op} part of {cut} at {start}, {kind}, against the whole: {found}")
        start += cut
    return complaints


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_result_does_not_depend_on_the_message_size(pool, size):
    for dtype in DTYPES:
        for op in ("sum", "avg", "premul_sum"):
            lines = [f"rank {r}: {x}" for r, found in enumerate(pool.run(_whole_and_parts, dtype, op)) for x in found]
            assert not lines, "\n".join(lines[:12])


def _as_two_calls(group, dtype, op, counts):
    """all_reduce against reduce_scatter + all_gather, and against reduce + broadcast."""
    total = sum(counts)
    mine = make_input(dtype, total, group.rank, seed=5)
    want = mine.clone()
    group.all_reduce(want, op)
    complaints = []
    for kind in ("heap", "ordinary"):
        whole = _copy_to(kind, mine)
        chunk = _copy_to(kind, mine[: counts[group.rank]])
        group.reduce_scatter(chunk, whole, counts, op)
        gathered = _copy_to(kind, mine)
        group.all_gather(gathered, chunk, counts)
        if found := difference(gathered, want):
            complaints.append(f"{kind} {dtype} {op} {counts} reduce_scatter + all_gather: {found}")
        root = group.size - 1
        group.reduce(whole, root, op)
        group.broadcast(whole, root)
        if found := difference(whole, want):
            complaints.append(f"{kind} {dtype} {op} {counts} reduce + broadcast: {found}")
    return complaints


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_is_reduce_scatter_and_all_gather(pool, size):
    for dtype in DTYPES:
        for base in (3, 700, 9_001, 60_007, 700_001):
            even, skewed = [base] * size, [0, *(base // size + 1 for _ in range(size - 2)), base]
            for counts in (even, skewed):
                results = pool.run(_as_two_calls, dtype, "avg" if base % 2 else "sum", counts)
                lines = [f"rank {r}: {x}" for r, found in enumerate(results) for x in found]
                assert not lines, "\n".join(lines[:12])


def _one_odd_value(group, count):
    """An order-sensitive sum: 2^24 + 1 - 2^24 ... gives other bits in every other order."""
    values = [2.0**24, 1.0, -(2.0**24), 1.0, 0.5, 3.0, -1.0]
    t = torch.full((count,), values[group.rank])
    group.all_reduce(t)
    want = torch.zeros((), dtype=torch.float32)
    for value in values[: group.size]:
        want = want + torch.tensor(value)
    return [] if bool((t == want).all()) else [f"{count} elements: got {t.unique().tolist()}, want {want.item()}"]


@pytest.mark.parametrize("size", [3, 4, 7])
def test_the_order_is_the_ranks_order(pool, size):
    for count in (1, 9, 11, 5_000, 50_000, 500_000):
        lines = [f"rank {r}: {x}" for r, found in enumerate(pool.run(_one_odd_value, count)) for x in found]
        assert not lines, "\n".join(lines)


def _staged_bytes(group, kind, count):
    before = group.staged_bytes
    t = _copy_to(kind, torch.ones(count))
    group.all_reduce(t)
    gathered = _copy_to(kind, torch.ones(count * group.size))
    group.all_gather(gathered, t)
    group.reduce_scatter(t, gathered)
    return group.staged_bytes - before


@pytest.mark.parametrize("size", [2, 3])
def test_heap_tensors_are_not_staged(pool, size):
    """Only a large message says something: small ones go through slots on purpose."""
    assert pool.run(_staged_bytes, "heap", 1_000_000) == [0] * size
    assert min(pool.run(_staged_bytes, "ordinary", 1_000_000)) > 0
