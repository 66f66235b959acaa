"""What ranks tell one another before a composed call moves data, and how they find out that they disagree."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch.distributed import ProcessGroup

from . import _core
from .errors import call_site, make_error

OP_NAMES = {code: name for name, code in _core.OPS.items()}
_MISMATCH = 1  # its number in errors.py and core/status.h


def spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Where each chunk starts and ends in the whole."""
    edges, at = [], 0
    for count in counts:
        edges.append((at, at + count))
        at += count
    return edges


def copy_unless_same(to: torch.Tensor, source: torch.Tensor) -> None:
    if source.numel() and to.data_ptr() != source.data_ptr():
        to.copy_(source)


class Request:
    """What one rank was asked for, in 256 bytes: a digest that must be equal, a factor that may differ, and words."""

    BYTES = 256

    def __init__(self, verb: str, dtype: torch.dtype, op: int, counts: Sequence[int], factor: float = 1.0) -> None:
        self.verb = verb
        facts = f"{verb}  {str(dtype)[6:]}  " + ("" if op < 0 else f"{OP_NAMES[op]}  ")
        # The words are cut at some length, the digest knows all counts.
        self.digest = blake2b(f"{facts}{list(counts)}".encode(), digest_size=8).digest()
        shown = str(list(counts))
        words = f"{facts}{shown if len(shown) < 120 else shown[:116] + ' …'}   {call_site()}"
        self.bytes = bytearray(self.BYTES)
        encoded = words.encode()[: self.BYTES - 18]
        struct.pack_into(f"<8sdH{len(encoded)}s", self.bytes, 0, self.digest, factor, len(encoded), encoded)

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self.bytes, dtype=torch.uint8)


def compare(pg: ProcessGroup, seq: int, request: Request, shown: Sequence[torch.Tensor]) -> list[float]:
    """The factors of all ranks, or MismatchError if any was asked for something else. ``shown`` is by rank."""
    factors, lines, differing = [], [], []
    for rank, letter in enumerate(shown):
        data = bytes(letter.tolist())
        digest, factor, length = struct.unpack_from("<8sdH", data)
        factors.append(factor)
        lines.append(data[18 : 18 + length].decode(errors="replace"))
        if digest != request.digest:
            differing.append(rank)
    if differing:
        name = getattr(pg, "group_name", "")
        text = "ranks were asked for different things"
        raise make_error(_MISMATCH, request.verb, seq, name, pg.rank(), differing, text, lines, False)
    return factors
