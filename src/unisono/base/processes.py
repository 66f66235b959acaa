"""What the kernel says of processes."""

from __future__ import annotations


def process_state(pid: int) -> str:
    """What the kernel says of a process: "running", "sleeping", "stopped", "gone", or a rarer state's letter."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            # After the name, which is in parentheses and may hold anything.
            letter = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"R": "running", "S": "sleeping", "T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(
        letter, letter
    )
