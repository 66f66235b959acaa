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
        return [*lines, "# not measured: this process may use one processor only"]
    lines.append(f"# now:     {_words(now)}{'' if now['complete'] else ' (the machine is too busy: not kept)'}")
    lines.append("#")
    lines.append("# two threads exchange so many bytes, the least of five rounds, us")
    lines += [f"{show_bytes(size):>10} {time:10.1f}  {way}" for way, size, time in now["times"]]
    return lines


def _words(tuning: dict[str, object]) -> str:
    if not tuning["known"]:
        return "not known"
    starts = {"all else": tuning["single_copy_from"], "all_reduce": tuning["single_reduce_from"]}
    single = ", ".join(f"{what} {f'from {show_bytes(int(str(n)))} on' if n else 'never'}" for what, n in starts.items())
    single = f"read where they are: {single}"
    ring, piece = (show_bytes(int(str(tuning[name]))) for name in ("ring_bytes", "piece_bytes"))
    return f"{single}; ring of {ring}, pieces up to {piece}"
