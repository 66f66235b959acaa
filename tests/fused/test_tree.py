"""``order="tree"``: the same bits for any number of ranks, rows and pieces, on any CPU, against the exact model."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono
from tests.fused import tree_model
from tests.fused.cases import numbers
from tests.reference import difference
from unisono import _core
from unisono.fused import gemm
from unisono.testing import run_ranks

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ISAS = [isa for isa in ("scalar", "avx2", "avx512") if _core.set_isa(isa)]
_core.set_isa(ISAS[-1])


@pytest.fixture(autouse=True)
def best_isa():
    yield
    _core.set_isa(ISAS[-1])


# -- the model


@given(st.tuples(*[st.floats(width=32, min_value=-1e6, max_value=1e6)] * 3))
@settings(max_examples=300, deadline=None)
def test_fma_of_the_model(abc):
    a, b, c = (np.float32(x) for x in abc)
    if abs(float(a) * float(b) + float(c)) > 1e-30:
        assert tree_model.fma(np.array([a]), np.array([b]), np.array([c]))[0] == tree_model.fma_exact(a, b, c)


@pytest.mark.parametrize("depth", [512, 1001, 1536])
def test_every_addition_matters(depth):
    """Two neighbours that are not added to each other change places, at every place in turn: other bits, each time."""
    x, w = (numbers(*shape, dtype=torch.float32, seed=(3, depth, 0, 1)) for shape in ((6, depth), (depth, 5)))
    right = torch.empty(30)
    gemm.multiply(right, [x], [w], [5], None, 1)
    assert not difference(tree_model.product(x, w), right)
    parts = max(len(blocks) for blocks in ([[b] for b in tree_model.blocks_of(depth)], *tree_model.blocks_of(depth)))
    assert parts >= 4
    for swap in range(1, parts - 1, 2):
        assert difference(tree_model.product(x, w, swap=swap), right)
    assert not difference(tree_model.product(x, w, swap=0), right)  # a + b is b + a


# -- products of one rank


@st.composite
def products(draw):
    piece = draw(st.one_of(st.integers(1, 255), st.sampled_from([128, 257, 385, 600])))
    parts = draw(st.sampled_from([1, 1, 2, 4]))
    slices = 2 ** draw(st.integers(0, 3))
    depth = gemm.slice_of(piece * slices * parts) and piece * slices
    return {
        "m": draw(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 40])),
        "k": depth,
        "n": draw(st.sampled_from([1, 5, 8, 16, 17, 33, 64])),
        "parts": parts,
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "weight": draw(st.sampled_from(["plain", "transposed", "prepared", "strided"])),
        "seed": draw(st.integers(0, 1000)),
    }


def laid_out(w: torch.Tensor, how: str, rows: int) -> torch.Tensor:
    if how == "transposed":
        return w.t().contiguous().t()
    if how == "strided":
        wide = torch.full((w.shape[0] * 2, w.shape[1] + 3), float("nan"), dtype=w.dtype)
        wide[::2, :-3] = w
        return wide[::2, :-3]
    return gemm.PreparedWeight(w).for_rows(rows, by_tree=True) if how == "prepared" else w


@given(products())
@settings(max_examples=120, deadline=None)
def test_products_against_the_model(case):
    m, k, n, dtype = case["m"], case["k"], case["n"], DTYPES[case["dtype"]]
    if k % (gemm.slice_of(k * case["parts"]) or 1):
        return
    x = numbers(m, k, dtype=dtype, seed=(1, case["seed"], 0, 0))
    w = numbers(k, n, dtype=dtype, seed=(2, case["seed"], 0, 0))
    want = tree_model.product(x, w, k * case["parts"]).reshape(-1)
    for isa in ISAS:
        _core.set_isa(isa)
        out = torch.full((m * n,), -7.0)
        gemm.multiply(out, [x], [laid_out(w, case["weight"], m)], [n], None, case["parts"])
        assert not difference(out, want), f"{isa}: {difference(out, want)}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_batch(dtype, isa):
    """Rows 1 to 512 of a batch have the bits they have alone; chunks of columns, blocks of rows, panels and threads."""
    _core.set_isa(isa)
    k, n, top = (512, 600, 512) if isa != "scalar" else (256, 40, 130)
    x = numbers(top + 3, k, dtype=DTYPES[dtype], seed=(4, 0, 0, 0))
    w = numbers(k, n, dtype=DTYPES[dtype], seed=(4, 0, 0, 1))
    ready = unisono.PreparedWeight(w)
    whole = torch.empty((top + 3) * n)
    gemm.multiply(whole, [x], [w], [n], None, 1)
    whole = whole.view(-1, n)
    assert not difference(whole[5:7], tree_model.product(x[5:7], w))
    for rows in (1, 2, 4, 5, 6, 7, 31, 64, 127, 128, 129, 511, 512):
        if rows > top:
            continue
        for weight in (w, ready.for_rows(rows, by_tree=True)):
            out = torch.empty(rows * n)
            gemm.multiply(out, [x[3 : 3 + rows]], [weight], [n], None, 1)
            assert not difference(out, whole[3 : 3 + rows].reshape(-1)), (rows, weight.dim())


def test_special_numbers():
    """Infinities, NaN and denormals take the same way on every instruction set."""
    x = torch.tensor([[1e30, 1e-30, float("inf"), 1.0], [1e-38, -1e-40, 3.0, 0.0], [float("nan"), 1, 1, 1]])
    w = torch.tensor([[1e30, 1e-8], [1e-30, 3e-3], [0.0, 2.0], [-1e20, -0.0]])
    seen = []
    for isa in ISAS:
        _core.set_isa(isa)
        out = torch.empty(6)
        gemm.multiply(out, [x], [w], [2], None, 1)
        seen.append(out)
        assert not difference(out, seen[0])
    assert seen[0].isnan().tolist() == [True, False, False, False, True, True]


# -- groups of ranks


def sampled() -> list[dict]:
    """Calls whose whole depth divides into 8 parts, so that every number of ranks gives the same."""
    chance = random.Random(17)
    cases = []
    for seed in range(16):
        rows = chance.choice([(1,), (5,), (3, 0, 4), (64, 1), (130,)])
        split_item = chance.choice([0, 1, 2, 3])
        depths = [chance.choice([1024, 1376, 1504]) for _ in rows]
        columns = [chance.choice([8, 24, 33]) for _ in rows]
        if split_item in (1, 3):
            depths = depths[:1] * len(rows)
        if split_item in (2, 3):
            columns = columns[:1] * len(rows)
        cases.append(
            {
                "rows": rows, "split_item": split_item, "depths": depths, "columns": columns, "seed": seed,
                "dtype": chance.choice(sorted(DTYPES)), "scale": chance.choice([1.0, 0.3]),
                "bias": chance.choice([None, None, "float32", "bfloat16"]), "residual": chance.random() < 0.3,
                "comm_turn": chance.choice([0, 1, 3]), "verb": chance.choice(["all_reduce", "reduce_scatter"]),
                "prepared": chance.random() < 0.4,
            }
        )  # fmt: skip
    return cases


def inputs_of(case: dict) -> tuple[list, list, list | None, list | None]:
    dtype, seed = DTYPES[case["dtype"]], case["seed"]
    shapes = list(zip(case["rows"], case["depths"], case["columns"], strict=True))
    xs = [numbers(m, k, dtype=dtype, seed=(seed, i, 0, 1)) for i, (m, k, n) in enumerate(shapes)]
    ws = [numbers(k, n, dtype=dtype, seed=(seed, i, 0, 2)) for i, (m, k, n) in enumerate(shapes)]
    extra = [numbers(m, n, dtype=dtype, seed=(seed, i, 0, 3)) for i, (m, k, n) in enumerate(shapes)]
    bias = None
    if case["bias"]:
        kind = getattr(torch, case["bias"])
        bias = [numbers(n, dtype=kind, seed=(seed, i, 0, 4)) for i, n in enumerate(case["columns"])]
    return xs, ws, bias, extra if case["residual"] else None


@functools.cache
def wanted_of_sampled() -> list[list[torch.Tensor]]:
    """What the model gives for every sampled case, computed once for all numbers of ranks."""
    wanted = []
    for case in sampled():
        xs, ws, bias, extra = inputs_of(case)
        wanted.append(
            [
                tree_model.result(x, w, bias and bias[i], case["scale"], extra and extra[i])
                for i, (x, w) in enumerate(zip(xs, ws, strict=True))
            ]
        )
    return wanted


def run_case(group, case: dict, wanted: list[torch.Tensor], parts: list[list[int]] | None = None) -> str | None:
    """Runs the case on the group's ranks, and says where its rows differ from the model's.

    ``parts`` are the ranks' depths of every group, equal if None.
    """
    xs, ws, bias, extra = inputs_of(case)
    r, size = group.rank, group.size
    parts = parts or [[k // size] * size for k in case["depths"]]
    mine = [x.split(cut, dim=1)[r] for x, cut in zip(xs, parts, strict=True)]
    weights = [w.split(cut, dim=0)[r] for w, cut in zip(ws, parts, strict=True)]
    if case["prepared"]:
        weights = [unisono.PreparedWeight(w) for w in weights]
    one_x, one_y = case["split_item"] in (1, 3), case["split_item"] in (2, 3)
    outputs = [torch.cat(wanted)] if one_y else wanted
    residual = extra and ([torch.cat(extra)] if one_y else extra)
    chance = random.Random(case["seed"])
    options = {
        "group_list": case["rows"] if one_x else None, "split_item": case["split_item"], "bias": bias,
        "scale": case["scale"], "comm_turn": case["comm_turn"], "order": "tree",
    }  # fmt: skip
    given_x = [torch.cat(mine)] if one_x else mine
    if case["verb"] == "all_reduce":
        got = unisono.grouped_matmul_all_reduce(given_x, weights, group, residual=residual, **options)
    else:
        splits = []
        for y in outputs:
            cut = sorted(chance.randint(0, len(y)) for _ in range(size - 1))
            splits.append([b - a for a, b in itertools.pairwise([0, *cut, len(y)])])
        outputs = [y.split(split)[r] for y, split in zip(outputs, splits, strict=True)]
        residual = residual and [t.split(split)[r] for t, split in zip(residual, splits, strict=True)]
        splits = splits[0] if one_y else splits
        got = unisono.grouped_matmul_reduce_scatter(
            given_x, weights, group, residual=residual, split_sizes=splits, **options
        )
    for y, want in zip(got, outputs, strict=True):
        if y.shape != want.shape or difference(y, want):
            return f"{case}: {difference(y, want)}"
    return None


def run_cases(group, wanted):
    return [line for case, want in zip(sampled(), wanted, strict=True) if (line := run_case(group, case, want))]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_calls_against_the_model(pool, size):
    assert pool.run(run_cases, wanted_of_sampled()) == [[]] * size


M, K, N = 16, 1024, 1376  # K and N divide into 8 parts


def gradients(group, dtype_name):
    """All gradients of the three forms, put together over the ranks: they must not depend on how many there are."""
    dtype, r, size = DTYPES[dtype_name], group.rank, group.size
    m, k, n = M, K, N
    x, w = (numbers(*s, dtype=dtype, seed=(9, 0, 0, i)) for i, s in enumerate([(m, k), (k, n)]))
    bias = numbers(n, dtype=torch.float32, seed=(9, 0, 0, 3))
    g = numbers(m, n, dtype=dtype, seed=(9, 0, 0, 2))

    def leaf(t):
        return t.contiguous().clone().requires_grad_()

    def whole(t, dim):
        parts = torch.empty(size, t.numel(), dtype=t.dtype)
        group.all_gather(parts, t.contiguous())
        return torch.cat([p.view(t.shape) for p in parts], dim=dim)

    found = []
    a, b, c = leaf(x.chunk(size, 1)[r]), leaf(w.chunk(size, 0)[r]), leaf(bias)
    y = unisono.matmul_all_reduce(a, b, group, bias=c, order="tree", backward="identity")
    y.backward(g)
    found += [y.detach(), whole(a.grad, 1), whole(b.grad, 0), c.grad * size]
    a, b = leaf(x.chunk(size, 1)[r]), leaf(w.chunk(size, 0)[r])
    y = unisono.matmul_reduce_scatter(a, b, group, order="tree", split_sizes=[m - size + 1] + [1] * (size - 1))
    y.backward(g.split([m - size + 1] + [1] * (size - 1))[r])
    found += [whole(a.grad, 1), whole(b.grad, 0)]
    a, b = leaf(x.chunk(size, 0)[r]), leaf(w.chunk(size, 1)[r])
    y = unisono.all_gather_matmul(a, b, group, order="tree")
    y.backward(g.chunk(size, 1)[r])
    with torch.no_grad():
        again = unisono.all_gather_matmul(a, b, group, order="tree")
    assert torch.equal(again, y)
    return [*found, whole(y.detach(), 1), whole(a.grad, 0), whole(b.grad, 1)]


@functools.cache
def gradients_alone(dtype: str) -> list[torch.Tensor]:
    return run_ranks(1, gradients, dtype)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_one_rank(dtype):
    kind, found = DTYPES[dtype], gradients_alone(dtype)
    x, w = (numbers(*s, dtype=kind, seed=(9, 0, 0, i)) for i, s in enumerate([(M, K), (K, N)]))
    g = numbers(M, N, dtype=kind, seed=(9, 0, 0, 2))
    of_x, of_w = tree_model.product(g, w.t()).to(kind), tree_model.product(x.t(), g).to(kind)
    for i, want in enumerate([of_x, of_w, tree_model.product(torch.ones(1, M), g)[0], of_x, of_w], start=1):
        assert not difference(found[i], want), i
    assert not difference(found[7], of_x) and not difference(found[8], of_w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_gradients(pool, size, dtype):
    alone = gradients_alone(dtype)
    for found in pool.run(gradients, dtype):
        assert [difference(a, b) for a, b in zip(found, alone, strict=True)] == [None] * len(alone)


def compiled(group):
    """The bits of the eager call, forward and backward, for several numbers of rows."""
    torch._dynamo.reset()

    def run(x, w, b):
        return unisono.matmul_all_reduce(x, w, group, bias=b, order="tree", backward="identity") * 2

    fast = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 6, 9):
        results = []
        for f in (run, fast):
            shapes = (rows, 256), (256, 24), (24,)
            leaves = [
                numbers(*s, dtype=torch.bfloat16, seed=(6, group.rank, i, 0)).clone().requires_grad_()
                for i, s in enumerate(shapes)
            ]
            y = f(*leaves)
            y.float().square().sum().backward()
            results.append([y.detach(), *(t.grad for t in leaves)])
        assert [difference(a, b) for a, b in zip(*results, strict=True)] == [None] * 4
    torch._dynamo.reset()


@pytest.mark.parametrize("size", [2])
def test_compile(pool, size):
    pool.run(compiled)


# -- unequal parts, and numbers of ranks that are no power of two


@st.composite
def cuts(draw):
    """A whole depth, cut between its slices into parts for some ranks; some may have nothing."""
    unit = draw(st.sampled_from([128, 172, 129, 255]))
    slices = 2 ** draw(st.integers(1, 5))
    borders = sorted(draw(st.lists(st.integers(0, slices), min_size=1, max_size=7)))
    return unit, [(b - a) * unit for a, b in itertools.pairwise([0, *borders, slices])]


def added(x: torch.Tensor, w: torch.Tensor, depths: list[int], found: list) -> torch.Tensor:
    """The sums of all ranks' subtrees, joined as they say."""
    waiting, begin = [], 0
    unit = gemm.slice_of(sum(depths))
    for k, trees in zip(depths, found, strict=True):
        for first, last, joins in trees:
            part = torch.empty(x.shape[0] * w.shape[1])
            at = slice(begin + first, begin + last)
            gemm.multiply(part, [x[:, at]], [w[at]], [w.shape[1]], None, unit=unit)
            for _ in range(joins):
                part = waiting.pop() + part
            waiting.append(part)
        begin += k
    assert len(waiting) == 1
    return waiting[0]


