"""send and recv: sizes, dtypes, memory kinds between every pair, tags, any source."""

import time

import pytest
import torch

import unisono
from tests.calls import LIMIT_S, Call, Placed, sampled, threshold_counts, unwritten
from tests.reference import MOVABLE, difference, dtype_of, make_input
from unisono.testing import run_ranks

KINDS = ("hh", "oo", "ho", "oh")  # sender's and receiver's memory


def _messages(group, messages):
    """Each message is (source, destination, Call); complaints of this rank."""
    complaints = []
    for index, (source, destination, call) in enumerate(messages):
        content = make_input(call.dtype, call.counts, source, call.seed)
        if group.rank == source:
            placed = Placed(content, call.kinds[0][0], call)
            assert group.send(placed.tensor, destination, tag=call.seed, timeout_s=LIMIT_S) is None
            found = difference(placed.flat, content)
        elif group.rank == destination:
            placed = Placed(unwritten(call.counts, dtype_of(call.dtype)), call.kinds[0][1], call)
            came_from = group.recv(placed.tensor, source, tag=call.seed, timeout_s=LIMIT_S)
            found = difference(placed.flat, content)
            if came_from != source:
                complaints.append(f"recv returned source {came_from}, not {source}")
        else:
            continue
        if found or not placed.guards_hold():
            complaints.append(f"message {index} {source}->{destination} {call}: {found or 'guards written'}")
    return complaints


def _check(pool, messages):
    lines = [f"rank {rank}: {line}" for rank, found in enumerate(pool.run(_messages, messages)) for line in found]
    assert not lines, "\n".join(lines[:12])


def _pairs(size):
    return [(a, b) for a in range(size) for b in range(size) if a != b]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_sizes_and_kinds(pool, size):
    axes = {"pair": _pairs(size), "count": threshold_counts("float32", size), "kinds": KINDS, "shift": (0, 1)}
    messages = [
        (*p["pair"], Call("send", counts=p["count"], kinds=(p["kinds"],), shift=p["shift"], seed=seed))
        for seed, p in enumerate(sampled(200, **axes))
    ]
    _check(pool, messages)


@pytest.mark.parametrize("size", [2])
def test_dtypes_and_large(pool, size):
    axes = {"dtype": MOVABLE, "count": (1, 5, 4097, 70_000), "kinds": KINDS, "pair": _pairs(size)}
    messages = [
        (*p["pair"], Call("send", p["dtype"], p["count"], kinds=(p["kinds"],), seed=seed))
        for seed, p in enumerate(sampled(4 * len(MOVABLE), **axes))
    ]
    for seed, kinds in enumerate(KINDS):
        messages.append((seed % 2, 1 - seed % 2, Call("send", counts=4_500_001, kinds=(kinds,), shift=1, seed=seed)))
    _check(pool, messages)


def _many_to_one(group, rounds, count):
    """Rank 0 takes from anybody; the payload tells who sent it."""
    if group.rank != 0:
        for turn in range(rounds):
            group.send(torch.full((count,), 1000.0 * group.rank + turn), 0, tag=5, timeout_s=LIMIT_S)
        return None
    turns = [0] * group.size
    got = torch.empty(count)
    for _ in range(rounds * (group.size - 1)):
        source = group.recv(got, tag=5, timeout_s=LIMIT_S)
        want = torch.full((count,), 1000.0 * source + turns[source])
        assert torch.equal(got, want), f"from {source}, turn {turns[source]}: got {got[0]}..{got[-1]}, want {want[0]}"
        turns[source] += 1
    return turns


@pytest.mark.parametrize("count", [1, 3000, 300_000])
@pytest.mark.parametrize("size", [2, 4])
def test_any_source_keeps_each_senders_order(pool, size, count):
    assert pool.run(_many_to_one, 6, count)[0] == [0] + [6] * (size - 1)


