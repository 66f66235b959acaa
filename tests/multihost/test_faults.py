"""What happens when things go wrong over hosts: disagreement, kills, time-outs, aborts, leaving; pretended hosts.

Times are those of the machine's one clock: the victim writes when it dies.
"""

import os
import signal
import time

import pytest
import torch

import unisono
from tests.multihost.pretended import LAYOUTS, over_hosts
from tests.transports.test_matrix import DISAGREE
from unisono.testing import run_ranks
from unisono.transport.hosts.links import Bulk

BOUND_S = 5.0  # of 30, at which calls would end; the promise is 0.2, and the time is printed
CLOSE_S = 5.0  # 2 are promised


def disagree(group, hosts):
    """Rank 0 asks for something else: all raise, each with every rank's line, and the next call goes well."""
    complaints = []
    with over_hosts(group, hosts) as over:
        for verb, call in DISAGREE.items():
            for odd in (True, False):
                try:
                    call(over.transport, odd and over.rank == 0)
                    said = ""
                except unisono.MismatchError as error:
                    said = str(error)
                if odd and not ("<- differs" in said and said.count("\n  rank ") == over.size):
                    complaints.append(f"{verb}: {said!r}")
                if not odd and said:
                    complaints.append(f"{verb} then: {said!r}")
        try:  # another verb altogether
            over.barrier() if over.rank == 0 else over.all_reduce(torch.ones(100_000))
            complaints.append("nothing was raised")
        except unisono.MismatchError:
            pass
        over.barrier()
    return complaints


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [4])
def test_disagreeing_ranks(pool, size, layout):
    assert pool.run(disagree, LAYOUTS[layout]) == [[]] * size


CALLS = {
    "waiting small": lambda group, rounds: group.all_reduce(torch.ones(4)),
    "streaming all_reduce": lambda group, rounds: [group.all_reduce(torch.ones(400_000)) for _ in range(rounds)],
    "streaming in one message": lambda group, rounds: [group.all_reduce(torch.ones(200_000)) for _ in range(rounds)],
    "streaming reduce_scatter": lambda group, rounds: [
        group.reduce_scatter(torch.zeros(200_000), torch.ones(800_000)) for _ in range(rounds)
    ],
    "waiting on a handle": lambda group, rounds: group.all_reduce(torch.ones(100_000), async_op=True).wait(),
    "receiving": lambda group, rounds: group.recv(torch.zeros(4), 3 if group.rank != 3 else 0),
}


def killed(group, hosts, what, victims, kill, path):
    with over_hosts(group, hosts, 30.0, together=False) as over:
        over.barrier()
        if over.rank in victims:
            if "streaming" in what:
                try:
                    CALLS[what](over, 20)
                except unisono.PeerLostError:
                    time.sleep(30)  # another victim was first
            else:
                time.sleep(0.3)
            if kill:
                with open(path, "a") as file:
                    file.write(f"{time.monotonic()}\n")
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            CALLS[what](over, 2000 if kill else 20)
            if what == "receiving" and over.rank in (0, 3):
                over.send(torch.zeros(4), 3 - over.rank)
            return None
        except unisono.PeerLostError as error:
            at = time.monotonic()
            try:
                over.all_reduce(torch.ones(2))
                again = "fine"
            except unisono.PeerLostError:
                again = "PeerLostError"
            began = time.monotonic()
            over.close()
            with open(path) as file:
                since = at - min(float(line) for line in file)
            return since, error.peers, str(error), again, time.monotonic() - began


KILLS = [
    *[("2+2", what, [3]) for what in CALLS],  # neither leader
    *[("2+2", what, [2]) for what in CALLS if what != "receiving"],  # a leader
    ("interleaved", "streaming all_reduce", [0]),
    ("3 hosts", "waiting small", [2]),
    ("3 hosts", "streaming all_reduce", [3]),
    ("3 hosts", "streaming in one message", [0]),  # of more than two hosts: in two
    ("1+3", "streaming reduce_scatter", [3]),  # in no lane
    ("1+3", "waiting small", [0]),  # all of a host
    ("2+2", "waiting small", [2, 3]),
]


@pytest.mark.parametrize(("layout", "what", "victims"), KILLS)
def test_killed(layout, what, victims, tmp_path):
    said = run_ranks(4, killed, LAYOUTS[layout], what, victims, True, str(tmp_path / "at"), check=False, timeout_s=45)
    for rank, outcome in enumerate(said):
        if rank in victims:
            assert outcome.signal == signal.SIGKILL, outcome
            continue
        assert isinstance(outcome, tuple), outcome
        since, peers, text, again, closing = outcome
        print(f"rank {rank} knew after {since * 1000:.0f} ms: {text.splitlines()[0]}")
        assert set(peers) & set(victims), text
        assert "on host" in text and again == "PeerLostError"
        assert since < BOUND_S and closing < CLOSE_S


@pytest.mark.parametrize("what", [what for what in CALLS if what != "receiving"])
def test_not_killed(what, tmp_path):
    """The control: the same without a kill ends well."""
    assert run_ranks(4, killed, LAYOUTS["2+2"], what, [], False, str(tmp_path / "at"), timeout_s=45) == [None] * 4


