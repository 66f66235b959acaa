"""Groups: any order of ranks, splitting, destroying and making again, abort, time limits, monitored barriers."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

import unisono
from tests.torch_backend import world

SHORT = timedelta(milliseconds=300)
LONG_S = 30.0


def _total(group=None, async_op=False):
    """Everybody's rank in the default group, plus one, added up."""
    t = torch.tensor([dist.get_rank() + 1])
    work = dist.all_reduce(t, group=group, async_op=async_op)
    if work is not None:
        work.wait()
    return t.item()


def _last():
    return dist.get_rank() == dist.get_world_size() - 1


def _facts():
    """What torch says about the groups of world.py."""
    for name, members in world.groups.items():
        group = members.group
        if group is None:
            continue
        assert isinstance(group, unisono.ProcessGroupUnisono)
        assert dist.get_backend(group) == "unisono"
        assert dist.get_process_group_ranks(group) == list(members.ranks)
        assert dist.get_world_size(group) == group.size() == len(members.ranks)
        assert dist.get_rank(group) == group.rank() == members.rank
        assert dist.get_global_rank(group, members.rank) == dist.get_rank()
        assert dist.get_group_rank(group, dist.get_rank()) == members.rank
        if name != "world":
            assert group.group_desc == name and name in repr(group.unisono_group)
        assert _total(group) == sum(r + 1 for r in members.ranks)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_groups_say_about_themselves(ranks, size):
    ranks.run(_facts)


def _not_a_member():
    """A rank outside of a group gets a warning and nothing else."""
    group = dist.new_group([0])
    t = torch.full((2,), 3.0)
    if dist.get_rank():
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        with pytest.warns(UserWarning, match="does not belong"):
            assert dist.all_reduce(t, group=group, async_op=True) is None
    else:
        dist.all_reduce(t, group=group)
    assert t.tolist() == [3.0, 3.0]
    dist.barrier()
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [2])
def test_a_rank_outside_of_the_group(ranks, size):
    ranks.run(_not_a_member)


def _many_groups(group):
    """Groups come and go, in all ways torch has of making them."""
    rank, size = group.rank, group.size
    # A world of its own: the names of local groups depend on how many groups a rank is in.
    dist.init_process_group("unisono", store=PrefixStore("t", group._store), rank=rank, world_size=size)
    for turn in range(3):
        made = [dist.new_group(list(range(size))[::-1], sort_ranks=False, timeout=timedelta(seconds=60))]
        assert made[0].rank() == size - 1 - rank
        mine, all_of_them = dist.new_subgroups(2)
        made.append(mine)
        assert len(all_of_them) == 2 and _total(mine) == (1 + 2 if rank < 2 else 3 + 4)
        mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        made.append(mine)
        assert _total(mine, async_op=True) == 5
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        made.append(dist.new_group(pair, use_local_synchronization=True, group_desc=f"pair {turn}"))
        assert _total(made[-1]) == sum(r + 1 for r in pair)
        for group in made[::-1] if turn % 2 else made:
            dist.destroy_process_group(group)
        with pytest.raises((ValueError, unisono.ClosedError)):
            dist.all_reduce(torch.ones(1), group=made[0])
        assert _total() == 10


def test_groups_come_and_go():
    world.run_fresh(4, _many_groups)


def _other_lists(group):
    """Two ranks make "the next group" with another partner each; torch gives both the same name."""
    rank, size = group.rank, group.size
    limit = timedelta(seconds=LONG_S)
    dist.init_process_group("unisono", store=PrefixStore("t", group._store), rank=rank, world_size=size, timeout=limit)
    text = ""
    if rank != 1:
        began = time.monotonic()
        with pytest.raises(unisono.MismatchError) as caught:
            dist.new_group([0, 1] if rank == 0 else [0, 2])
        text = str(caught.value)
        assert time.monotonic() - began < LONG_S / 2
    assert _total() == 6
    return text


def test_new_group_with_different_lists():
    first, _, third = world.run_fresh(3, _other_lists)
    for text in (first, third):
        assert "rank 0   2 ranks   [0, 1]" in text and "rank 2   2 ranks   [0, 2]" in text, text


def _split():
    world_group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    evens_and_odds = [list(range(0, size, 2))[::-1], list(range(1, size, 2))]
    mine = evens_and_odds[rank % 2]
    child = world_group.split_group(mine, timeout=timedelta(seconds=30), group_desc="half")
    assert child.size() == len(mine) and child.rank() == mine.index(rank)
    t = torch.tensor([rank + 1.0])
    child.allreduce([t]).wait()
    assert t.item() == sum(r + 1 for r in mine)
    outputs = [torch.zeros(1) for _ in mine]
    child.allgather([outputs], [torch.tensor([float(rank)])]).wait()
    assert [o.item() for o in outputs] == mine
    grandchild = child.split_group([0])
    assert (grandchild is None) == (child.rank() != 0)
    first_only = world_group.split_group([0])
    assert (first_only is None) == (rank != 0)
    for group in (first_only, grandchild, child):
        if group is not None:
            group.shutdown()
    assert _total() == size * (size + 1) // 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_split_group(ranks, size):
    ranks.run(_split)


