"""Life after a death over pretended hosts: survivors agree on a smaller group, which gives the bits of a fresh one."""

import os
import random
import signal
import time

import pytest
import torch

import unisono
from tests.faults.fresh import FreshRanks, finish
from tests.faults.shrunk import die_one_after_another, expect_bits
from tests.faults.survival import collectives
from tests.multihost.pretended import over_hosts
from unisono.testing import run_ranks

TWO_HOSTS = "0,0,1,1"


def _layout(hosts, ranks):
    return ",".join(hosts.split(",")[r] for r in ranks)


def _fresh(group, hosts, seeds):
    if len(set(hosts.split(","))) == 1:
        return collectives(group, seeds)
    with over_hosts(group, hosts) as over:
        return collectives(over, seeds)


def _expect_bits(said, hosts, survivors):
    expect_bits(said, survivors, run_ranks(len(survivors), _fresh, _layout(hosts, survivors), survivors))


@pytest.mark.parametrize(
    ("hosts", "victims", "count"),
    [
        (TWO_HOSTS, [1], 100),
        (TWO_HOSTS, [0], 100_000),
        (TWO_HOSTS, [2], 1_000_000),  # killed in a large call: connections of gloo are stuck
        (TWO_HOSTS, [2, 3], 1_000_000),  # a whole host; one is left
        (TWO_HOSTS, [0, 1], 100),
        ("0,1,0,1", [0, 3], 100_000),
        ("0,1,1,2", [0], 1_000_000),  # a host of one rank; two are left
        ("0,1,2,0", [1, 2, 3], 100),
    ],
    ids=str,
)
def test_shrink(hosts, victims, count, tmp_path, measured):
    survivors = [r for r in range(4) if r not in victims]
    with FreshRanks(4, tmp_path, "shrinking", hosts=hosts, late=victims, count=count) as ranks:
        ranks.expect_all("inside")
        time.sleep(0.05)
        ranks.signal(victims)
        said = [ranks.expect(r, "shrunk") for r in survivors]
        assert all(one["lost"] == victims for one in said), said
        for one in said:
            measured(one["took_s"])
        _expect_bits(said, hosts, survivors)
        finish(ranks, survivors)


def test_one_after_another(tmp_path):
    with FreshRanks(5, tmp_path, "repeatedly", hosts="0,1,2,1,0", until=1) as ranks:
        die_one_after_another(ranks)


@pytest.mark.parametrize("seed", range(6))
def test_others_die_while_the_survivors_agree(seed, tmp_path):
    """One rank is killed, and one or two more die somewhere inside of shrink: the rest agrees on the same group."""
    dice = random.Random(seed)
    first, *more = dice.sample(range(5), dice.choice([2, 3]))
    survivors = [r for r in range(5) if r not in (first, *more)]
    hosts = dice.choice(["0,0,1,1,1", "0,1,0,1,2"])
    with FreshRanks(5, tmp_path, "dying_on_cue", hosts=hosts, late=more, seed=seed, within_s=0.15) as ranks:
        ranks.expect_all("inside")
        time.sleep(0.02)
        ranks.signal([first])
        said = [ranks.expect(r, "shrunk") for r in survivors]
        _expect_bits(said, hosts, survivors)
        # gloo may still try to connect to one that died in between, until the limit: nothing is counted here.
        ranks.expect_all("left", survivors)
        ranks.say(survivors, "end")
        assert ranks.join(survivors) == [0] * len(survivors)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_stopped_rank_is_waited_for_then_left_out(late, tmp_path):
    others = [r for r in range(4) if r != late]
    with FreshRanks(4, tmp_path, "stopped", hosts=TWO_HOSTS, late=[late]) as ranks:
        ranks.expect_all("inside")
        ranks.signal([late], signal.SIGSTOP)
        ranks.say(others)
        for r in others:
            failed = ranks.expect(r, "failed")
            assert failed["kind"] == "CollectiveTimeoutError" and failed["op"] == "shrink", failed
            assert failed["peers"] == [late] and f"rank {late} on host" in failed["text"], failed
        said = [ranks.expect(r, "shrunk") for r in others]
        assert all(one["lost"] == [late] for one in said)
        _expect_bits(said, TWO_HOSTS, others)
        for r in others:
            near = r // 2 == late // 2
            assert ("still runs" if near else "another host") in ranks.expect(r, "not dead")["text"]
        ranks.signal([late], signal.SIGCONT)
        ranks.say([late])
        left_out = ranks.expect(late, "left out")
        assert left_out["kind"] == "AbortedError" and "left this rank out" in left_out["text"], left_out
        # What others hold of a stopped rank, they hold until it goes: nothing is counted here.
        ranks.expect_all("left")
        ranks.say(range(4), "end")
        assert ranks.join(range(4)) == [0] * 4


