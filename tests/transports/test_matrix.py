"""Verbs × transports × (values, asynchronous, mismatch, bad input). A new transport is tested by a line in TRANSPORTS.

Ranks make all ranks' inputs themselves and know what they must get (tests/reference.py). Sums of other backends have
their own order, so reductions there are compared with a tolerance; on the core and on gloo's composition by bits.
"""

import contextlib

import numpy as np
import pytest
import torch

import unisono
from tests import reference
from tests.uneven.cases import factor_of, world
from unisono import comm_func
from unisono.base import ops
from unisono.transport import find
from unisono.transport.backend import BackendTransport
from unisono.transport.lists import ListsTransport

# Name -> the kind of group it runs on, and how it is made on one; None: it is what that group has anyway.
TRANSPORTS = {
    "core": ("group", None),
    "core of a process group": ("unisono", None),
    "hosts": ("hosts", None),
    "gloo": ("gloo", None),
    "lists": ("unisono", ListsTransport),  # as on nccl: a backend whose list forms take unequal tensors
    "rooted": ("gloo", lambda pg: BackendTransport(pg, keeps_input=False)),
}
OURS = ("core", "core of a process group", "hosts")
# Those that public functions find; "lists" stands on a group of ours, which has the core.
FOUND = [name for name in TRANSPORTS if name != "lists"]
EXACT = ("gloo", "lists")  # whose reduce-scatter sums in our order
# What a backend does by itself, with its own idea of ranks that disagree.
BACKENDS_OWN = ("all_reduce", "reduce", "broadcast", "gather", "scatter", "matmul_reduce")


@contextlib.contextmanager
def transport_named(group, name, path):
    """The transport, and the group that public functions find it by."""
    kind, make = TRANSPORTS[name]
    with world(group, kind, path) as where:
        if make is None:
            yield find.find(where, torch.empty(0)), where
            return
        transport = make(where)
        if name in FOUND:
            find._known[where] = {"cpu": transport}
        yield transport, where


class Run:
    """One verb on one transport with inputs of one seed: makes the call, keeps what it got and what it wants."""

    def __init__(self, transport, seed, async_op):
        self.t, self.seed, self.async_op = transport, seed, async_op
        self.rank, self.size = transport.rank, transport.size
        self.root = seed % self.size
        self.unit = (1, 1001, 40_000)[seed % 3]
        self.counts = [(r * 7 + seed) % 3 * self.unit for r in range(self.size)]
        self.op = ("sum", "avg", "min", "max", "product", "premul_sum")[seed % 6]
        self.factors = [factor_of(r) for r in range(self.size)]
        self.factor = self.factors[self.rank] if self.op == "premul_sum" else None

    def inputs(self, *counts):
        return [reference.make_input("float32", n, r, self.seed) for r, n in enumerate(counts)]

    def all_reduce(self):
        parts = self.inputs(*[self.unit] * self.size)
        out = torch.zeros(self.unit)
        handle = self.t.all_reduce(parts[self.rank], out, self.op, self.factor, None, self.async_op)
        return handle, out, reference.reduced(parts, self.op, self.factors)

    def reduce(self):
        parts = self.inputs(*[self.unit] * self.size)
        mine = parts[self.rank].clone()
        handle = self.t.reduce(mine, self.root, None, self.op, self.factor, None, self.async_op)
        want = reference.reduced(parts, self.op, self.factors) if self.rank == self.root else parts[self.rank]
        return handle, mine, want

    def broadcast(self):
        parts = self.inputs(*[self.unit] * self.size)
        mine = parts[self.rank].clone()
        return self.t.broadcast(mine, self.root, None, None, self.async_op), mine, parts[self.root]

    def all_gather(self, counts=None):
        counts = self.counts if counts is None else counts
        parts, out = self.inputs(*counts), torch.zeros(sum(counts))
        equal = None if counts is not self.counts else counts
        return self.t.all_gather(out, parts[self.rank], equal, None, self.async_op), out, reference.joined(parts)

    def all_gather_equal(self):
        return self.all_gather([self.unit] * self.size)

    def reduce_scatter(self):
        wholes, out = self.inputs(*[sum(self.counts)] * self.size), torch.zeros(self.counts[self.rank])
        mine = wholes[self.rank].clone()
        handle = self.t.reduce_scatter(out, mine, self.counts, self.op, self.factor, None, self.async_op)
        want = reference.expected(self.rank, "reduce_scatter", wholes, self.counts, self.op, factors=self.factors)
        return handle, out, want

    def gather(self):
        parts, out = self.inputs(*self.counts), torch.zeros(sum(self.counts))
        here = self.rank == self.root
        handle = self.t.gather(out if here else None, parts[self.rank], self.root, self.counts, None, self.async_op)
        return handle, out, reference.joined(parts) if here else torch.zeros_like(out)

    def scatter(self):
        wholes, out = self.inputs(*[sum(self.counts)] * self.size), torch.zeros(self.counts[self.rank])
        mine = wholes[self.rank] if self.rank == self.root else None
        handle = self.t.scatter(out, mine, self.root, self.counts, None, self.async_op)
        return handle, out, wholes[self.root][reference.span(self.counts, self.rank)]

    def all_to_all(self):
        matrix = [[(i + 2 * j + self.seed) % 3 * self.unit for j in range(self.size)] for i in range(self.size)]
        sources = self.inputs(*[sum(row) for row in matrix])
        received = [row[self.rank] for row in matrix]
        out = torch.zeros(sum(received))
        handle = self.t.all_to_all(out, sources[self.rank], received, matrix[self.rank], None, self.async_op)
        return handle, out, reference.expected(self.rank, "all_to_all", sources, matrix)

    def send_recv(self):
        parts = self.inputs(*[self.unit] * self.size)
        out = torch.zeros(self.unit)
        sent = self.t.send(parts[self.rank], (self.rank + 1) % self.size, 5, None, True)
        handle = self.t.recv(out, (self.rank - 1) % self.size, 5, None, True)
        sent.wait()
        if not self.async_op:
            handle = handle.wait()
        return handle, out, parts[self.rank - 1]

    def matmul_reduce(self):
        parts = self.inputs(*[self.unit] * self.size)
        new = self.t.new_rows(torch.empty(0), self.unit)
        products = self.t.new_rows(torch.empty(0), self.unit).copy_(parts[self.rank])
        residual = self.t.new_rows(torch.empty(0), self.unit).fill_(1.0)
        handle = self.t.matmul_reduce(products, new, "sum", 0.5, residual, None, 7, lambda: "a test", None)
        return handle, new, reference.reduced(parts, "sum") * 0.5 + 1.0