def _bad_splits():
    for error, words, lists in (
        (ValueError, "cannot be None or empty", None),
        (TypeError, r"argument 'split_ranks\[0\]' must be a list of ranks, got 0", [0, 1]),
        (ValueError, r"'split_ranks' must be different ranks from 0 to 1, got \[0, 1, 0\]", [[0, 1], [0]]),
        (ValueError, r"'split_ranks' must be different ranks from 0 to 1, got \[0, 2\]", [[0, 2]]),
    ):
        with pytest.raises(error, match=words):
            unisono.split_group(None, lists)


@pytest.mark.parametrize("size", [2])
def test_lists_that_cannot_be_split(ranks, size):
    ranks.run(_bad_splits)


def _again(group, turns):
    """destroy_process_group, then init_process_group: another world, with other values."""
    seen = []
    for turn in range(turns):
        store = PrefixStore(f"turn {turn}", group._store)
        dist.init_process_group("unisono", store=store, rank=group.rank, world_size=group.size)
        pending = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
        extra = dist.new_group(list(range(group.size)))
        for work in pending:
            work.wait()
        seen.append(_total(extra if turn % 2 else None))
        if turn == 1:
            dist.destroy_process_group(extra)
        dist.destroy_process_group()
        assert not dist.is_initialized()
    return seen


@pytest.mark.parametrize("n", [1, 2, 3])
def test_destroy_and_init_again(n):
    assert world.run_fresh(n, _again, 4) == [[n * (n + 1) // 2] * 4] * n


def _alone(group):
    """A world of one rank, on a store in this process's memory."""
    dist.init_process_group("unisono", store=HashStore(), rank=0, world_size=1)
    assert _total() == 1
    dist.destroy_process_group()


def test_a_hash_store():
    world.run_fresh(1, _alone)


def _never_destroyed(group):
    """A program that just ends: nothing depends on destroy_process_group."""
    dist.init_process_group("unisono", store=PrefixStore("t", group._store), rank=group.rank, world_size=group.size)
    dist.all_reduce(torch.ones(5), async_op=True)
    return _total()


def test_a_program_that_never_destroys_its_group():
    assert world.run_fresh(2, _never_destroyed) == [3, 3]


def _aborted(group, how):
    world.enter(group)
    side = world.groups["reversed"].group
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.2)
        dist.distributed_c10d._abort_process_group(side) if how == "function" else side.abort()
        with pytest.raises((unisono.AbortedError, ValueError)):
            dist.all_reduce(torch.ones(1), group=side)
    else:
        began = time.monotonic()
        work = dist.all_reduce(torch.ones(1), group=side, async_op=True)
        with pytest.raises(unisono.AbortedError):
            work.wait()
        with pytest.raises(unisono.AbortedError):
            dist.barrier(side)
        assert time.monotonic() - began < LONG_S
        assert isinstance(work.exception(), unisono.AbortedError) and not work.is_success()
    assert _total() == dist.get_world_size() * (dist.get_world_size() + 1) // 2, "the default group goes on"
    world.leave()


@pytest.mark.parametrize("how", ["function", "method"])
def test_abort(how):
    world.run_fresh(3, _aborted, how)


def _barriers():
    """Nobody leaves a barrier before everybody has come."""
    complaints = []
    for name, members in world.groups.items():
        if members.group is None or len(members.ranks) == 1:
            continue
        for way in ("sync", "async", "monitored"):
            stamps = [torch.zeros(2, dtype=torch.float64) for _ in members.ranks]
            if members.rank == len(members.ranks) - 1:
                time.sleep(0.05)
            came = time.monotonic()  # one clock for all processes of a host
            if way == "monitored":
                members.group.monitored_barrier(timedelta(seconds=30))
            else:
                work = dist.barrier(group=members.group, async_op=way == "async")
                if work is not None:
                    work.wait()
            went = time.monotonic()
            dist.all_gather(stamps, torch.tensor([came, went], dtype=torch.float64), group=members.group)
            if min(s[1] for s in stamps) < max(s[0] for s in stamps):
                complaints.append(f"{way} barrier of {name}: a rank left before another came: {stamps}")
    return complaints


@pytest.mark.parametrize("size", [2, 3, 4])
def test_barriers(ranks, size):
    ranks.check(_barriers)


def _missing(wait_all_ranks):
    """Ranks 1 and 2 do not come: rank 0 names the first, or both; rank 3 learns that rank 0 did not answer."""
    group, rank = dist.group.WORLD, dist.get_rank()
    began = time.monotonic()
    if rank in (0, 3):
        with pytest.raises(RuntimeError) as caught:
            group.monitored_barrier(SHORT if rank == 0 else 2 * SHORT, wait_all_ranks=wait_all_ranks)
        text = str(caught.value)
        if rank == 0:
            named = "Ranks 1, 2 failed" if wait_all_ranks else "Rank 1 failed"
            assert f"[Rank 0]: {named} to pass monitoredBarrier in 300 ms" in text, text
            assert caught.value.peers == ((1, 2) if wait_all_ranks else (1,))
        else:
            assert "[Rank 3]" in text, text
        assert time.monotonic() - began < LONG_S
    dist.barrier()
    if rank in (1, 2):  # what they missed, so that the ranks count alike
        group._monitored.next()
    group.monitored_barrier(timedelta(seconds=30))
    assert _total() == 10


@pytest.mark.parametrize("size", [4])
@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_monitored_barrier_names_who_is_missing(ranks, size, wait_all_ranks):
    ranks.run(_missing, wait_all_ranks)


def _missing_then_later():
    """What a monitored barrier gave up waiting for does not end the group at the group's own time limit."""
    group, rank = dist.new_group(timeout=10 * SHORT), dist.get_rank()
    if rank != 1:
        with pytest.raises(RuntimeError, match=r"Rank 1 failed|did not answer"):
            group.monitored_barrier(SHORT)
    time.sleep(12 * SHORT.total_seconds())
    dist.barrier()
    assert _total(group) == 6
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [3])
def test_a_group_lives_on_after_a_monitored_barrier(ranks, size):
    ranks.run(_missing_then_later)