def _tags_out_of_order(group, count):
    """Rank 0 sends tags 1..4; rank 1 takes 3, 1, 4, 2."""
    if group.rank == 0:
        kept = [torch.full((count,), float(tag)) for tag in (1, 2, 3, 4)]
        handles = [group.send(t, 1, tag=tag, async_op=True) for tag, t in enumerate(kept, start=1)]
        for handle in handles:
            handle.wait(LIMIT_S)
    elif group.rank == 1:
        for tag in (3, 1, 4, 2):
            got = torch.zeros(count)
            assert group.recv(got, 0, tag=tag, timeout_s=LIMIT_S) == 0
            assert torch.equal(got, torch.full((count,), float(tag))), f"tag {tag}: got {got[0].item()}"
    group.barrier()


@pytest.mark.parametrize("count", [2, 5000, 200_000])
@pytest.mark.parametrize("size", [2, 3])
def test_tags_out_of_order(pool, size, count):
    pool.run(_tags_out_of_order, count)


def _between_collectives(group):
    """p2p in a ring between collectives: neither disturbs the other."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    total = torch.zeros(1)
    for turn in range(30):
        mine, got = torch.full((100,), float(turn * 10 + group.rank)), torch.empty(100)
        sending = group.send(mine, right, tag=turn, async_op=True)
        group.recv(got, left, tag=turn, timeout_s=LIMIT_S)
        sending.wait(LIMIT_S)
        assert torch.equal(got, torch.full((100,), float(turn * 10 + left)))
        total.fill_(1)
        group.all_reduce(total, timeout_s=LIMIT_S)
        assert total.item() == group.size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_between_collectives(pool, size):
    pool.run(_between_collectives)


def _send_and_leave(group):
    if group.rank == 0:
        time.sleep(0.004)  # the receiver is asleep by now, which is the case in question
        group.send(torch.ones(4), 1)
        return 4.0
    t = torch.zeros(4)
    group.recv(t, 0)
    return t.sum().item()


def test_a_message_counts_though_its_sender_has_left():
    for _ in range(8):
        assert run_ranks(2, _send_and_leave) == [4.0, 4.0]


def _unclaimed_head(group):
    """The first letter is asked for last, when all later ones have been taken."""
    if group.rank == 0:
        group.send(torch.zeros(4), 1, tag=1)
        for i in range(40):
            group.send(torch.full((4,), float(i)), 1, tag=2)
    else:
        for i in range(40):
            t = torch.zeros(4)
            group.recv(t, 0, tag=2, timeout_s=20)
            assert t[0] == i
        t = torch.ones(4)
        group.recv(t, 0, tag=1, timeout_s=20)
        assert t[0] == 0
    group.barrier()


def _more_than_the_ring(group, count, elements):
    """Short sends do not wait for their receiver, however many."""
    if group.rank == 0:
        for i in range(count):
            group.send(torch.full((elements,), float(i)), 1, timeout_s=20)
        group.barrier(timeout_s=20)
    else:
        group.barrier(timeout_s=20)
        for i in range(count):
            t = torch.zeros(elements)
            group.recv(t, 0, timeout_s=20)
            assert t.unique().tolist() == [float(i)]
    group.barrier()


@pytest.mark.parametrize("size", [2])
def test_order_and_number_of_messages_do_not_matter(pool, size):
    pool.run(_unclaimed_head)
    pool.run(_more_than_the_ring, 50, 3)
    pool.run(_more_than_the_ring, 40, 3000)


def _wait_then_send(group):
    """Waiting for the first of two calls must not wait for the second, which needs what is sent in between."""
    for _ in range(100):
        x = torch.ones(3)
        if group.rank == 0:
            first = group.all_reduce(torch.ones(4), async_op=True)
            second = group.all_reduce(torch.ones(4), async_op=True)
            first.wait()
            group.send(x, 1)
            second.wait()
        else:
            group.all_reduce(torch.ones(4))
            group.recv(x, 0, timeout_s=20)
            group.all_reduce(torch.ones(4))


@pytest.mark.parametrize("size", [2])
def test_a_handle_waits_for_its_own_call_only(pool, size):
    pool.run(_wait_then_send)


def _waiting_in_order(group, rounds, count):
    """Receives that wait for the same sender and tag get its messages in the order in which they were posted."""
    wrong = []
    for i in range(rounds):
        outputs = [torch.zeros(count) for _ in range(6)]
        if group.rank == 0:
            for k in range(6):
                group.send(torch.full((count,), float(k)), 1)
        elif group.rank == 1:
            sources = [0, None, 0, 0, None, None] if i % 2 else [0] * 6
            handles = [group.recv(t, s, async_op=True) for t, s in zip(outputs, sources, strict=True)]
            for handle in handles:
                handle.wait(30)
            if [t[0].item() for t in outputs] != [0, 1, 2, 3, 4, 5]:
                wrong.append((i, [t[0].item() for t in outputs]))
        group.barrier()
    return wrong


@pytest.mark.parametrize("count", [1, 20_000])
@pytest.mark.parametrize("size", [2])
def test_receives_that_wait_are_served_in_order(pool, size, count):
    assert pool.run(_waiting_in_order, 300, count) == [[], []]


def _send_many_and_leave(group, count, messages):
    """Rank 0 is gone before rank 1 has asked for most of its messages, which are more than there are letters."""
    if group.rank == 0:
        for k in range(messages):
            group.send(torch.full((count,), float(k)), 1)
        group.close()
        return []
    time.sleep(0.1)
    got = []
    for _ in range(messages):
        x = torch.zeros(count)
        group.recv(x, 0, timeout_s=20)
        got.append(x[0].item())
    return got


@pytest.mark.parametrize("count", [1, 1000])
def test_short_sends_arrive_though_the_sender_leaves(count):
    assert run_ranks(2, _send_many_and_leave, count, 100)[1] == [float(k) for k in range(100)]


def _send_beside_a_full_heap(group):
    """Messages that were over for their sender before they had an entry, when there is no memory to stage them."""
    if group.rank == 0:
        held = []
        for bytes in (1 << 20, 1 << 12):  # all of the heap
            with pytest.raises(MemoryError):
                while True:
                    held.append(unisono.empty(bytes, dtype=torch.uint8))
        for _ in range(16):  # all entries
            group.send(torch.zeros(1), 1)
        for k in range(4):
            group.send(torch.full((15_000,), float(k)), 1)
        group.barrier()
        time.sleep(0.3)
        held.clear()
        group.barrier()
        return []
    group.barrier()  # until then it takes nothing
    for _ in range(16):
        group.recv(torch.zeros(1), 0)
    got = []
    for _ in range(4):
        x = torch.zeros(15_000)
        group.recv(x, 0, timeout_s=20)
        got.append(x[-1].item())
    group.barrier()
    return got


def test_no_message_is_lost_beside_a_full_heap():
    got = run_ranks(2, _send_beside_a_full_heap, env={"UNISONO_HEAP_MAX": "32M"})
    assert got[1] == [0.0, 1.0, 2.0, 3.0]


def _send_many_then_rest(group, count, messages, use_async, path):
    """Rank 0 leaves the group alone until rank 1 has taken more messages than there are letters."""
    if group.rank == 0:
        handles = [group.send(torch.full((count,), float(k)), 1, async_op=use_async) for k in range(messages)]
        until = time.monotonic() + 15
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        arrived = path.exists()
        for handle in handles:
            if handle is not None:
                handle.wait()
        group.barrier()
        return arrived
    got = []
    for _ in range(messages):
        x = torch.zeros(count)
        group.recv(x, 0, timeout_s=30)
        got.append(x[0].item())
    path.touch()
    group.barrier()
    return got


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("count", [1, 1000])
@pytest.mark.parametrize("size", [2])
def test_short_sends_arrive_while_the_sender_rests(pool, size, count, use_async, tmp_path):
    arrived, got = pool.run(_send_many_then_rest, count, 100, use_async, tmp_path / "arrived")
    assert arrived
    assert got == [float(k) for k in range(100)]