def test_ranks_that_leave_out_different_ones(tmp_path):
    exclude = [[3], [3], [], None]
    with FreshRanks(4, tmp_path, "disagreeing", hosts=TWO_HOSTS, exclude=exclude, then=[3], late=[3]) as ranks:
        ranks.expect_all("inside")
        for r in range(3):
            failed = ranks.expect(r, "failed")
            assert failed["kind"] == "MismatchError" and "leave out" in failed["text"], failed
            assert failed["text"].count("\n  rank ") == 3, failed
        said = [ranks.expect(r, "shrunk") for r in range(3)]
        ranks.signal([3])  # as long as it lives, rank 2 keeps its memory
        _expect_bits(said, TWO_HOSTS, [0, 1, 2])
        finish(ranks, [0, 1, 2])


def nobody_is_lost(group):
    with over_hosts(group, TWO_HOSTS) as over:
        over.barrier()
        new, lost = over.shrink()
        t = torch.ones(100_000)
        new.all_reduce(t)
        group.barrier()
        new.close()
    return lost, t[0].item()


def test_shrink_when_nobody_is_lost():
    """The barrier before it ends well on all ranks, whoever is first out of it."""
    assert run_ranks(4, nobody_is_lost) == [([], 4.0)] * 4


def one_leaves(group):
    """A rank that has closed the group is lost, though its process goes on and has other groups."""
    with over_hosts(group, TWO_HOSTS, together=False) as over:
        over.barrier()
        if over.rank == 2:
            over.close()
            group.barrier()
            return None
        new, lost = over.shrink()
        t = torch.ones(4)
        new.all_reduce(t)
        group.barrier()
        with pytest.raises(ValueError, match="still runs" if over.rank == 3 else "another host"):
            new.inherit(2)
        new.close()
        return lost, t[0].item()


def test_a_rank_that_has_closed_the_group_is_lost():
    assert run_ranks(4, one_leaves) == [([2], 3.0), ([2], 3.0), None, ([2], 3.0)]


def inherited(group, hosts):
    """Rank 1 dies: rank 0, of the same host, has what it kept; the others hear where it is."""
    with over_hosts(group, hosts, together=False) as over:
        kept = unisono.zeros(1000).fill_(over.rank + 0.5)
        with unisono.keep("mine", kept).update(7):
            kept += 1
        over.barrier()
        if over.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(unisono.PeerLostError):
            while True:
                over.all_reduce(torch.ones(100))
        new, lost = over.shrink()
        assert lost == [1]
        try:
            found = new.inherit(1)["mine"]
            said = found.tensor.unique().tolist(), found.step, found.whole
        except ValueError as error:
            said = str(error)
        new.close()
        return said


def test_inherit():
    first, _, *others = run_ranks(4, inherited, TWO_HOSTS, check=False)
    assert first == ([2.5], 7, True)
    for other in others:
        assert "rank 1 on host 0" in other and "ranks of that host only" in other, other


def of_a_subgroup(group):
    """A subgroup over hosts shrinks by itself; the world goes on, as nobody died."""
    with over_hosts(group, TWO_HOSTS) as over:
        child = over.split([3, 0, 2], name="child") if over.rank != 1 else over.split(None)
        lost = None
        if over.rank == 3:
            child.close()
        elif over.rank != 1:
            new, lost = child.shrink()
            t = torch.ones(4)
            new.all_reduce(t)
            assert (new.size, new.ranks, t[0].item()) == (2, [0, 2], 2.0)
            new.close()
        t = torch.ones(4)
        over.all_reduce(t)
    return lost, t[0].item()


def test_shrink_of_a_subgroup():
    assert run_ranks(4, of_a_subgroup) == [([0], 4.0), (None, 4.0), ([0], 4.0), (None, 4.0)]


def bad_arguments(group):
    with over_hosts(group, TWO_HOSTS) as over:
        with pytest.raises(ValueError, match="exclude"):
            over.shrink(exclude=[over.rank])
        with pytest.raises(TypeError, match="exclude"):
            over.shrink(exclude="0")
        over.barrier()  # it was not given up
    with pytest.raises(unisono.ClosedError):
        over.shrink()
    return True


def test_bad_arguments_and_a_closed_group():
    assert run_ranks(4, bad_arguments) == [True] * 4


def forked(group):
    """A child holds no sockets of its parent's: when that dies, the others learn it."""
    with over_hosts(group, TWO_HOSTS, together=False) as over:
        over.barrier()
        if over.rank == 0:
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        new, lost = over.shrink(timeout_s=15.0)
        new.close()
        return lost


def test_a_child_that_outlives_a_dead_rank():
    assert run_ranks(4, forked, check=False)[1:] == [[0]] * 3