VERBS = [name for name in vars(Run) if not name.startswith("_") and name != "inputs"]


def values(group, name, path, verb, async_op):
    complaints = []
    with transport_named(group, name, path) as (transport, _):
        for seed in range(12):
            run = Run(transport, seed, async_op)
            handle, got, want = getattr(run, verb)()
            if async_op and verb != "matmul_reduce":
                assert isinstance(handle, unisono.Handle), handle
                assert handle.result() is (None if verb == "gather" and run.rank != run.root else got)
                assert handle.is_completed() and handle.exception() is None
            elif handle is not None:
                handle.wait()
            exact = name in OURS or verb.startswith("all_gather") or (name in EXACT and verb == "reduce_scatter")
            same = reference.difference(got, want) is None if exact else torch.allclose(got, want, 1e-5, 1e-4)
            if not same:
                complaints.append(f"{verb} seed {seed}: got {got[:4]}, want {want[:4]}")
    return complaints


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("size", [3])
def test_values(pool, size, name, verb, async_op, tmp_path):
    assert pool.run(values, name, str(tmp_path / "store"), verb, async_op) == [[]] * size


# -- ranks that disagree: rank 0 asks for something else, all of them raise, and the next call goes well

DISAGREE = {
    "all_reduce": lambda t, odd: t.all_reduce(torch.ones(5), None, "max" if odd else "sum", None, None, False),
    "reduce": lambda t, odd: t.reduce(torch.ones(5), 1 if odd else 0, None, "sum", None, None, False),
    "broadcast": lambda t, odd: t.broadcast(torch.ones(6 if odd else 5), 0, None, None, False),
    "all_gather": lambda t, odd: _gather(t, [2, *[1] * (t.size - 2), 0] if odd else [1] * t.size),
    "all_gather equal": lambda t, odd: t.all_gather(
        torch.zeros((1 + odd) * t.size), torch.ones(1 + odd), None, None, False
    ),
    "reduce_scatter": lambda t, odd: t.reduce_scatter(
        torch.zeros(1), torch.ones(t.size), [1] * t.size, "min" if odd else "sum", None, None, False
    ),
    "gather": lambda t, odd: (
        t.gather(torch.zeros(t.size), torch.ones(1), 0, [1] * t.size, None, False)
        if not odd
        else t.gather(torch.zeros(t.size), torch.ones(1), 1, [1] * t.size, None, False)
    ),
    "scatter": lambda t, odd: t.scatter(torch.zeros(1), torch.ones(t.size), 1 if odd else 0, [1] * t.size, None, False),
    "all_to_all": lambda t, odd: t.all_to_all(
        torch.zeros(t.size + odd), torch.ones(t.size), [1, 1 + odd, *[1] * (t.size - 2)], [1] * t.size, None, False
    ),
    "matmul_reduce": lambda t, odd: _multiply(t, 1 + odd),
}


