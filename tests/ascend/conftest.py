"""Ranks in which unisono.ascend is installed: processes of their own, since it changes torch."""

import pytest

from unisono.testing import RankPool


def _call(group, function, *args):
    import torch

    import unisono.ascend

    unisono.ascend.install()  # once per process; ranks are new after a failure
    torch.npu.set_device(group.rank)
    return function(group, *args)


class _Ranks:
    def __init__(self, pool):
        self._pool = pool

    def run(self, function, *args):
        return self._pool.run(_call, function, *args)


def _ranks(size):
    with RankPool(size) as pool:
        pool.run(_call, _nothing)
        yield _Ranks(pool)


def _nothing(group):
    pass


@pytest.fixture(scope="package")
def npu_rank():
    """One rank."""
    yield from _ranks(1)


@pytest.fixture(scope="package")
def npu_ranks():
    """Two ranks."""
    yield from _ranks(2)
