"""send, recv, isend, irecv, batch_isend_irecv: values, tags, any source, to itself, in groups of some ranks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import reference
from tests.reference import MOVABLE
from tests.torch_backend import world
from unisono.torch_backend.adapter import ProcessGroupAdapter

SIZES = (0, 1, 7, 1021, 16_385, 300_001)


def _message(dtype, count, source, dest, seed=0):
    return reference.make_input(dtype, count, 8 * source + dest, seed)


def _blank(t):
    return torch.full((t.numel() * t.element_size(),), 0x5A, dtype=torch.uint8).view(t.dtype)


def _ring(group_name, blocking):
    """Every rank sends to the next and receives from the one before, all dtypes and sizes."""
    members = world.groups[group_name]
    if members.group is None:
        return []
    size, rank = len(members.ranks), members.rank
    to, source = (rank + 1) % size, (rank - 1) % size
    complaints = []
    for seed, (dtype, count) in enumerate([(d, 33) for d in MOVABLE] + [("float32", n) for n in SIZES]):
        sent = _message(dtype, count, rank, to, seed)
        want = _message(dtype, count, source, rank, seed)
        got = _blank(want)
        by_group_rank = seed % 2
        dst = {"group_dst": to} if by_group_rank else {"dst": members.ranks[to]}
        src = {"group_src": source} if by_group_rank else {"src": members.ranks[source]}
        before = sent.clone()
        if blocking and rank == 0:
            dist.send(sent, group=members.group, **dst)
            answer = dist.recv(got, group=members.group, **src)
        elif blocking:
            answer = dist.recv(got, group=members.group, **src)
            dist.send(sent, group=members.group, **dst)
        else:
            works = [dist.irecv(got, group=members.group, **src), dist.isend(sent, group=members.group, **dst)]
            for work in works:
                work.wait()
            answer = members.ranks[source]
        if answer != members.ranks[source]:
            complaints.append(f"recv of {dtype} × {count} returned {answer}, want {members.ranks[source]}")
        for label, a, b in (("received", got, want), ("sent", sent, before)):
            found = reference.difference(a, b)
            if found:
                complaints.append(f"{dtype} × {count} {label} in {group_name}: {found}")
    return complaints


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("blocking", [True, False], ids=["send", "isend"])
def test_ring(ranks, size, blocking):
    for name, members in world.layouts(size).items():
        if len(members) > 1:
            ranks.check(_ring, name, blocking)


def _tags():
    """Messages are taken by tag, in any order; those of one tag in the order sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % size, (rank - 1) % size
    tags = [0, 5, 1 << 20, 5, 0]
    sends = [dist.isend(torch.tensor([rank, tag, i]), to, tag=tag) for i, tag in enumerate(tags)]
    got = []
    for tag in (1 << 20, 0, 5, 5, 0):
        t = torch.zeros(3, dtype=torch.int64)
        dist.recv(t, source, tag=tag)
        got.append(t.tolist())
    for work in sends:
        work.wait()
    want = [[source, tag, i] for tag, i in ((1 << 20, 2), (0, 0), (5, 1), (5, 3), (0, 4))]
    return [] if got == want else [f"got {got}, want {want}"]


@pytest.mark.parametrize("size", [2, 3])
def test_tags(ranks, size):
    ranks.check(_tags)