@given(cuts())
@settings(max_examples=60, deadline=None)
def test_any_cut_between_slices(case):
    """The subtrees of every cut give the bits of the whole; there are at most two of each size on a rank."""
    unit, depths = case
    whole = sum(depths)
    assert gemm.slice_of(whole) == unit
    x, w = (numbers(*s, dtype=torch.float32, seed=(8, unit, 0, i)) for i, s in enumerate([(2, whole), (whole, 3)]))
    right = torch.empty(6)
    gemm.multiply(right, [x], [w], [3], None, 1)
    found = gemm.subtrees(depths, 0)[1]
    assert not difference(added(x, w, depths, found), right)
    for trees in found:
        sizes = [last - first for first, last, _ in trees]
        assert all(sizes.count(n) <= 2 for n in sizes)


def test_another_addition_is_noticed():
    """One sum joined at another place gives other bits."""
    depths = [512, 256, 256]
    x, w = (numbers(*s, dtype=torch.float32, seed=(8, 1, 0, i)) for i, s in enumerate([(5, 1024), (1024, 7)]))
    right = tree_model.product(x, w).reshape(-1)
    assert not difference(added(x, w, depths, gemm.subtrees(depths, 0)[1]), right)
    assert difference(added(x, w, depths, [[(0, 512, 0)], [(0, 256, 1)], [(0, 256, 1)]]), right)


