"""The right answers: against a model written down another way, and the same in numpy as in torch."""

import functools

import numpy as np
import pytest
import torch

from unisono.bench.apart import arrays
from unisono.bench.apart.cases import FLOATS, ITEM_BYTES, OPS, PERIOD, REDOPS, Case
from unisono.bench.jobs import Job, tile

COUNTS = {2: (300, 41), 3: (0, 250, 7)}
REDUCE = {
    "sum": lambda t: t.sum(0),
    "avg": lambda t: t.double().mean(0),
    "product": lambda t: t.prod(0),
    "min": lambda t: t.amin(0),
    "max": lambda t: t.amax(0),
    "band": lambda t: functools.reduce(torch.bitwise_and, t),
    "bor": lambda t: functools.reduce(torch.bitwise_or, t),
    "bxor": lambda t: functools.reduce(torch.bitwise_xor, t),
}


def inputs_of(case):
    def at(rank):
        start = case.start(rank) if case.op in ("all_gather", "gather") else 0
        n = case.shapes(rank)[0] or 0
        return torch.tensor([case.values(rank)[(start + i) % PERIOD] for i in range(n)], dtype=torch.int64)

    return [at(rank) for rank in range(case.ranks)]


def model(case, rank):
    """What the operation means, by slicing and adding whole inputs."""
    xs, first, mine = inputs_of(case), case.start(rank), case.counts[rank]
    if case.op in ("all_reduce", "reduce_scatter") or (case.op == "reduce" and rank == 0):
        whole = REDUCE[case.redop](torch.stack(xs))
        return whole[first : first + mine] if case.op == "reduce_scatter" else whole
    if case.op == "broadcast":
        return xs[0]
    if case.op == "all_gather" or (case.op == "gather" and rank == 0):
        return torch.cat(xs)
    if case.op == "scatter":
        return xs[0][first : first + mine]
    if case.op == "all_to_all":
        return torch.cat([x[first : first + mine] for x in xs])
    if case.op == "p2p_latency" and rank in (0, case.ranks - 1):
        return xs[case.ranks - 1 - rank]
    if case.op == "p2p_bandwidth" and rank == case.ranks - 1:
        return xs[0]
    return None


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("matmul_all_reduce", "ddp_step")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_expected(op, ranks):
    for redop in REDOPS if OPS[op].reduces else ["sum"]:
        case = Case(op, sum(COUNTS[ranks]), COUNTS[ranks], "float64" if redop == "avg" else "int64", redop)
        for rank in range(ranks):
            wanted, pieces = model(case, rank), case.expected(rank)
            assert (wanted is None) == (pieces is None), (redop, rank)
            if pieces is not None:
                got = torch.cat([tile(piece, torch.float64) for piece in pieces])
                assert torch.equal(got, wanted.double()), (redop, rank)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("redop", ["sum", "product", "max"])
def test_numpy_and_torch_agree(dtype, redop):
    case = Case("all_reduce", 500, (250, 250), dtype, redop)
    for piece in (case.input(1), *case.expected(0)):
        ours = tile(piece, getattr(torch, dtype))
        theirs = arrays.tile(piece, dtype)
        bits = ours.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else ours.numpy()
        assert np.array_equal(bits, theirs)


def test_values_are_exact_in_small_dtypes():
    for redop in REDOPS:
        for ranks in (2, 8, 64):
            case = Case("all_reduce", PERIOD, (0,) * (ranks - 1) + (PERIOD,), "bfloat16", redop)
            if redop != "avg":
                assert max(map(abs, case.combined())) <= 256 and all(v == int(v) for v in case.combined())


def test_wrong_elements_are_counted():
    case = Case("all_reduce", 1000, (500, 500))
    job = Job.make(case, 0, torch.empty)
    job.fill()
    assert job.count_wrong(None) > 900  # nothing was reduced
    job.input.copy_(torch.cat([tile(piece, torch.float32) for piece in case.expected(0)]))
    assert job.count_wrong(None) == 0
    job.input[[3, 999]] += 1
    assert job.count_wrong(None) == 2
    assert job.count_wrong((job.input[:5], None)) == 1000  # a functional result of the wrong size
    peers = arrays.Arrays(case, 0)
    peers.input[:] = job.input.numpy()
    assert peers.count_wrong() == 2


def test_json_round_trip():
    case = Case("all_gather", 10, (3, 7), "int8", "max")
    assert Case.from_json(case.to_json()) == case


def test_float_names():
    assert all(getattr(torch, name).is_floating_point == (name in FLOATS) for name in ITEM_BYTES)
    assert all(getattr(torch, name).itemsize == size for name, size in ITEM_BYTES.items())
