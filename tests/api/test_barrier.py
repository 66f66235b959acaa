"""barrier: nobody leaves before the last has come, many in a row, sync and async."""

import time

import pytest


def _stays_until_the_last(group, rounds):
    """Times (one clock for all processes) at which this rank came to and left each barrier."""
    stays = []
    for turn in range(rounds):
        if turn % group.size == group.rank:
            time.sleep(0.02)  # the late one: the others must be seen to wait for it
        came = time.monotonic()
        if turn % 3 == 2:
            handle = group.barrier(async_op=True)
            handle.wait()
            assert handle.is_completed()
        else:
            assert group.barrier() is None
        stays.append((came, time.monotonic()))
    return stays


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_nobody_leaves_before_the_last_has_come(pool, size):
    by_rank = pool.run(_stays_until_the_last, 2 * size + 4)
    for turn, stays in enumerate(zip(*by_rank, strict=True)):
        last = max(came for came, _ in stays)
        for rank, (_, left) in enumerate(stays):
            assert left >= last, f"barrier {turn}: rank {rank} left {1e3 * (last - left):.3f} ms before the last came"


def _many(group, rounds):
    for _ in range(rounds):
        group.barrier()
    return rounds


@pytest.mark.parametrize("size", [2, 4])
def test_many_in_a_row(pool, size):
    assert pool.run(_many, 500) == [500] * size
