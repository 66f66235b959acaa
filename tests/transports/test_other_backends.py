"""Transports for backends that are not installed here, on groups that stand for them; and gloo's use of memory."""

import contextlib
import sys
import threading
import types

import pytest
import torch
import torch.distributed as dist

import unisono
from tests import reference
from tests.uneven.cases import factor_of, splits_for, world
from unisono.transport import find, gloo
from unisono.transport.backend import BackendTransport
from unisono.transport.find import transport_of
from unisono.transport.lists import AscendTransport, ListsTransport

OPS = ("sum", "avg", "product", "min", "max", "premul_sum")


def composed_values(group, kind, path, name, ops, async_op):
    rank, size, complaints = group.rank, group.size, []
    with world(group, kind, path) as pg:
        transport = {
            "lists": lambda: ListsTransport(pg),
            "rooted": lambda: BackendTransport(pg, keeps_input=kind == "unisono"),
        }[name]()

        def compare(what, got, want):
            # A backend has its own order of additions, so not by bits.
            if not torch.allclose(got.double(), want.double(), rtol=1e-5, atol=1e-4):
                complaints.append(f"{what}: got {got}, want {want}")

        for seed, counts in enumerate(s for unit in (1, 1001) for s in splits_for(size, unit)):
            parts = [reference.make_input("float32", n, r, seed) for r, n in enumerate(counts)]
            whole = torch.zeros(sum(counts))
            mine = parts[rank].clone()
            work = transport.all_gather(whole, mine, counts, None, async_op)
            assert (work is not None) is async_op
            work and work.wait()
            compare(f"all_gather {counts}", whole, reference.joined(parts))
            wholes = [reference.make_input("float32", sum(counts), r, seed) for r in range(size)]
            for op in ops:
                source, part = wholes[rank].clone(), torch.zeros(counts[rank])
                factors = [factor_of(r) for r in range(size)]
                factor = factors[rank] if op == "premul_sum" else None
                work = transport.reduce_scatter(part, source, counts, op, factor, None, async_op)
                work and work.wait()
                want = reference.expected(rank, "reduce_scatter", wholes, counts, op, factors=factors)
                compare(f"reduce_scatter {op} {counts}", part, want)
                if not torch.equal(source, wholes[rank]):
                    complaints.append(f"{op} {counts}: the input was changed")
            matrix = [list(counts) for _ in range(size)]
            sources = [reference.make_input("float32", sum(counts), r, seed) for r in range(size)]
            output = torch.zeros(size * counts[rank])
            work = transport.all_to_all(output, sources[rank], [counts[rank]] * size, counts, None, async_op)
            work and work.wait()
            compare(f"all_to_all {counts}", output, reference.expected(rank, "all_to_all", sources, matrix))
        try:
            odd = [2, *[1] * (size - 2), 0] if rank == 0 else [1] * size
            transport.all_gather(torch.zeros(size), torch.zeros(odd[rank]), odd, None, False)
            complaints.append("different splits: nothing was raised")
        except unisono.MismatchError as error:
            if "<- differs" not in str(error):
                complaints.append(str(error))
        try:
            wanted = [2 if rank + r == 1 and rank == 0 else 1 for r in range(size)]  # 0 expects 2 of 1, which sends 1
            transport.all_to_all(torch.zeros(sum(wanted)), torch.zeros(size), wanted, [1] * size, None, False)
            complaints.append("an exchange that does not fit: nothing was raised")
        except unisono.MismatchError as error:
            if error.peers != (0, 1):
                complaints.append(str(error))
    return complaints


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    "kind, name, ops",
    [("unisono", "lists", OPS), ("unisono", "rooted", OPS), ("gloo", "rooted", OPS)],
)
@pytest.mark.parametrize("size", [2, 3])
def test_values_and_mismatches(pool, size, kind, name, ops, async_op, tmp_path):
    assert pool.run(composed_values, kind, str(tmp_path / "store"), name, ops, async_op) == [[]] * size


def integer_average(group, path):
    with world(group, "gloo", path) as pg:
        part = torch.zeros(1, dtype=torch.int32)
        source = torch.tensor([-3, 5], dtype=torch.int32) * (1 + group.rank)
        BackendTransport(pg, keeps_input=False).reduce_scatter(part, source, [1, 1], "avg", None, None, False)
        return part.item()


@pytest.mark.parametrize("size", [2])
def test_average_of_integers_is_cut(pool, size, tmp_path):
    assert pool.run(integer_average, str(tmp_path / "store")) == [-4, 7]


class Done(dist.Work):
    """A work that is over."""

    def wait(self, timeout=None):
        return True


