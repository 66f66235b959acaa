"""`unisono bench --tuning`: what ordinary tensors go by on this kind of machine, measured anew and kept."""

from __future__ import annotations

from unisono import _core

from .table import show_bytes


def tuning_lines() -> list[str]:
    """What was known before, a measurement, and what follows from it."""
    before = _core.tuning()
    now = _core.tuning(measure=True)
    lines = [
        f"# machine: {now['machine'].strip()}",
        f"# kept in: {now['file'] or 'nowhere, there is no folder for it'}",
    ]
    lines.append(f"# before:  {_words(before)}")
    if not now["times"]:
        return [*lines, "# not measured: this process may use one processor only, or the machine is too busy"]
    lines.append(f"# now:     {_words(now)}{'' if now['complete'] else ' (the machine is too busy: not kept)'}")
    lines.append("#")
    lines.append("# two threads exchange so many bytes, by turns, the least of some rounds, us")
    lines += [f"{show_bytes(size):>10} {time:10.1f}  {way}" for way, size, time in now["times"]]
    return lines


def _words(tuning: dict[str, object]) -> str:
    if not tuning["known"]:
        return "not known"
    sizes = {name: show_bytes(n) for name, n in tuning.items() if isinstance(n, int)}

    def reading(what: str) -> str:
        start, end = f"single_{what}_from", f"single_{what}_below"
        if not tuning[start]:
            return "never"
        return f"from {sizes[start]} " + (f"to {sizes[end]}" if tuning[end] else "on")

    single = f"read where they are: all else {reading('copy')}, all_reduce {reading('reduce')}"
    ring, piece = sizes["ring_bytes"], sizes["piece_bytes"]
    return f"{single}; ring of {ring}, pieces up to {piece}"
