"""Values over pretended hosts: every verb, dtype and operation, small and large; the same bits everywhere."""

from unittest import mock

import pytest
import torch

import unisono
from tests import reference
from tests.multihost.pretended import LAYOUTS, over_hosts
from tests.transports.test_matrix import VERBS, Run
from unisono.transport.hosts import bulk

PIECES = 700_000  # floats: several pieces for each lane
PIECE = 256 << 10  # bytes: more of them than scratch memory has turns


def verbs(group, hosts, async_op):
    complaints = []
    with over_hosts(group, hosts) as over:
        for verb in VERBS:
            for seed in range(6):
                handle, got, want = getattr(Run(over.transport, seed, async_op), verb)()
                if handle is not None and not isinstance(handle, int):
                    handle.wait()
                exact = hosts == LAYOUTS["2+2"] or "reduce" not in verb
                if not (reference.difference(got, want) is None if exact else torch.allclose(got, want, 1e-5, 1e-4)):
                    complaints.append(f"{verb} seed {seed}: got {got[:4]}, want {want[:4]}")
    return complaints


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [4])
def test_verbs(pool, size, layout, async_op):
    assert pool.run(verbs, LAYOUTS[layout], async_op) == [[]] * size


def pieces(group, hosts):
    """Tensors of several pieces per lane, uneven, with ranks that have nothing."""
    complaints, size = [], group.size
    with mock.patch.multiple(bulk, _LEAST_PIECE=PIECE, _LARGEST_PIECE=PIECE), over_hosts(group, hosts) as over:
        for counts in ([PIECES] * 4, [0, 3 * PIECES, 5, PIECES + 1], [4 * PIECES, 0, 0, 0]):
            whole = torch.arange(sum(counts)).remainder(10_007).float()  # sums are exact
            span = reference.span(counts, over.rank)
            output = torch.zeros_like(whole)
            over.all_gather(output, whole[span].clone(), counts)
            if not torch.equal(output, whole):
                complaints.append(f"all_gather {counts}")
            mine = torch.zeros(counts[over.rank])
            over.reduce_scatter(mine, whole * (over.rank + 1), counts)
            if not torch.equal(mine, whole[span] * 10):
                complaints.append(f"reduce_scatter {counts}")
            matrix = [[counts[(i + j) % size] // 4 for j in range(size)] for i in range(size)]
            source = torch.full((sum(matrix[over.rank]),), float(over.rank))
            received = [row[over.rank] for row in matrix]
            got = torch.zeros(sum(received))
            over.all_to_all(got, source, received, matrix[over.rank])
            if not torch.equal(got, torch.cat([torch.full((n,), float(r)) for r, n in enumerate(received)])):
                complaints.append(f"all_to_all {counts}")
        for root in range(size):
            tensor = whole.clone() if over.rank == root else torch.zeros_like(whole)
            over.broadcast(tensor, root)
            if not torch.equal(tensor, whole):
                complaints.append(f"broadcast from {root}")
        tensor = whole * (over.rank + 1)
        over.all_reduce(tensor)
        if not torch.equal(tensor, whole * 10):
            complaints.append("all_reduce")
    return complaints


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [4])
def test_many_pieces(pool, size, layout):
    assert pool.run(pieces, LAYOUTS[layout]) == [[]] * size


def reductions(group, hosts):
    """Every dtype and op: right, and the same bits on all ranks and for all sizes."""
    complaints = []
    with over_hosts(group, hosts) as over:
        for name, op in reference.REDUCTIONS:
            n = 70_000
            inputs = [reference.make_input(name, n, r, 3) for r in range(over.size)]
            factor = 0.5 + 0.25 * over.rank if op == "premul_sum" else None
            large, small = inputs[over.rank].clone(), inputs[over.rank][:500].clone()
            over.all_reduce(large, op, factor=factor)
            over.all_reduce(small, op, factor=factor)
            if reference.difference(small, large[:500]) is not None:
                complaints.append(f"{name} {op}: a small call gives other bits")
            in_pieces, most = inputs[over.rank].clone(), over.transport.small_bytes
            over.transport.small_bytes = 0  # on two hosts the others were one message
            over.all_reduce(in_pieces, op, factor=factor)
            over.transport.small_bytes = most
            if reference.difference(in_pieces, large) is not None:
                complaints.append(f"{name} {op}: pieces give other bits")
            every = torch.empty(over.size, large.nbytes, dtype=torch.uint8)
            over.all_gather(every, large.view(torch.uint8))
            if not all(torch.equal(row, every[0]) for row in every):
                complaints.append(f"{name} {op}: ranks differ")
            want = reference.reduced(inputs, op, [0.5 + 0.25 * r for r in range(over.size)])
            halves = name in ("float16", "bfloat16")
            if hosts == LAYOUTS["2+2"] and not halves and reference.difference(large, want) is not None:
                complaints.append(f"{name} {op}: not the bits of one host")
            finite = torch.isfinite(want.to(torch.complex128) if want.is_complex() else want.double())
            if halves and op in ("sum", "avg"):
                close = torch.isclose(large.float(), want.float(), rtol=0.02, atol=0.3) | ~finite
                if not close.all():
                    complaints.append(f"{name} {op}: far from the sum")
    return complaints


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [4])
def test_reductions(pool, size, layout):
    assert pool.run(reductions, LAYOUTS[layout]) == [[]] * size


