"""What ranks tell one another before a composed call moves data, and how they find out that they disagree."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import torch
from torch.distributed import ProcessGroup

from .. import _core
from ..base.errors import call_site, make_error

OP_NAMES = {code: name for name, code in _core.OPS.items()}
NO_OP = -1

_MISMATCH = 1  # its number in errors.py and core/base/status.h
_HEAD = struct.Struct("<8sdH")
_KNOWN_COUNTS = 64  # lists up to this length are remembered; matrices of many ranks take much memory and change


class Request:
    """What one rank was asked for, in 256 bytes: a digest that must be equal, a factor that may differ, and words."""

    BYTES = 256

    def __init__(self, verb: str, dtype: torch.dtype, op: int, counts: Sequence[int], factor: float = 1.0) -> None:
        self.verb = verb
        find = _known_facts if len(counts) <= _KNOWN_COUNTS else _facts
        self.digest, facts = find(verb, dtype, op, tuple(counts))
        words = f"{facts}   {call_site()}".encode()[: self.BYTES - _HEAD.size]
        self.bytes = _HEAD.pack(self.digest, factor, len(words)) + words.ljust(self.BYTES - _HEAD.size, b"\0")


def _facts(verb: str, dtype: torch.dtype, op: int, counts: tuple[int, ...]) -> tuple[bytes, str]:
    """What must be equal: as a digest, and in words, which are cut at some length."""
    facts = f"{verb}  {str(dtype)[6:]}  " + ("" if op == NO_OP else f"{OP_NAMES[op]}  ")
    listed = str(list(counts))
    digest = blake2b((facts + listed).encode(), digest_size=8).digest()
    return digest, facts + (listed if len(listed) < 120 else listed[:116] + " ...")


_known_facts = lru_cache(maxsize=64)(_facts)


def compare(pg: ProcessGroup, seq: int, request: Request, letters: Sequence[bytes]) -> list[float]:
    """The factors of all ranks, or MismatchError if any was asked for something else.

    ``letters`` are by rank, each beginning with a request's bytes.
    """
    differing = [rank for rank, letter in enumerate(letters) if letter[: len(request.digest)] != request.digest]
    if differing:
        text = "ranks were asked for different things"
        lines = [_words(letter) for letter in letters]
        raise make_error(_MISMATCH, request.verb, seq, pg.group_name, pg.rank(), differing, text, lines, False)
    return [_HEAD.unpack_from(letter)[1] for letter in letters]


def _words(letter: bytes) -> str:
    length = _HEAD.unpack_from(letter)[2]
    return letter[_HEAD.size : min(_HEAD.size + length, Request.BYTES)].decode(errors="replace")
