"""How cost grows with the number of ranks: a table by ranks and size, and the memory that groups take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .contenders import KINDS
from .ratios import short
from .table import show_bytes, show_us

if TYPE_CHECKING:
    from unisono.group.group import Group

SCALING_RANKS = (1, 2, 4, 8, 16, 32, 64)
SCALING_SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20, 1 << 30)
GROUPS = 4  # made at once, so that what one costs stands out from the noise of a process
IDLE_MEMORY_BYTES = 1 << 20  # promised per rank and group


def held_bytes() -> int:
    """Memory of this process: its share of every page it touched; of its heap, also pages nobody touched yet."""
    shares: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Pss_Anon", "Pss_Shmem"):
            shares[name] = int(rest.split()[0]) << 10
    heaps: dict[int, int] = {}  # of this rank and of its peers, which it holds open: by inode
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "memfd:unisono" in os.readlink(f"/proc/self/fd/{fd}"):
                found = os.stat(f"/proc/self/fd/{fd}")
                heaps[found.st_ino] = found.st_blocks * 512
        except OSError:
            continue  # the listing's own fd
    reserved = sum(heaps.values()) // max(len(heaps), 1)
    return shares.get("Pss_Anon", 0) + max(shares.get("Pss_Shmem", 0), reserved)


def group_memory(group: Group) -> dict[str, Any]:
    """Bytes that one more group costs each rank while it is idle: the mean over ranks, and the most."""
    everybody = list(range(group.size))
    groups: list[Any] = []

    def grow() -> int:
        for _ in range(GROUPS):
            made = group.split(everybody)
            assert made is not None
            made.barrier()
            groups.append(made)
        group.barrier()
        held = held_bytes()
        group.barrier()
        return held

    before = grow()  # what only the first groups of a process cost is no part of it
    mine = torch.tensor([(grow() - before) / GROUPS], dtype=torch.float64)
    shown = torch.empty(group.size, dtype=torch.float64)
    group.all_gather(shown, mine)
    for made in groups:
        made.close()
    return {"mean_bytes": float(shown.mean()), "most_bytes": float(shown.max())}


def scaling_lines(document: dict[str, Any]) -> list[str]:
    """Time by ranks (down) and size (across), then time ÷ limit, for every operation and split; and memory."""
    lines: list[str] = []
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in document["rows"]:
        tables.setdefault((row["op"], row["split"]), []).append(row)
    for (op, split), rows in tables.items():
        ranks = sorted({row["ranks"] for row in rows})
        sizes = sorted({_nominal(row) for row in rows})
        kind = next((kind for kind in KINDS if any(kind in row.get("results", {}) for row in rows)), KINDS[0])
        cells = {(row["ranks"], _nominal(row)): row.get("results", {}).get(kind) for row in rows}
        split_text = "" if split in ("-", "even") else f", split {split}"
        for text, value in (("time (us)", "time_us"), ("time / limit", "times_limit")):
            lines.append(f"# {op}{split_text}, {kind} tensors, {text} by ranks and size")
            lines.append(f"#{'ranks':>7}" + "".join(f"{show_bytes(size):>11}" for size in sizes))
            for n in ranks:
                found = [cells.get((n, size)) for size in sizes]
                show = show_us if value == "time_us" else short
                texts = ["-" if cell is None or cell[value] is None else show(cell[value]) for cell in found]
                lines.append(f"#{n:>7}" + "".join(f"{text:>11}" for text in texts))
            lines.append("#")
    lines.append(f"# memory per rank of one more group, idle (promised: at most {show_bytes(IDLE_MEMORY_BYTES)})")
    lines.append(f"#{'ranks':>7}{'mean':>11}{'most':>11}")
    for n, cost in document["memory"].items():
        verdict = "met" if cost["most_bytes"] <= IDLE_MEMORY_BYTES else "MISSED"
        lines.append(f"#{n:>7}{show_bytes(cost['mean_bytes']):>11}{show_bytes(cost['most_bytes']):>11}  {verdict}")
    return lines


def _nominal(row: dict[str, Any]) -> int:
    """The power of two a size stands for: equal chunks round sizes up a little."""
    return 1 << (int(row["size_bytes"]) * 4 // 3).bit_length() - 1 if row["size_bytes"] else 0