def with_float32(group, hosts):
    """16-bit sums with float32 partials: the bits of one host."""
    from unisono.base import settings

    settings.hosts_fp32 = True
    complaints = []
    try:
        with over_hosts(group, LAYOUTS[hosts]) as over:
            for name in ("float16", "bfloat16"):
                for op in ("sum", "avg", "premul_sum"):
                    for n, most in ((500, 1 << 20), (70_000, 1 << 20), (70_000, 0)):
                        over.transport.small_bytes = most
                        inputs = [reference.make_input(name, n, r, 5) for r in range(over.size)]
                        factors = [0.5 + 0.25 * r for r in range(over.size)]
                        tensor = inputs[over.rank].clone()
                        over.all_reduce(tensor, op, factor=factors[over.rank] if op == "premul_sum" else None)
                        if reference.difference(tensor, reference.reduced(inputs, op, factors)) is not None:
                            complaints.append(f"{name} {op} {n}")
    finally:
        settings.hosts_fp32 = False
    return complaints


@pytest.mark.parametrize("hosts", ["2+2", "4 hosts"])
@pytest.mark.parametrize("size", [4])
def test_float32_partials(pool, size, hosts):
    assert pool.run(with_float32, hosts) == [[]] * size


def messages(group, hosts):
    complaints = []
    with over_hosts(group, hosts) as over:
        me, size = over.rank, over.size
        for n in (3, 100_000):
            handles, tensors = [], {}
            for r in range(size):
                if r != me:
                    tensors[r] = torch.zeros(n)
                    handles.append(over.recv(tensors[r], r, 7, async_op=True))
                    handles.append(over.send(torch.full((n,), float(10 * me + r)), r, 7, async_op=True))
            for handle in handles:
                handle.wait()
            complaints += [f"{n} from {r}" for r, t in tensors.items() if not torch.all(t == 10 * r + me)]
            over.barrier()
            if me == 0:  # from anyone, inside and between hosts, two of each
                seen = []
                for _ in range(2 * (size - 1)):
                    tensor = torch.zeros(n)
                    source = over.recv(tensor, None, 8)
                    seen.append((source, tensor[-1].item()))
                want = sorted((r, float(r) + k) for r in range(1, size) for k in (0, 100))
                in_order = all([v for s, v in seen if s == r] == [r, r + 100.0] for r in range(1, size))
                if sorted(seen) != want or not in_order:
                    complaints.append(f"from anyone: {seen}")
            else:
                for k in (0, 100):
                    over.send(torch.full((n,), float(me + k)), 0, 8)
            over.barrier()
            if me == 0:
                with pytest.raises(unisono.MismatchError, match="expected"):
                    over.recv(torch.zeros(n + 1), size - 1, 9)
            if me == size - 1:
                over.send(torch.zeros(2), 0, 9)
            over.barrier()
    return complaints


@pytest.mark.parametrize("layout", ["2+2", "interleaved", "1+3"])
@pytest.mark.parametrize("size", [4])
def test_messages(pool, size, layout):
    assert pool.run(messages, LAYOUTS[layout]) == [[]] * size


def splits(group, hosts):
    """Groups inside a host have no other host to ask; groups across have."""
    said = []
    with over_hosts(group, hosts) as over:
        for lists in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0, 1], None]):
            wanted = next((x for x in lists if x is not None and over.rank in x), None)
            child = over.split(wanted)
            if child is not None:
                tensor = torch.full((50_000,), float(over.rank))
                child.all_reduce(tensor)
                assert wanted is not None
                said.append((type(child.transport).__name__, tensor[0].item() == sum(wanted), child.ranks == wanted))
                child.close()
    return said


@pytest.mark.parametrize("size", [4])
def test_splits(pool, size):
    for rank, said in enumerate(pool.run(splits, LAYOUTS["2+2"])):
        across = [("HostsTransport", True, True)] if rank != 2 else []
        assert said == [("Communicator", True, True), ("HostsTransport", True, True), *across]


def shared_gather(group):
    with over_hosts(group, LAYOUTS["2+2"]) as over:
        try:
            unisono.SharedGather(over, [1] * over.size)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("size", [4])
def test_memory_is_not_shared_over_hosts(pool, size):
    assert all("several hosts" in said for said in pool.run(shared_gather))


def many_messages(group, hosts):
    """More at once than there are slots, read in another order, with tags that no engine could carry."""
    complaints, far = [], 1 << 40
    with over_hosts(group, hosts) as over:
        me, count, n = over.rank, 2100, 20_000
        if me == 0:
            for i in range(count):
                over.send(torch.tensor([i]), 3, far)
            over.send(torch.tensor([-1]), 3, far + 1)
            large = [over.send(torch.full((n,), float(i)), 3, i, async_op=True) for i in range(40)]
            for handle in large:
                handle.wait()
        if me == 3:
            got, tensor = torch.zeros(1, dtype=torch.int64), torch.zeros(n)
            over.recv(got, 0, far + 1)
            complaints += ["the last first"] if got.item() != -1 else []
            for i in reversed(range(40)):
                over.recv(tensor, 0, i)
                complaints += [f"large {i}"] if not torch.all(tensor == i) else []
            for i in range(count):
                over.recv(got, 0, far)
                complaints += [f"{i} was {got.item()}"] if got.item() != i else []
    return complaints


@pytest.mark.parametrize("size", [4])
def test_many_messages(pool, size):
    assert pool.run(many_messages, LAYOUTS["2+2"]) == [[]] * size
