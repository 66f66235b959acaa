"""Messages beyond 2^31 elements and 2^32 bytes: two ranks, up to 13 GiB of memory, so marked slow."""

import pytest
import torch

import unisono
from unisono.testing import run_ranks

BYTES = (1 << 32) + 4099  # more than an unsigned 32-bit number holds, and odd
# Places where a truncated count, offset or address would show.
PLACES = [0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, BYTES - 1]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def _make(kind, count=BYTES, dtype=torch.uint8):
    make = unisono.empty if kind == "heap" else torch.empty
    return make(count, dtype=dtype).zero_()


def _agree(group, complaints):
    group.barrier()
    return complaints


def _broadcast(group, kind):
    t = _make(kind)
    if group.rank == 0:
        t.fill_(3)
        t[PLACES] = torch.arange(10, 10 + len(PLACES), dtype=torch.uint8)
    group.broadcast(t, 0)
    got, want = t[PLACES].tolist(), list(range(10, 10 + len(PLACES)))
    t[PLACES] = 3
    wrong = sum(int((part != 3).sum()) for part in t.split(1 << 28))
    return _agree(group, [] if got == want and not wrong else [f"at the edges {got}, elsewhere {wrong} wrong"])


def _all_reduce(group, kind):
    t = _make(kind)
    t.fill_(1 + group.rank)
    t[PLACES] = 20 + group.rank
    group.all_reduce(t)
    got = t[PLACES].tolist()
    t[PLACES] = 3
    wrong = sum(int((part != 3).sum()) for part in t.split(1 << 28))
    return _agree(group, [] if got == [41] * len(PLACES) and not wrong else [f"at the edges {got}, {wrong} wrong"])


def _uneven_gather(group, kind):
    """Rank 0 brings nearly all, so that rank 1's chunk starts beyond 2^32."""
    counts = [BYTES - 1000, 1000]
    output = _make(kind)
    mine = _make(kind, counts[group.rank])
    mine.fill_(5 + group.rank)
    group.all_gather(output, mine, counts)
    last = output[BYTES - 1000 :]
    wrong = sum(int((part != 5).sum()) for part in output[: BYTES - 1000].split(1 << 28))
    good = not wrong and bool((last == 6).all())
    return _agree(group, [] if good else [f"{wrong} wrong in chunk 0, chunk 1 holds {last.unique().tolist()}"])


def _message(group, kind):
    t = _make(kind)
    if group.rank == 0:
        t.fill_(9)
        group.send(t, 1)
    else:
        group.recv(t, 0)
    wrong = sum(int((part != 9).sum()) for part in t.split(1 << 28))
    return _agree(group, [] if not wrong else [f"{wrong} bytes wrong"])


@pytest.mark.parametrize("kind", ["heap", "ordinary"])
@pytest.mark.parametrize("what", [_broadcast, _all_reduce, _uneven_gather, _message])
def test_beyond_32_bits(what, kind):
    """On fresh ranks: a heap keeps the memory that it has once got."""
    results = run_ranks(2, what, kind, timeout_s=1000)
    assert results == [[], []], results
