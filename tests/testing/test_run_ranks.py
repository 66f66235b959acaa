"""`unisono.testing`, which users get too: results by rank, every failure shown, never a hang, nothing left behind."""

import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
import torch

from unisono.testing import RankPool, RanksFailed, run_ranks


def who(group, word):
    return group.rank, group.size, word, os.getpid(), os.environ.get("UNISONO_TEST_WORD")


def total(group, x):
    t = torch.full((3,), x)
    group.all_reduce(t)
    return t.tolist()


def one_is_bad(group):
    if group.rank == 1:
        raise ValueError("rank one is bad")
    return "fine"


def die(group, how):
    if group.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "crash":
            ctypes.string_at(0)
        elif how == "exit":
            os._exit(3)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
    return "alive"


def not_picklable(group):
    return lambda: group


def larger(group, tensor):
    return tensor + group.rank


def say(group):
    # One write each: where Python does not buffer, print() writes piece by piece, and ranks that print at once mix.
    sys.stdout.write(f"out of {group.rank}\n")
    sys.stderr.write(f"err of {group.rank}\n")


@pytest.fixture(autouse=True)
def no_folder_left(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not list(folder.iterdir())


def test_results_come_by_rank_from_the_callers_environment(monkeypatch):
    for n in (1, 3):
        monkeypatch.setenv("UNISONO_TEST_WORD", f"w{n}")
        results = run_ranks(n, who, "x")
        assert [r[:3] + r[4:] for r in results] == [(k, n, "x", f"w{n}") for k in range(n)]
        assert len({r[3] for r in results} | {os.getpid()}) == n + 1
    assert run_ranks(1, who, "x", env={"UNISONO_TEST_WORD": "own"})[0][4] == "own"


def test_ranks_share_a_group():
    assert run_ranks(2, total, 1.5) == [[3.0] * 3] * 2


def test_every_failure_is_shown():
    with pytest.raises(RanksFailed, match="rank one is bad") as caught:
        run_ranks(3, one_is_bad)
    assert caught.value.failures[1].error == "ValueError" and "in one_is_bad" in str(caught.value)
    assert caught.value.results == {0: "fine", 2: "fine"}


@pytest.mark.parametrize("how, number", [("kill", signal.SIGKILL), ("crash", signal.SIGSEGV)])
def test_a_signal_is_named(how, number):
    results = run_ranks(2, die, how, check=False)
    assert results[0] == "alive" and results[1].signal == number
    assert how != "crash" or "string_at" in results[1].traceback


def test_an_exit_code_is_kept():
    assert run_ranks(2, die, "exit", check=False)[1].exit_code == 3


@pytest.mark.parametrize("how", ["hang", "stop"])
def test_a_deadline_ends_it(how):
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="deadline") as caught:
        run_ranks(2, die, how, timeout_s=3.0)  # the other rank is to be done by then
    assert time.monotonic() - began < 20
    assert list(caught.value.failures) == [1]
    assert how != "hang" or "in die" in str(caught.value), "the stack at the deadline is shown"


def test_what_cannot_be_sent_is_said():
    with pytest.raises(TypeError, match="top level"):
        run_ranks(2, lambda group: 1)
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(2, not_picklable)


def test_large_arguments_and_results():
    t = torch.randn(5_000_000)
    results = run_ranks(2, larger, t)
    assert torch.equal(results[1], t + 1)


def test_output_reaches_the_caller(capfd):
    run_ranks(2, say)
    out, err = capfd.readouterr()
    assert "out of 1" in out and "err of 0" in err


def test_a_pool_keeps_its_ranks_and_replaces_dead_ones():
    with RankPool(2) as pool:
        first = pool.run(who, "x")
        assert pool.run(who, "x") == first
        with pytest.raises(RanksFailed):
            pool.run(die, "kill")
        assert pool.run(total, 1.0) == [[2.0] * 3] * 2
        assert pool.run(total, 1.0, own_group=True) == [[2.0] * 3] * 2
        assert pool.run(who, "x") != first


def test_no_descriptor_is_left():
    run_ranks(2, total, 1.0)
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run_ranks(2, total, 1.0)
    assert sorted(os.listdir("/proc/self/fd")) == before


def _alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_ranks_die_with_their_caller(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, time
        from unisono.testing import run_ranks

        def tell(group):
            with open(f"{sys.argv[1]}/{group.rank}", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"{sys.argv[1]}/{group.rank}", f"{sys.argv[1]}/pid{group.rank}")
            time.sleep(600)

        if __name__ == "__main__":
            run_ranks(2, tell, timeout_s=500)
        """)
    )
    caller = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        files = [tmp_path / f"pid{r}" for r in range(2)]
        while not all(f.exists() for f in files):
            assert time.monotonic() < deadline and caller.poll() is None, "the ranks did not start"
            time.sleep(0.05)
        pids = [int(f.read_text()) for f in files]
        assert all(_alive(pid) for pid in pids)
    finally:
        caller.kill()
        caller.wait()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its caller"
        time.sleep(0.05)