def _multiply(t, hash):
    products, output = t.new_rows(torch.empty(0), 4), t.new_rows(torch.empty(0), 4)
    handle = t.matmul_reduce(products, output, "sum", 1.0, None, None, hash, str, None)
    if handle is not None:  # it goes on in the background
        handle.wait()


def _gather(t, counts):
    t.all_gather(torch.zeros(t.size), torch.ones(counts[t.rank]), counts, None, False)


def disagree(group, name, path, verb):
    with transport_named(group, name, path) as (transport, _):
        said = []
        for odd in (True, False):
            try:
                DISAGREE[verb](transport, odd and transport.rank == 0)
                said.append("")
            except unisono.MismatchError as error:
                said.append(f"{'<- differs' in str(error)} {bool(error.peers)}")
        return said


@pytest.mark.parametrize(
    "name, verb", [(n, v) for n in TRANSPORTS for v in DISAGREE if n in OURS or v not in BACKENDS_OWN]
)
@pytest.mark.parametrize("size", [3])
def test_disagreeing_ranks(pool, size, name, verb, tmp_path):
    assert pool.run(disagree, name, str(tmp_path / "store"), verb) == [["True True", ""]] * size


# -- bad input: refused by the adapters before anything moves, whatever the transport, and the next call goes well

BAD = {
    "gather: dtype": lambda g, n: unisono.all_gather_into_tensor_uneven(
        torch.zeros(n), torch.zeros(1).double(), None, g
    ),
    "gather: splits": lambda g, n: unisono.all_gather_into_tensor_uneven(torch.zeros(n), torch.zeros(1), [9] * n, g),
    "gather: overlap": lambda g, n: _overlapping(g, n),
    "gather: gaps": lambda g, n: unisono.all_gather_into_tensor_uneven(
        torch.zeros(n, 2)[:, 0], torch.zeros(1), group=g
    ),
    "scatter: size": lambda g, n: unisono.reduce_scatter_tensor_uneven(torch.zeros(2), torch.zeros(n), None, group=g),
    "scatter: avg of bool": lambda g, n: unisono.reduce_scatter_tensor_uneven(
        torch.zeros(1, dtype=torch.bool), torch.zeros(n, dtype=torch.bool), None, "avg", g
    ),
    "scatter: op": lambda g, n: unisono.reduce_scatter_tensor_uneven(torch.zeros(1), torch.zeros(n), None, "sun", g),
    "exchange: matrix": lambda g, n: unisono.all_to_all_vc(torch.zeros(n), torch.zeros(n), [[1]], g),
    "exchange: count": lambda g, n: unisono.all_to_all_vc(torch.zeros(n + 1), torch.zeros(n), [[1] * n] * n, g),
    "comm_func: avg of bool": lambda g, n: comm_func.all_reduce(torch.zeros(1, dtype=torch.bool), "avg", g),
    "comm_func: op": lambda g, n: comm_func.all_reduce(torch.zeros(1), "sun", g),
    "comm_func: no tensor": lambda g, n: comm_func.all_gather_into_tensor([1.0], g),
    "comm_func: rows": lambda g, n: comm_func.reduce_scatter_tensor(torch.zeros(n + 1), "sum", g),
    "comm_func: splits": lambda g, n: comm_func.all_gather_into_tensor_uneven(torch.zeros(1), [1] * (n + 1), g),
    "comm_func: root": lambda g, n: comm_func.broadcast(torch.zeros(1), 99, g),
    "comm_func: exchange of dtypes": lambda g, n: comm_func.all_to_all_v_c(
        torch.zeros(n).half(), torch.zeros(n), [1] * n * n, g
    ),
    "comm_func: exchange into gaps": lambda g, n: comm_func.all_to_all_v_c(
        torch.zeros(2 * n)[::2], torch.zeros(n), [1] * n * n, g
    ),
    "comm_func: exchange in place": lambda g, n: _exchange_in_place(g, n),
    "comm_func: matrix": lambda g, n: comm_func.all_to_all_v_c(torch.zeros(n), torch.zeros(n), [1] * n, g),
    "fused: shapes": lambda g, n: unisono.matmul_all_reduce(torch.zeros(2, 3), torch.zeros(2, 3), g),
    "fused: splits": lambda g, n: unisono.matmul_reduce_scatter(torch.ones(2, 3), torch.ones(3, 2), g, split_sizes=[5]),
}