class FakeBackend:
    def __init__(self, name):
        self._name = name

    def name(self):
        return self._name


class FakeGroup:
    """Enough of a process group to be asked which transport it takes."""

    group_name = "fake"
    _device_types = (torch.device("cuda"),)

    def __init__(self, name):
        self._backend = FakeBackend(name)

    def _get_backend(self, device):
        return self._backend

    def rank(self):
        return 0

    def size(self):
        return 1


@pytest.mark.parametrize(
    "name, kind, keeps_input",
    [
        ("nccl", ListsTransport, False),
        ("hccl", ListsTransport, False),
        ("mpi", BackendTransport, True),
        ("ucc", BackendTransport, True),
        ("new", BackendTransport, False),
    ],
)
def test_choice_by_name(name, kind, keeps_input):
    group = FakeGroup(name)
    chosen = transport_of(group, torch.device("cuda"))
    assert type(chosen) is kind and chosen.keeps_input is keeps_input
    assert transport_of(group, torch.device("cuda")) is chosen  # chosen once
    assert not chosen._can_compare  # no backend for CPU tensors


def test_a_choice_does_not_keep_the_group():
    group = FakeGroup("mpi")
    transport_of(group, torch.device("cuda"))
    before = len(find._known)
    del group
    assert len(find._known) == before - 1


def test_torch_npu_is_used_where_it_has_the_calls(monkeypatch):
    calls = []

    def gather(output, input, output_split_sizes=None, group=None, async_op=False):
        calls.append(("gather", output_split_sizes, group, async_op))
        output.copy_(input)
        return Done()

    def reduce(output, input, input_split_sizes=None, op=dist.ReduceOp.SUM, group=None, async_op=False):
        calls.append(("reduce", input_split_sizes, op, group, async_op))
        output.copy_(input)
        return Done()

    fake = types.ModuleType("torch_npu")
    fake.distributed = types.SimpleNamespace(all_gather_into_tensor_uneven=gather)
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    npu = torch.device("cuda")  # a torch without torch_npu has no npu
    assert type(transport_of(FakeGroup("hccl"), npu)) is ListsTransport  # an older torch_npu, with one of the two calls
    fake.distributed.reduce_scatter_tensor_uneven = reduce
    group = FakeGroup("hccl")
    chosen = transport_of(group, npu)
    assert type(chosen) is AscendTransport
    source, output = torch.ones(3), torch.zeros(3)
    assert chosen.all_gather(output, source, [3], None, False) is None
    assert output.tolist() == [1.0] * 3
    assert chosen.reduce_scatter(output, source, [3], "max", None, None, True).result() is output
    assert calls == [("gather", [3], group, False), ("reduce", [3], dist.ReduceOp.MAX, group, True)]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Peak:
    """The most memory in use while this is open, looked at all the time from a thread."""

    def __enter__(self):
        self.start = self.most = resident_bytes()
        self.over = False
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self):
        while not self.over:
            self.most = max(self.most, resident_bytes())

    def __exit__(self, *exc):
        self.over = True
        self.thread.join()

    @property
    def extra(self):
        return self.most - self.start


def leave_early(group, path):
    """Rank 0 has left before the others look at what it sent."""
    size, rank = group.size, group.rank
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    splits = [3 + r for r in range(size)]
    part, wholes, works = torch.full((splits[rank],), 1.0 + rank), [torch.zeros(sum(splits)) for _ in range(3)], []
    for whole in wholes:
        works.append(unisono.all_gather_into_tensor_uneven(whole, part, splits, async_op=True))
        if rank == 0:
            works[-1].wait()
    if rank == 0:
        dist.destroy_process_group()
    group.barrier()
    if rank != 0:
        for work in works:
            work.wait()
        dist.destroy_process_group()
    want = torch.cat([torch.full((n,), 1.0 + r) for r, n in enumerate(splits)])
    return all(torch.equal(whole, want) for whole in wholes)


@pytest.mark.parametrize("size", [2, 3])
def test_leaving_early_on_gloo(pool, size, tmp_path):
    assert pool.run(leave_early, str(tmp_path / "store")) == [True] * size


