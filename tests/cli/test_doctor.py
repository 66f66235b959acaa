"""`unisono doctor` finds a healthy machine healthy, and says what to do about one that is not."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from unisono import cli, doctor


@pytest.mark.timeout(600)  # three starts of two ranks, each of which may take a minute on a very busy machine
def test_healthy_machine(capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    by_name = {f["name"]: f for f in report["findings"]}
    assert len(by_name) == len(doctor.CHECKS)
    for name in ("shared memory", "single copy", "torch backend", "gloo groups", "several hosts"):
        assert by_name[name]["status"] == "ok", by_name[name]["found"]


def broken(group):
    raise RuntimeError("no memory here")


def test_a_failing_rank_fails_the_check_and_the_command(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_try_paths", broken)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_versions, doctor.check_paths))
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "no memory here" in printed and "2 checks: failed: shared memory" in printed


def test_a_check_that_breaks_down_is_a_finding(monkeypatch, capsys):
    def check_nothing():
        raise OSError("gone")

    monkeypatch.setattr(doctor, "CHECKS", (check_nothing,))
    assert doctor.main([]) == 1
    assert "OSError: gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    "check, change, cure",
    [
        (doctor.check_cores, ("processors_allowed", lambda: 0.5), "allow more cores"),
        (doctor.check_memory, ("memory_available", lambda: 1 << 20), "raise the memory limit"),
        (doctor.check_cpu, ("isa", lambda: "scalar"), "AVX2"),
    ],
)
def test_each_problem_has_a_cure(check, change, cure, monkeypatch):
    monkeypatch.setattr(doctor._core, *change)
    finding = check()
    assert finding.status == "warn" and cure in finding.cure


def test_few_files(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (64, 4096))
    assert "ulimit -n 4096" in doctor.check_files().cure


def test_timing_ends_beside_busy_programs(monkeypatch):
    def slow_all_reduce(tensor, op="sum"):
        time.sleep(0.01)

    group = SimpleNamespace(barrier=lambda: None, all_reduce=slow_all_reduce)
    monkeypatch.setattr(doctor, "_TIMING_S", 0.1)
    start = time.perf_counter()
    assert doctor._time_small(group) > 1e4  # in µs
    assert time.perf_counter() - start < 60  # one round, not 200, which take 100 s and more


def test_wrong_values_are_noticed():
    import torch

    with pytest.raises(AssertionError, match="1 of 3 elements"):
        doctor._expect(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]), "all_reduce")


def test_module_is_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = subprocess.run([sys.executable, "-m", "unisono", "--help"], capture_output=True, text=True, timeout=110)
    assert shown.stdout == capsys.readouterr().out and "doctor" in shown.stdout
