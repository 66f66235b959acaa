"""Waits that end: deadlines, stopped ranks, Ctrl-C, handlers, ranks that leave; each with its control."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.faults.fresh import FreshRanks, finish

BOUND_S = 5.0  # of 30 or 60, at which a call would end; what is promised is printed, and `make faults` holds it to that
SLACK_S = 10.0  # beyond a deadline, on a loaded machine


def _expect_error(ranks, rank, kinds=None):
    said = ranks.expect(rank, "error", "fine")
    assert said["event"] == "error", f"rank {rank} got no error"
    assert kinds is None or said["kind"] in kinds, f"rank {rank}: {said['kind']}: {said['text']}"
    return said


def _let_the_late_one_fail(ranks, late):
    """Whoever comes after the group has failed is told so at once."""
    said_at = time.monotonic()
    ranks.say([late])
    said = _expect_error(ranks, late)
    assert said["at"] - said_at < BOUND_S
    return said


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("body", ["waiting", "wait_on_handle"])
@pytest.mark.parametrize("given", ["by group", "by call"])
def test_a_rank_that_never_comes(size, body, given, tmp_path):
    late = size - 1
    limits = {"group_timeout_s": 0.7} if given == "by group" else {"group_timeout_s": 60.0, "call_timeout_s": 0.7}
    with FreshRanks(size, tmp_path, body, late=[late], **limits) as ranks:
        began_at = [said["at"] for said in ranks.expect_all("inside")]  # just before its call, by the rank's own clock
        timed_out = 0
        for rank in range(late):
            began = began_at[rank]
            said = _expect_error(ranks, rank, {"CollectiveTimeoutError", "AbortedError"})
            timed_out += said["kind"] == "CollectiveTimeoutError"
            assert said["at"] - began < 0.7 + SLACK_S
            if said["kind"] == "CollectiveTimeoutError":
                assert said["at"] - began > 0.69, "too soon"
                assert f"rank {late}" in said["text"], said["text"]
                assert late in said["peers"], said
        assert timed_out, "nobody got CollectiveTimeoutError"
        _let_the_late_one_fail(ranks, late)
        finish(ranks, list(range(size)))


@pytest.mark.parametrize("body", ["waiting", "wait_on_handle"])
def test_a_rank_that_comes_late_but_in_time(body, tmp_path):
    """The control, and: a call's own deadline overrides a shorter one of the group."""
    options = {"group_timeout_s": 0.7, "call_timeout_s": 20.0}
    with FreshRanks(2, tmp_path, body, late=[1], **options) as ranks:
        ranks.expect_all("inside")
        ranks.wait_until_blocked(0, 1.2)
        ranks.say([1])
        ranks.expect_all("fine")
        finish(ranks, [0, 1])


@pytest.mark.parametrize("size", [2, 3])
def test_a_stopped_rank_is_called_stopped(size, tmp_path):
    late = size - 1
    with FreshRanks(size, tmp_path, "waiting", late=[late], group_timeout_s=3.0) as ranks:
        ranks.expect_all("inside")
        ranks.signal([late], signal.SIGSTOP)
        texts = [_expect_error(ranks, rank)["text"] for rank in range(late)]
        assert any("stopped" in text for text in texts), texts
        ranks.signal([late], signal.SIGCONT)
        _let_the_late_one_fail(ranks, late)
        finish(ranks, list(range(size)))


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_goes_on_in_time(size, tmp_path):
    with FreshRanks(size, tmp_path, "waiting", late=[size - 1], group_timeout_s=20.0) as ranks:
        ranks.expect_all("inside")
        ranks.signal([size - 1], signal.SIGSTOP)
        ranks.say([size - 1])
        ranks.wait_until_blocked(0, 0.5)
        ranks.signal([size - 1], signal.SIGCONT)
        ranks.expect_all("fine")
        finish(ranks, list(range(size)))


@pytest.mark.parametrize("rounds", [None, 30], ids=["fault", "control"])
def test_stopped_in_the_middle_of_large_calls(rounds, tmp_path):
    """Stopped for a while inside a stream of all_reduces: in time nothing is lost, else a timeout."""
    timeout_s = 4.0 if rounds is None else 30.0
    options = {"bytes": 16 << 20, "rounds": rounds, "group_timeout_s": timeout_s}
    with FreshRanks(2, tmp_path, "streaming", **options) as ranks:
        ranks.expect_all("inside")
        ranks.signal([1], signal.SIGSTOP)
        if rounds is None:
            said = _expect_error(ranks, 0, {"CollectiveTimeoutError"})
            assert "stopped" in said["text"], said["text"]
            ranks.signal([1], signal.SIGCONT)
            _expect_error(ranks, 1)
        else:
            ranks.wait_until_blocked(0, 0.3)
            ranks.signal([1], signal.SIGCONT)
            ranks.expect_all("fine")
        finish(ranks, [0, 1])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("body", ["waiting", "wait_on_handle"])
