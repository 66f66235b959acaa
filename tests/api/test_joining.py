"""Ranks that were told different things about a group: every one of them learns who wanted what, at once."""

import time

import pytest
import torch
from torch.distributed import FileStore

import unisono
from unisono.group import rendezvous
from unisono.testing import run_ranks

LONG_S = 60.0
SOON_S = 20.0


def _join(group, path, rank, size, ranks=None):
    """The error, and nothing may have taken long."""
    store = FileStore(path, group.size)
    began = time.monotonic()
    with pytest.raises(unisono.MismatchError) as caught:
        unisono.Group.from_store(store, rank, size, name="g", timeout_s=LONG_S, ranks=ranks)
    assert time.monotonic() - began < SOON_S
    assert (caught.value.op, caught.value.group) == ("join", "g")
    group.barrier()
    return str(caught.value)


def _sizes(group, path, sizes):
    store = FileStore(path, group.size)
    began = time.monotonic()
    with pytest.raises(unisono.MismatchError) as caught:
        unisono.Group.from_store(store, group.rank, sizes[group.rank], name="g", timeout_s=LONG_S)
    assert time.monotonic() - began < SOON_S
    assert (caught.value.op, caught.value.group, caught.value.rank) == ("join", "g", group.rank)
    assert caught.value.peers and group.rank not in caught.value.peers
    group.barrier()
    return str(caught.value)


@pytest.mark.parametrize("sizes", [[2, 3], [3, 2], [3, 4, 3]])
def test_sizes_differ(sizes, tmp_path):
    """Also where ranks wait for others that will never come: rank 2 of [2, 3], rank 3 of [3, 4, 3]."""
    for rank, text in enumerate(run_ranks(len(sizes), _sizes, str(tmp_path / "store"), sizes)):
        assert text.startswith('joining group "g": ranks disagree on the size'), text
        assert f"rank {rank}   {sizes[rank]} ranks" in text, text
        for size in set(sizes):
            assert f"   {size} ranks" in text, text


def _lists(group, path):
    """Ranks 0 and 2 want another partner each; rank 1 stays away."""
    if group.rank == 1:
        group.barrier()
        return None
    return _join(group, path, group.rank // 2, 2, [0, 1] if group.rank == 0 else [0, 2])


def test_lists_differ(tmp_path):
    first, _, third = run_ranks(3, _lists, str(tmp_path / "store"))
    for text in (first, third):
        assert text.startswith('joining group "g": ranks disagree on the ranks'), text
        assert "rank 0   2 ranks   [0, 1]" in text and "rank 2   2 ranks   [0, 2]" in text, text


def _agreed(group, path):
    store = FileStore(path, group.size)
    members = [2, 0]
    if group.rank not in members:
        group.barrier()
        return None
    own = unisono.Group.from_store(store, members.index(group.rank), 2, ranks=members, timeout_s=LONG_S)
    t = torch.full((2,), float(group.rank))
    own.broadcast(t, 0)
    own.close()
    group.barrier()
    return own.ranks, t.tolist()


def test_lists_agree(tmp_path):
    assert run_ranks(3, _agreed, str(tmp_path / "store")) == [([2, 0], [2.0, 2.0]), None, ([2, 0], [2.0, 2.0])]


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 2], [0, -1]])
def test_lists_that_cannot_be(ranks, tmp_path):
    with pytest.raises(ValueError, match="ranks"):
        unisono.Group.from_store(FileStore(str(tmp_path / "s"), 2), 0, 2, ranks=ranks)


def _versions(group, path):
    if group.rank == 1:
        rendezvous.VERSION = "0.0.7"
    return _join(group, path, group.rank, 2)


def test_versions_differ(tmp_path):
    for text in run_ranks(2, _versions, str(tmp_path / "store")):
        assert "ranks disagree on the version of unisono" in text and "0.0.7" in text, text


