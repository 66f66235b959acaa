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
NO_OP = -1

_MISMATCH = 1  # its number in errors.py and core/status.h
_HEAD = struct.Struct("<8sdH")


class Request:
    """What one rank was asked for, in 256 bytes: a digest that must be equal, a factor that may differ, and words."""

    BYTES = 256

    def __init__(self, verb: str, dtype: torch.dtype, op: int, counts: Sequence[int], factor: float = 1.0) -> None:
        self.verb = verb
        facts = f"{verb}  {str(dtype)[6:]}  " + ("" if op == NO_OP else f"{OP_NAMES[op]}  ")
        listed = str(list(counts))
        self.digest = blake2b((facts + listed).encode(), digest_size=8).digest()
        # The words are cut at some length, the digest knows all counts.
        words = f"{facts}{listed if len(listed) < 120 else listed[:116] + ' ...'}   {call_site()}"
        encoded = words.encode()[: self.BYTES - _HEAD.size]
        self.bytes = _HEAD.pack(self.digest, factor, len(encoded)) + encoded.ljust(self.BYTES - _HEAD.size, b"\0")


def compare(pg: ProcessGroup, seq: int, request: Request, letters: Sequence[bytes]) -> list[float]:
    """The factors of all ranks, or MismatchError if any was asked for something else.

    ``letters`` are by rank, each beginning with a request's bytes.
    """
    factors, lines, differing = [], [], []
    for rank, letter in enumerate(letters):
        digest, factor, length = _HEAD.unpack_from(letter)
        factors.append(factor)
        lines.append(letter[_HEAD.size : min(_HEAD.size + length, Request.BYTES)].decode(errors="replace"))
        if digest != request.digest:
            differing.append(rank)
    if differing:
        text = "ranks were asked for different things"
        raise make_error(_MISMATCH, request.verb, seq, pg.group_name, pg.rank(), differing, text, lines, False)
    return factors