# Time limits. The default of a group is long; each of these shortens it, and the last rank does not come.
def _by_new_group(group):
    return lambda: dist.all_reduce(torch.ones(3), group=dist.new_group(timeout=SHORT))


def _by_new_group_async(group):
    return lambda: dist.all_reduce(torch.ones(3), group=dist.new_group(timeout=SHORT), async_op=True).wait()


def _by_set_timeout(group):
    group.set_timeout(SHORT)
    return lambda: dist.all_gather_single(torch.ones(3 * group.size()), torch.ones(3), group=group)


def _by_options(group):
    options = dist.AllreduceOptions()
    options.timeout = SHORT
    return lambda: group.allreduce([torch.ones(3)], options).wait()


def _by_sync_options(group):
    options = dist.ReduceScatterOptions()
    options.timeout, options.asyncOp = SHORT, False
    return lambda: group.reduce_scatter_single(torch.ones(3), torch.ones(3 * group.size()), options)


def _by_argument(group):
    return lambda: group.allreduce(torch.ones(3), dist.ReduceOp.SUM, SHORT).wait()


def _by_barrier(group):
    return lambda: dist.barrier(group, timeout=SHORT)


def _by_split(group):
    child = group.split_group(list(range(group.size())), timeout=SHORT)
    return lambda: child.barrier().wait()


def _by_recv(group):
    group.set_timeout(SHORT)
    return lambda: dist.recv(torch.ones(3), group=group, group_src=group.size() - 1)


LIMITS = [
    _by_new_group, _by_new_group_async, _by_set_timeout, _by_options, _by_sync_options, _by_argument, _by_barrier,
    _by_split, _by_recv,
]  # fmt: skip


def _in_time(group, which):
    store = PrefixStore("t", group._store)
    limit = timedelta(seconds=LONG_S / 2)
    dist.init_process_group("unisono", store=store, rank=group.rank, world_size=group.size, timeout=limit)
    dist.barrier()
    call = LIMITS[which](dist.new_group(timeout=limit))
    complaints = []
    if _last():
        if "new_group" in LIMITS[which].__name__:
            dist.new_group(timeout=SHORT)
    else:
        began = time.monotonic()
        try:
            call()
            complaints.append("no error")
        except Exception as error:
            if not isinstance(error, (TimeoutError, dist.DistBackendError)) or not isinstance(error, RuntimeError):
                complaints.append(repr(error))
            elif "300ms" not in str(error) and "300 ms" not in str(error):
                complaints.append(f"does not name its limit: {error}")
        if not SHORT.total_seconds() * 0.9 < time.monotonic() - began < LONG_S:
            complaints.append(f"it took {time.monotonic() - began} s")
    dist.barrier()  # the default group is another one, and goes on
    return complaints


@pytest.mark.parametrize("which", range(len(LIMITS)), ids=[f.__name__ for f in LIMITS])
def test_time_limits(which):
    assert world.run_fresh(2, _in_time, which) == [[], []]