def _twice_the_same_rank(group, path):
    with pytest.raises(unisono.CollectiveTimeoutError) as caught:
        unisono.Group.from_store(FileStore(path, 2), 0, 2, timeout_s=2.0)
    group.barrier()
    return str(caught.value)


def test_two_processes_with_one_rank(tmp_path):
    """Nobody can know which of them is wrong; the later one says that the name was in use."""
    texts = run_ranks(2, _twice_the_same_rank, str(tmp_path / "store"))
    assert sum("rank 0 has joined by this name 2 times" in text for text in texts) == 1, texts


def _splits(group):
    lists = [[0, 1], [1, 2], None]
    with pytest.raises(unisono.MismatchError) as caught:
        group.split(lists[group.rank])
        if group.rank == 2:
            raise unisono.MismatchError("")
    t = torch.ones(1)
    group.all_reduce(t)
    assert t.item() == 3
    return str(caught.value)


@pytest.mark.parametrize("size", [3])
def test_split_names_who_wanted_what(pool, size):
    first, second, _ = pool.run(_splits)
    for text in (first, second):
        assert "ranks disagree on the ranks" in text, text
        assert "rank 0   [0, 1]" in text and "rank 1   [1, 2]" in text, text
    assert "rank 2   none" in second, second


def _halves(group, path):
    """Two groups of one name that have no rank in common: torch makes such when each half of the ranks cuts itself."""
    store = FileStore(path, group.size)
    members = [r for r in range(group.size) if r % 2 == group.rank % 2]
    with unisono.Group.from_store(
        store, members.index(group.rank), len(members), name="g", timeout_s=LONG_S, ranks=members
    ) as half:
        t = torch.tensor([float(group.rank)])
        half.all_reduce(t)
        half.barrier()
        return t.item()


def test_two_groups_of_one_name(tmp_path):
    assert run_ranks(4, _halves, str(tmp_path / "store")) == [2.0, 4.0, 2.0, 4.0]


# --- CPUs that differ -----------------------------------------------------------------------------------------


def _results(group):
    """What calls give whose kernels differ between instruction sets: the bits."""
    dice = torch.Generator().manual_seed(group.rank)
    x = torch.randn(70_001, generator=dice) * 10.0 ** (group.rank % 3)
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shared in (False, True):
            t = unisono.to_shared_(x.to(dtype)) if shared else x.to(dtype)
            group.all_reduce(t)
            results.append(t)
        part = torch.empty(3333, dtype=dtype)
        group.reduce_scatter(part, x[: 3333 * group.size].to(dtype), op="avg")
        results.append(part)
    gathered = torch.empty(7 * group.size)
    group.all_gather(gathered, x[:7].contiguous())
    results.append(gathered)
    whole = x[: 64 * 96].view(64, 96).round()  # a product is in the usual order here, so of numbers that add up exactly
    results.append(unisono.matmul_all_reduce(whole, torch.ones(96, 32), group=group))
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in results]


def _cpus_differ(group, path, weak):
    best = unisono._core.isa()
    expected = _results(group)
    group.barrier()
    if group.rank == weak:
        assert unisono._core.set_isa("scalar")
    with unisono.Group.from_store(FileStore(path, group.size), group.rank, group.size, timeout_s=LONG_S) as mixed:
        common = unisono._core.isa()
        results = _results(mixed)
        again = _results(group)  # of ranks that all have the better kernels, or had
    return best, common, results == expected, again == expected, expected


@pytest.mark.skipif(unisono._core.isa() in ("scalar", "neon"), reason="this CPU has one instruction set")
@pytest.mark.parametrize("weak", [0, 2])
def test_instruction_sets_differ(weak, tmp_path):
    """One rank has plain kernels only: all use those, with the same bits."""
    said = run_ranks(3, _cpus_differ, str(tmp_path / "store"), weak)
    for best, common, same, again, _ in said:
        assert best != "scalar" and common == "scalar", said
        assert same and again
    for i in (0, 1, 3, 4, 6, 7, 9, 10):  # what is equal on all ranks
        assert len({one[4][i] for one in said}) == 1, i
