"""The peers' protocol, with a made-up peer: turns, lacks, deaths, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unisono.bench import peers, setup_peers
from unisono.bench.apart.cases import Case, Lacking
from unisono.bench.peers import PEERS, start_team, start_teams

CASE = Case("all_reduce", 10, (5, 5))


@pytest.fixture
def team_of(fake_peer, tmp_path):
    """A started team of two fake ranks."""
    teams = []

    def start(how):
        fake_peer(how)
        team = start_team(PEERS["mpich"], PEERS["mpich"].settings(False)[0], 2, str(tmp_path))
        teams.append(team)
        team.join()
        return team

    yield start
    for team in teams:
        team.close()
        assert team.process.poll() is not None


def ranks_of(team):
    """Pids of the fake ranks, below the launcher."""
    return [int(pid) for pid in Path(f"/proc/{team.process.pid}/task/{team.process.pid}/children").read_text().split()]


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("op", ["ddp_step", "matmul_all_reduce"])
def test_what_only_torch_has_is_lacking_and_ends_nobody(team_of, op):
    team = team_of("good")
    with pytest.raises(Lacking, match=f"it has no {op}"):
        team.prepare(Case(op, 10, (5, 5)))
    assert team.prepare(CASE) == (0, 1e-6)


def test_turns(team_of):
    team = team_of("good")
    assert team.library == "Fake MPI 1.2.3"
    assert team.prepare(CASE) == (0, 1e-6)
    assert team.run(1, 5) == pytest.approx(20e-6)  # the slower of the two ranks
    team.drop()
    assert team.prepare(Case("barrier", 0, (0, 0)))[0] == 0
    assert team.alive


def test_wrong_elements_of_all_ranks(team_of):
    assert team_of("wrong").prepare(CASE)[0] == 6


def test_lacking(team_of):
    team = team_of("lacking")
    with pytest.raises(Lacking, match="no all_reduce here"):
        team.prepare(CASE)
    assert team.alive


def test_waiting_burns_no_time(team_of):
    team = team_of("good")
    team.prepare(CASE)

    def ticks():
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in ranks_of(team)]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats)

    before = ticks()
    time.sleep(0.5)
    assert ticks() - before <= 1


def test_a_rank_that_dies_ends_its_team(team_of):
    team = team_of("dies")
    team.prepare(CASE)
    pids = ranks_of(team)
    with pytest.raises(Lacking, match="lost in run"):
        team.run(0, 1)
    assert not team.alive
    with pytest.raises(Lacking, match="ended before"):
        team.run(0, 1)
    wait_until(lambda: all(map(is_gone, pids)))


def test_a_hung_team_is_given_up(team_of, monkeypatch):
    monkeypatch.setattr(peers, "SILENCE_S", 0.3)
    team = team_of("hangs")
    team.prepare(CASE)
    pids = ranks_of(team)
    with pytest.raises(Lacking, match="lost in run"):
        team.run(0, 1)
    wait_until(lambda: all(map(is_gone, pids)))


def test_ranks_end_with_their_leader(fake_peer, tmp_path):
    """A leader killed in the middle of a turn leaves no spinning ranks behind."""
    fake_peer("hangs")
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with leader:
        try:
            pids = [int(pid) for pid in leader.stdout.readline().split()]
            assert len(pids) == 2 and not any(map(is_gone, pids))
        finally:
            os.killpg(leader.pid, signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, pids)))


LEADER = """
import sys, threading
from unisono.bench.peers import PEERS, start_team
from unisono.bench.apart.cases import Case
team = start_team(PEERS["mpich"], PEERS["mpich"].settings(False)[0], 2, sys.argv[1])
team.join()
team.prepare(Case("all_reduce", 10, (5, 5)))
print(open(f"/proc/{team.process.pid}/task/{team.process.pid}/children").read(), flush=True)
team.run(0, 1)
"""


def test_not_set_up(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    teams, lacks = start_teams(["openmpi"], 2, False, str(tmp_path))
    assert teams == {} and "unisono bench --setup-peers" in lacks["openmpi"]


def test_a_peer_that_cannot_start(fake_peer, tmp_path):
    fake_peer("good")
    mpiexec = PEERS["mpich"].folder / "bin" / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho 'error: no fabric here' >&2\nexit 3\n")
    teams, lacks = start_teams(["mpich"], 2, False, str(tmp_path))
    assert teams == {} and "no fabric here" in lacks["mpich"]


def test_settings_name_what_peers_need():
    """More ranks than CPUs: every MPI gets its yielding, and Open MPI its permission to start at all."""
    for name in PEERS:
        roomy, crowded = (PEERS[name].settings(c)[0] for c in (False, True))
        assert (roomy.launch, roomy.env) != (crowded.launch, crowded.env)
    assert "-bind-to" not in PEERS["mpich"].settings(True)[0].launch
    assert [setting.name for setting in PEERS["openmpi"].settings(False)] == ["default", "coll sm", "coll han"]


class TestSetup:
    """Setting peers up, with the commands that would be run written down instead."""

    @pytest.fixture
    def commands(self, tmp_path, monkeypatch):
        run = []

        def write_down(step, command):
            run.append((step, command))
            PEERS["oneccl"].folder.mkdir(parents=True, exist_ok=True)
            return json.dumps([{"name": "impi-rt", "version": "1"}, {"name": "other", "version": "2"}]) + "\n"

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(setup_peers, "_run", write_down)
        return run

    def test_once(self, commands, capsys):
        assert setup_peers.setup_peers(["oneccl"]) == 0
        steps = [step for step, _ in commands]
        assert steps == ["environment", "wheels", "wheels on their own", "compiling", "versions"]
        assert "impi-rt 1" in capsys.readouterr().out and PEERS["oneccl"].facts()["versions"] == ["impi-rt 1"]
        commands.clear()
        assert setup_peers.setup_peers(["oneccl"]) == 0
        assert commands == [] and "there already" in capsys.readouterr().out

    def test_a_failure_is_told_and_not_taken_for_done(self, commands, monkeypatch, capsys):
        def fail(step, command):
            raise setup_peers.SetupFailed(f"{step}: no network")

        monkeypatch.setattr(setup_peers, "_run", fail)
        assert setup_peers.setup_peers(["mpich", "openmpi"]) == 2
        assert capsys.readouterr().out.count("FAILED, environment: no network") == 2
        assert PEERS["mpich"].facts() is None

    def test_last_words_of_a_step(self):
        with pytest.raises(setup_peers.SetupFailed, match="step: ERROR: nothing there"):
            setup_peers._run("step", ["sh", "-c", "echo hello; echo ERROR: nothing there >&2; echo bye >&2; exit 1"])
        with pytest.raises(setup_peers.SetupFailed, match="no-such-program is not installed"):
            setup_peers._run("step", ["no-such-program"])