@contextlib.contextmanager
def short_headers():
    """Everything that does not fit into 512 bytes goes beside the headers, in small pieces."""
    small = {"_HEADERS_BYTES": 512, "_GATHER_BYTES": 512, "_LEAST_HEADER": 512, "_LEAST_SCRATCH": 512}
    before = {name: getattr(gloo, name) for name in small}
    try:
        for name, value in small.items():
            setattr(gloo, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(gloo, name, value)


def many_under_way(group, path):
    """The last rank comes when the others have 300 calls under way, more than any small counter can tell apart."""
    size, rank, wrong = group.size, group.rank, []
    with short_headers(), world(group, "gloo", path):
        count = 900  # some pieces each
        parts, works = [], []
        if rank == size - 1:
            group.barrier()
        for call in range(300):
            part = torch.zeros(count)
            whole = torch.full((count * size,), float(call * (rank + 1)))
            works.append(unisono.reduce_scatter_tensor_uneven(part, whole, [count] * size, async_op=True))
            parts.append(part)
        if rank != size - 1:
            group.barrier()
        for call, (work, part) in enumerate(zip(works, parts, strict=True)):
            work.wait()
            if not torch.equal(part, torch.full((count,), float(call * sum(range(size + 1))))):
                wrong.append(call)
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_many_calls_under_way_on_gloo(pool, size, tmp_path):
    assert pool.run(many_under_way, str(tmp_path / "store")) == [[]] * size


def disagree_and_go_on(group, path):
    """What was given up when ranks disagreed is never met again, however many calls later."""
    size, rank, errors = group.size, group.rank, 0
    with short_headers(), world(group, "gloo", path):
        even, odd = [900] * size, [901, *[900] * (size - 2), 899]
        for call in range(300):
            splits = odd if rank == 0 and call == 3 else even
            whole, part = torch.zeros(sum(splits)), torch.full((splits[rank],), float(call))
            try:
                unisono.all_gather_into_tensor_uneven(whole, part, splits)
                assert torch.equal(whole, torch.full_like(whole, float(call))), call
            except unisono.MismatchError:
                errors += 1
    return errors


@pytest.mark.parametrize("size", [2, 3])
def test_going_on_after_a_mismatch_on_gloo(pool, size, tmp_path):
    assert pool.run(disagree_and_go_on, str(tmp_path / "store")) == [1] * size


def on_gloo(group, path):
    found = []
    with world(group, "gloo", path):
        part, whole = torch.full((1, 2), 1.0 + group.rank), torch.zeros(group.size, 2)
        with torch.device("meta"):  # the tensors are not there, and neither may ours be
            work = unisono.all_gather_into_tensor_uneven(whole, part, [1] * group.size, async_op=True)
            work.wait()
            unisono.reduce_scatter_tensor_uneven(*(torch.zeros(n, device="cpu") for n in (2_000_000, 4_000_000)))
        found.append(whole.tolist())
        found.append(work.result()[0] is whole and work.get_future().wait()[0] is whole)
        conj, out = torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(4, dtype=torch.complex64)
        for call in (
            lambda: unisono.all_gather_into_tensor_uneven(out, conj),
            lambda: unisono.reduce_scatter_tensor_uneven(out[:1], conj),
        ):
            try:
                call()
            except ValueError as error:
                found.append(str(error).splitlines()[0])
    return found


@pytest.mark.parametrize("size", [2])
def test_what_gloo_would_not_notice(pool, size, tmp_path):
    for whole, same, gathered, reduced in pool.run(on_gloo, str(tmp_path / "store")):
        assert whole == [[1.0, 1.0], [2.0, 2.0]] and same
        assert "lazily conjugated" in gathered and "lazily conjugated" in reduced


def extra_memory(group, path):
    size, rank = group.size, group.rank
    with world(group, "gloo", path):
        splits = [1 << 20] * size
        splits[-1] = 6 << 20  # 24 MiB on the last rank, 4 MiB on the others
        whole, part = torch.ones(sum(splits)), torch.zeros(splits[rank])
        for _ in range(2):  # sockets and threads get what they keep
            unisono.reduce_scatter_tensor_uneven(part, whole, splits)
            unisono.all_gather_into_tensor_uneven(whole, part, splits)
        found = []
        for verb in ("reduce", "gather"):
            dist.barrier()
            with Peak() as peak:
                if verb == "reduce":
                    unisono.reduce_scatter_tensor_uneven(part, whole, splits)
                else:
                    unisono.all_gather_into_tensor_uneven(whole, part, splits)
            found.append((peak.extra, part.nbytes))
        return found


@pytest.mark.parametrize("size", [2, 3])
def test_memory_on_gloo(pool, size, tmp_path):
    """A reduce-scatter takes no more than its output again, an all-gather nothing to speak of."""
    slack = 2 << 20  # the interpreter's and the allocator's own
    for (reducing, output_bytes), (gathering, _) in pool.run(extra_memory, str(tmp_path / "store")):
        assert reducing <= output_bytes + slack
        assert gathering <= slack