def run_unequal(group, wanted):
    """The sampled calls, cut at random slices; ranks may have nothing of a depth."""
    lines = []
    for case, want in zip(sampled(), wanted, strict=True):
        chance = random.Random(case["seed"])
        parts = []
        for k in case["depths"]:
            if case["split_item"] in (1, 3) and parts:
                parts.append(parts[0])
                continue
            unit = gemm.slice_of(k)
            borders = sorted(chance.randint(0, k // unit) for _ in range(group.size - 1))
            parts.append([(b - a) * unit for a, b in itertools.pairwise([0, *borders, k // unit])])
        if line := run_case(group, case, want, parts):
            lines.append(line)
    return lines


@pytest.mark.parametrize("size", [2, 3, 5])
def test_unequal_parts_against_the_model(pool, size):
    assert pool.run(run_unequal, wanted_of_sampled()) == [[]] * size


def unequal_gradients(group):
    """As gradients(), of an all-reduce whose depth is cut 512, 256, 256."""
    x, w = (numbers(*s, dtype=torch.bfloat16, seed=(9, 0, 0, i)) for i, s in enumerate([(M, K), (K, N)]))
    g = numbers(M, N, dtype=torch.bfloat16, seed=(9, 0, 0, 2))
    cut = [512, 256, 256]
    a, b = (t.split(cut, dim)[group.rank].contiguous().requires_grad_() for t, dim in ((x, 1), (w, 0)))
    y = unisono.matmul_all_reduce(a, b, group, order="tree", backward="identity")
    y.backward(g)
    return y.detach(), a.grad, b.grad


@pytest.mark.parametrize("size", [3])
def test_unequal_gradients(pool, size):
    alone = gradients_alone("bfloat16")
    found = pool.run(unequal_gradients)
    x, w = (numbers(*s, dtype=torch.bfloat16, seed=(9, 0, 0, i)) for i, s in enumerate([(M, K), (K, N)]))
    assert not difference(found[0][0], tree_model.result(x, w))
    assert not difference(torch.cat([part[1] for part in found], dim=1), alone[1])
    assert not difference(torch.cat([part[2] for part in found], dim=0), alone[2])


# -- refused


def refusals(group):
    x, w = torch.randn(3, 128), torch.randn(128, 4)

    def told(kind, call):
        try:
            call()
        except kind as error:
            return str(error)
        return "nothing"

    def tree(*args, **options):
        return lambda: unisono.matmul_all_reduce(*args, group, order="tree", **options)

    return [
        told(ValueError, tree(x, w)),
        told(ValueError, tree(x[:, :32], w[:32])),
        told(TypeError, tree(x.double(), w.double())),
        told(ValueError, tree(x, w, reduce_op="max")),
        told(ValueError, lambda: unisono.matmul_all_reduce(x, w, group, order="left")),
    ]


@pytest.mark.parametrize("size", [3])
def test_ranks_that_are_no_power_of_two(pool, size):
    for lines in pool.run(refusals):
        assert "a depth of 384 is summed in blocks of 192, which the ranks with 128, 128, 128 would cut" in lines[0]
        assert "a depth of 96 is summed in blocks of 96" in lines[1]


@pytest.mark.parametrize("size", [4])
def test_refused(pool, size):
    for lines in pool.run(refusals):
        assert lines[0] == "nothing"
        assert "summed in blocks of 128, which the ranks with 32, 32, 32, 32 would cut" in lines[1]
        assert "order 'tree' takes float32, float16 and bfloat16 on the CPU, got torch.float64" in lines[2]
        assert "for reduce_op 'sum' only, got reduce_op 'max'" in lines[3]
        assert "argument 'order' must be None or 'tree', got 'left'" in lines[4]


def uneven_depth(group):
    """384 is two slices of 192: no rank can have 128 of it."""
    k = 128 * (1 + group.rank)
    with pytest.raises(ValueError, match="blocks of 192, which the ranks with 128, 256 would cut"):
        unisono.matmul_all_reduce(torch.ones(2, k), torch.ones(k, 3), group, order="tree")


def other_scale(group):
    """Unequal parts go another way, which compares the options too."""
    k = 128 * (1 + 2 * group.rank)
    with pytest.raises(unisono.MismatchError, match="in the tree order, k"):
        unisono.matmul_all_reduce(torch.ones(2, k), torch.ones(k, 3), group, order="tree", scale=1.0 + group.rank)


def one_in_another_order(group):
    order = "tree" if group.rank == 0 else None
    with pytest.raises(unisono.MismatchError):
        unisono.matmul_all_reduce(torch.ones(2, 128), torch.ones(128, 3), group, order=order)


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("program", [uneven_depth, other_scale, one_in_another_order])
def test_ranks_that_disagree(pool, size, program):
    pool.run(program)