def _exchange_in_place(g, n):
    both = torch.zeros(n + 1)
    comm_func.all_to_all_v_c(both[1:], both[:-1], [1] * n * n, g)


def _overlapping(g, n):
    whole = torch.zeros(n, 4)
    rows = whole.view(-1)[2:6].view(1, 4)
    unisono.all_gather_into_tensor_uneven(whole, rows, None, g)


def refuse(group, name, path):
    complaints = []
    with transport_named(group, name, path) as (_, where):
        for what, call in BAD.items():
            try:
                call(where, group.size)
                complaints.append(f"{what}: nothing was raised")
            except (TypeError, ValueError, RuntimeError) as error:
                if isinstance(error, unisono.UnisonoError):
                    complaints.append(f"{what}: {error!r}")
            got = comm_func.all_gather_into_tensor(torch.tensor([float(group.rank)]), where)[0].tolist()
            if got != [float(r) for r in range(group.size)]:
                complaints.append(f"{what}: the next call gave {got}")
    return complaints


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("size", [2, 3])
def test_bad_input(pool, size, name, tmp_path):
    assert pool.run(refuse, name, str(tmp_path / "store")) == [[]] * size


def test_every_verb_is_in_the_matrix():
    from unisono.transport.protocol import Transport

    facts = {"rank", "size", "cache_bytes", "by_tree"}
    verbs = {name for name in vars(Transport) if not name.startswith(("_", "new_"))} - facts
    covered = {"send", "recv", "barrier"} | {verb.removesuffix("_equal") for verb in VERBS}
    assert verbs == covered - {"send_recv"}
    assert set(ops.NUMBERS) == set(reference.OPS)


# -- what must not depend on how a rank came to its call


def mixed_ways(group, name, path):
    """Only one rank's input requires grad, so only that one goes through an operator; splits are numpy's."""
    with transport_named(group, name, path) as (_, where):
        mine = torch.full((2,), 1.0 + group.rank, requires_grad=group.rank == 0)
        gathered = comm_func.all_gather_into_tensor(mine, where)[0].tolist()
        rows = np.arange(1, 1 + group.size)
        sent = torch.full((int(rows.sum()),), 1.0 + group.rank)
        expected = [group.rank + 1] * group.size
        received = comm_func.all_to_all_single_with_output_shape((sum(expected),), sent, expected, rows, where)[0]
        return gathered, received.tolist()


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("size", [2])
def test_mixed_ways(pool, size, name, tmp_path):
    for rank, (gathered, received) in enumerate(pool.run(mixed_ways, name, str(tmp_path / "store"))):
        assert gathered == [1.0, 1.0, 2.0, 2.0]
        assert received == [1.0] * (rank + 1) + [2.0] * (rank + 1)


def one_way(group, name, path):
    """What rank 1 sends rank 0 does not fit, what rank 0 sends rank 1 does: both raise, and the group stays usable."""
    n, said = 300_000, []
    with transport_named(group, name, path) as (_, where):
        for _ in range(12):
            matrix = [[n] * group.size for _ in range(group.size)]
            if group.rank == 1:
                matrix[1][0] += 100_000
            received = torch.zeros(sum(row[group.rank] for row in matrix))
            try:
                unisono.all_to_all_vc(received, torch.ones(sum(matrix[group.rank])), matrix, where)
                said.append("nothing was raised")
            except unisono.MismatchError:
                said.append("")
            got = torch.zeros(group.size * n)
            unisono.all_to_all_vc(got, torch.full_like(got, 1.0 + group.rank), [[n] * group.size] * group.size, where)
            said.append("" if got[0] == 1.0 and got[-1] == group.size else f"then got {got}")
    return set(said)


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("size", [2, 3])
def test_an_exchange_that_fits_one_way_only(pool, size, name, tmp_path):
    assert pool.run(one_way, name, str(tmp_path / "store")) == [{""}] * size
