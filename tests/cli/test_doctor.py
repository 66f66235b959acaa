"""`unisono doctor` finds a healthy machine healthy, and says what to do about one that is not."""

import json
import subprocess
import sys

import pytest

from unisono import doctor


def test_healthy_machine(capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    by_name = {f["name"]: f for f in report["findings"]}
    assert len(by_name) == len(doctor.CHECKS)
    for name in ("shared memory", "torch backend", "gloo groups"):
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


def test_wrong_values_are_noticed():
    import torch

    with pytest.raises(AssertionError, match="1 of 3 elements"):
        doctor._expect(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]), "all_reduce")


def test_module_is_the_command():
    shown = [
        subprocess.run([sys.executable, "-m", name, "--help"], capture_output=True, text=True, timeout=60).stdout
        for name in ("unisono", "unisono.cli")
    ]
    assert shown[0] == shown[1] and "doctor" in shown[0]