def test_ctrl_c_leaves_a_wait_at_once(size, body, tmp_path, measured):
    late = size - 1
    with FreshRanks(size, tmp_path, body, late=[late], group_timeout_s=30.0) as ranks:
        ranks.expect_all("inside")
        ranks.wait_until_blocked(0)
        pressed_at = ranks.signal([0], signal.SIGINT)
        said = ranks.expect(0, "interrupted", "error", "fine")
        assert said["event"] == "interrupted", said
        measured(said["at"] - pressed_at)
        assert said["at"] - pressed_at < BOUND_S
        for rank in range(1, late):  # those who wait too are told
            other = _expect_error(ranks, rank)
            measured(other["at"] - pressed_at)
            assert other["at"] - pressed_at < BOUND_S
        _let_the_late_one_fail(ranks, late)
        finish(ranks, list(range(size)))


def test_a_signal_handler_runs_and_the_wait_goes_on(tmp_path, measured):
    """The control to Ctrl-C: a handler that raises nothing does not end the wait."""
    with FreshRanks(2, tmp_path, "signalled", late=[1], group_timeout_s=30.0) as ranks:
        ranks.expect_all("inside")
        ranks.wait_until_blocked(0)
        sent_at = ranks.signal([0], signal.SIGUSR1)
        ran = ranks.expect(0, "handler ran")
        measured(ran["at"] - sent_at)
        ranks.say([1])
        ranks.expect_all("fine")
        finish(ranks, [0, 1])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("how", ["exception", "sys.exit", "os._exit", "close"])
def test_a_rank_that_leaves(size, how, tmp_path, measured):
    late = size - 1
    with FreshRanks(size, tmp_path, "leaving", late=[late], how=how) as ranks:
        ranks.expect_all("inside")
        ranks.wait_until_blocked(0)
        ranks.say([late])
        left_at = ranks.expect(late, "leaving")["at"]
        for rank in range(late):
            said = _expect_error(ranks, rank)
            assert late in said["peers"] or f"rank {late}" in said["text"], said
            assert said["kind"] == "PeerLostError" or "left" in said["text"], said
            measured(said["at"] - left_at)
            assert said["at"] - left_at < 2 * BOUND_S  # Python's own exit is part of it
        if how == "close":
            finish(ranks, list(range(size)))
        else:
            finish(ranks, list(range(late)))
            assert ranks.join([late]) == [{"exception": 1, "sys.exit": 3, "os._exit": 0}[how]]


def test_nobody_leaves(tmp_path):
    """The control to the above."""
    with FreshRanks(3, tmp_path, "leaving", late=[2], how="not at all") as ranks:
        ranks.expect_all("inside")
        ranks.say([2])
        ranks.expect_all("fine")
        finish(ranks, [0, 1, 2])


@pytest.mark.parametrize("closes", [False, True])
def test_the_interpreter_ends_with_work_in_flight(closes, tmp_path):
    """Rank 0 falls off the end of its script with a call that cannot complete: exit code 0, no noise."""
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
        import sys, torch, unisono
        from torch.distributed import FileStore
        rank, path, closes = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
        group = unisono.Group.from_store(FileStore(path, 2), rank, 2, timeout_s=60)
        if rank == 0:
            handle = group.all_reduce(torch.ones(100_000), async_op=True)
            if closes:
                group.close()
            print("end of script", flush=True)
        else:
            print("joined", flush=True)
            sys.stdin.read()
        """)
    )
    command = [sys.executable, str(script)]
    first, second = (
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(closes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    )
    try:
        out, err = first.communicate(timeout=60)
        assert "end of script" in out, err
        assert first.returncode == 0, f"exit code {first.returncode}: {err}"
        assert "Traceback" not in err and "terminate" not in err, err
        assert second.poll() is None, "the other rank died too"
        _, err = second.communicate("", timeout=60)
        assert second.returncode == 0, err
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