def _tags_in_flight():
    """Receives are posted first, in the reverse order of the sends."""
    rank, size = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % size, (rank - 1) % size
    outputs = {tag: torch.zeros(1000) for tag in range(6)}
    receives = [dist.irecv(outputs[tag], source, tag=tag) for tag in reversed(range(6))]
    sends = [dist.isend(torch.full((1000,), 10.0 * rank + tag), to, tag=tag) for tag in range(6)]
    for work in receives + sends:
        work.wait()
    return [
        f"tag {tag}: {t[0]}..{t[-1]}, want {10.0 * source + tag}"
        for tag, t in outputs.items()
        if not torch.equal(t, torch.full((1000,), 10.0 * source + tag))
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_receives_posted_in_another_order(ranks, size):
    ranks.check(_tags_in_flight)


def _any_source(group_name):
    """Rank 0 of the group takes what comes; the answer is the sender's rank in the default group."""
    members = world.groups[group_name]
    if members.group is None:
        return []
    size, rank = len(members.ranks), members.rank
    if rank:
        dist.send(torch.full((50,), float(dist.get_rank())), group_dst=0, group=members.group, tag=3)
        return []
    complaints, seen = [], []
    for _ in range(size - 1):
        t = torch.zeros(50)
        source = dist.recv(t, group=members.group, tag=3)
        seen.append(source)
        if not torch.equal(t, torch.full((50,), float(source))):
            complaints.append(f"recv says {source}, the message says {t[0]}")
    if sorted(seen) != sorted(set(members.ranks) - {dist.get_rank()}):
        complaints.append(f"heard from {seen} in {members.ranks}")
    return complaints


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_source(ranks, size):
    for name, members in world.layouts(size).items():
        if len(members) > 1:
            ranks.check(_any_source, name)


def _any_source_in_background():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.barrier()
        dist.send(torch.full((5,), float(rank)), 0)
        return []
    outputs = [torch.zeros(5) for _ in range(size - 1)]
    works = [dist.irecv(t) for t in outputs]
    assert not any(work.is_completed() for work in works)
    dist.barrier()
    for work in works:
        work.wait()
    found = {work.source_rank(): t.tolist() for work, t in zip(works, outputs, strict=True)}
    return [] if found == {r: [float(r)] * 5 for r in range(1, size)} else [f"found {found}"]


@pytest.mark.parametrize("size", [2, 3])
def test_any_source_in_the_background(ranks, size):
    ranks.check(_any_source_in_background)


def _to_itself():
    rank = dist.get_rank()
    for count in (1, 50_000):
        got = torch.zeros(count)
        works = [dist.isend(torch.full((count,), rank + 0.5), rank, tag=9), dist.irecv(got, rank, tag=9)]
        for work in works:
            work.wait()
        assert got.tolist() == [rank + 0.5] * count


@pytest.mark.parametrize("size", [1, 2])
def test_isend_to_itself(ranks, size):
    ranks.run(_to_itself)


def _batch(group_name, count):
    """Everybody exchanges with everybody, itself too, two messages per pair."""
    members = world.groups[group_name]
    if members.group is None:
        return []
    rank, peers = dist.get_rank(), members.ranks
    outputs = {(r, i): torch.zeros(count) for r in peers for i in range(2)}
    ops = []
    for r in peers:
        for i in range(2):
            message = torch.arange(float(count)) + 100 * rank + 10 * r + i
            ops.append(dist.P2POp(dist.isend, message, r, group=members.group))
            ops.append(dist.P2POp(dist.irecv, outputs[r, i], r, group=members.group))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [
        f"from {r}, message {i}: {t}"
        for (r, i), t in outputs.items()
        if not torch.equal(t, torch.arange(float(count)) + 100 * r + 10 * rank + i)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_batch_isend_irecv(ranks, size):
    for name in world.layouts(size):
        for count in (3, 20_000):
            ranks.check(_batch, name, count)


def _complex():
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(3, dtype=torch.complex64)
    work = dist.irecv(got, (rank - 1) % size)
    dist.send(torch.full((3,), rank + 2j, dtype=torch.complex64), (rank + 1) % size)
    work.wait()
    assert got.tolist() == [(rank - 1) % size + 2j] * 3


@pytest.mark.parametrize("size", [2])
def test_complex(ranks, size):
    ranks.run(_complex)


def _nothing_in_the_background():
    def refuse(*_):
        raise AssertionError("a message was left to the background")

    rank = dist.get_rank()
    with mock.patch.object(ProcessGroupAdapter, "_start", refuse):
        t = torch.full((3,), float(rank))
        if rank == 0:
            dist.send(t, 1)
            dist.recv(t, 1)
        else:
            got = torch.empty(3)
            assert dist.recv(got, 0) == 0
            dist.send(got + t, 0)
    return t.tolist()


@pytest.mark.parametrize("size", [2])
def test_send_and_recv_run_in_the_callers_thread(ranks, size):
    assert ranks.run(_nothing_in_the_background)[0] == [1.0, 1.0, 1.0]
