"""How a cause travels inside a host, in a line of the core: as fields, whatever the words are."""

import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unisono
from tests.multihost.pretended import LAYOUTS, over_hosts
from unisono.testing import run_ranks
from unisono.transport.hosts.control import ABORTED, Cause

LINE_BYTES = 175


@given(
    st.text(max_size=300), st.lists(st.integers(0, 4000), max_size=20), st.sampled_from(["", " (reported by rank 3)"])
)
def test_a_cause_is_read_as_it_was_written(text, peers, behind):
    cause = Cause(ABORTED, tuple(peers), text)
    written = cause.written(77)
    assert len(written.encode(errors="replace")) <= LINE_BYTES
    read = Cause.read(written + behind, 77)
    assert read is not None and read.code == ABORTED and read.peers == cause.peers[:8]
    assert text.encode(errors="replace").decode(errors="replace").startswith(read.text)
    assert read.text == text or len(text.encode(errors="replace")) > 90


def test_other_words_are_not_a_cause():
    for text in ("", "hosts:4:1:boo", "rank 1 aborted: " + Cause(ABORTED, (1,), "x").written(77)):
        assert Cause.read(text, 77) is None
    assert Cause.read(Cause(ABORTED, (1,), "x").written(78), 77) is None


def misleading(group):
    """Words that look like a cause, and name ranks: told as they are on every rank."""
    with over_hosts(group, LAYOUTS["interleaved"], 30.0, together=False) as over:
        over.barrier()
        group.barrier()
        if over.rank == 2:
            over.abort("hosts:2:0:rank 1 of 7 left (reported by rank 0)")
        with pytest.raises(unisono.AbortedError) as caught:
            over.all_reduce(torch.ones(100_000))
        return caught.value.peers, "hosts:2:0:rank 1 of 7 left (reported by rank 0)" in str(caught.value)


def test_misleading_words():
    assert run_ranks(4, misleading, timeout_s=45) == [((2,), True)] * 4


def stopped(group):
    """Rank 3 is rank 1 inside its host, and is stopped: the error has its number in the group."""
    with over_hosts(group, LAYOUTS["interleaved"], 30.0, together=False) as over:
        over.barrier()
        if over.rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        pid = over.transport.pids[3]
        with pytest.raises(unisono.CollectiveTimeoutError) as caught:
            over.broadcast(torch.ones(100_000), 1, timeout_s=1.5)
        if pid:  # it is rank 1, of the same host; the others have theirs
            for r in (0, 2):
                group.recv(torch.zeros(1), r)
            os.kill(pid, signal.SIGCONT)
        else:
            group.send(torch.zeros(1), 1)
        return caught.value.peers, str(caught.value)


def test_a_stopped_rank_is_named():
    said = run_ranks(4, stopped, timeout_s=45)
    for outcome in said[:3]:
        peers, text = outcome
        print(text)
        assert 3 in peers and ("rank 3 on host 1" in text or "ranks 1, 3" in text), text