def late(group, hosts, who):
    """One rank does not come: the others time out, and say who was silent."""
    with over_hosts(group, hosts, 30.0, together=False) as over:
        over.barrier()
        if over.rank == who:
            group.barrier()
            return ""
        began = time.monotonic()
        with pytest.raises(unisono.CollectiveTimeoutError) as caught:
            over.all_reduce(torch.ones(3), timeout_s=1.0)
        took = time.monotonic() - began
        began = time.monotonic()
        over.close()
        closing = time.monotonic() - began
        group.barrier()
        return took, closing, caught.value.peers, str(caught.value)


@pytest.mark.parametrize("who", [2, 3])
def test_a_late_rank(who):
    said = run_ranks(4, late, LAYOUTS["2+2"], who, timeout_s=45)
    for rank, outcome in enumerate(said):
        if rank != who:
            took, closing, peers, text = outcome
            assert 0.5 < took < 15 and closing < CLOSE_S, outcome  # of 30, the group's limit
            assert who in peers, text


def stuck(group, hosts, who, verb):
    """One rank gets stuck before it sends in a large call: the time-out names its host, no other."""
    with over_hosts(group, hosts, 30.0, together=False) as over:
        over.barrier()
        group.barrier()
        if over.rank == who:
            Bulk.send = lambda *_: time.sleep(3.0)
        counts = [150_000, 150_000, 150_000, 350_000]
        calls = {
            "all_reduce": lambda: over.all_reduce(torch.ones(800_000), timeout_s=1.5),
            "reduce_scatter": lambda: over.reduce_scatter(
                torch.ones(counts[over.rank]), torch.ones(800_000), counts, timeout_s=1.5
            ),
            "all_to_all": lambda: over.all_to_all(torch.ones(800_000), torch.ones(800_000), timeout_s=1.5),
        }
        with pytest.raises(unisono.CollectiveTimeoutError) as caught:
            calls[verb]()
        group.barrier()
        return caught.value.peers


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "all_to_all"])
def test_a_time_out_in_a_large_call_names_who_was_silent(verb):
    said = run_ranks(4, stuck, LAYOUTS["3 hosts"], 3, verb, timeout_s=45)
    assert set(said) == {(3,)}, said


def abort(group, hosts, who):
    with over_hosts(group, hosts, 30.0, together=False) as over:
        over.barrier()
        group.barrier()  # a rank that aborts when it is out of a barrier may meet others that are still in it
        if over.rank == who:
            over.abort("enough")
        with pytest.raises(unisono.AbortedError, match="enough") as caught:
            over.all_reduce(torch.ones(100_000))
        return str(caught.value)


@pytest.mark.parametrize("who", [0, 3])
def test_abort(who):
    assert all("enough" in text for text in run_ranks(4, abort, LAYOUTS["interleaved"], who, timeout_s=45))


def leave(group, hosts, who):
    """A rank that leaves after its last call disturbs nobody; who calls without it is told at once."""
    with over_hosts(group, hosts, 30.0, together=False) as over:
        over.all_reduce(torch.ones(100_000))
        if over.rank == who:
            over.close()
            group.barrier()
            return ""
        with pytest.raises(unisono.PeerLostError, match="left") as caught:
            over.all_reduce(torch.ones(100_000))
        group.barrier()
        return caught.value.peers


@pytest.mark.parametrize("who", [0, 1, 3])
def test_leaving(who):
    said = run_ranks(4, leave, LAYOUTS["2+2"], who, timeout_s=45)
    assert [peers for rank, peers in enumerate(said) if rank != who] == [(who,)] * 3


def pending_at_close(group, hosts):
    with over_hosts(group, hosts, 30.0, together=False) as over:
        over.barrier()
        if over.rank == 0:
            group.barrier()
            return 0.0
        handle = over.all_reduce(torch.ones(100_000), async_op=True)
        time.sleep(0.2)
        began = time.monotonic()
        over.close()
        took = time.monotonic() - began
        with pytest.raises(unisono.UnisonoError):
            handle.wait(5.0)
        group.barrier()
        return took


def test_close_with_a_call_under_way():
    assert max(run_ranks(4, pending_at_close, LAYOUTS["2+2"], timeout_s=45)) < CLOSE_S


def refilled(group, hosts):
    """After an error nobody writes into the caller's tensors any more."""
    with over_hosts(group, hosts, 30.0, together=False) as over:
        n = 400_000
        output = torch.zeros(4 * n)
        over.barrier()
        if over.rank == 3:
            group.barrier()  # the others have timed out
            with pytest.raises(unisono.UnisonoError):
                over.all_gather(output, torch.ones(n))
            return True
        with pytest.raises(unisono.CollectiveTimeoutError):
            over.all_gather(output, torch.ones(n), timeout_s=0.7)
        output.fill_(7.0)
        group.barrier()
        time.sleep(0.5)
        return bool((output == 7.0).all())


def test_nothing_is_written_after_an_error():
    assert run_ranks(4, refilled, LAYOUTS["2+2"], timeout_s=45) == [True] * 4
