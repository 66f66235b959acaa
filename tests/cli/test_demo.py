"""The demo fits on one screen, shows what it promises, and says what to try next."""

import subprocess
import sys


def test_demo():
    command = [sys.executable, "-m", "unisono", "demo", "--seconds", "0.01"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert "checked: equal to the reference on every rank" in lines
    assert sum("×" in line for line in lines) == 6
    assert lines[-4].startswith("Next") and len(lines[-3:]) == 3
    assert "\033" not in done.stdout  # no colours but on a terminal
