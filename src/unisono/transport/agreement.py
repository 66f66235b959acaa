"""What ranks tell one another before a call on another backend moves data, and how they find out that they disagree.

A request has a digest, which must be equal on all ranks, a factor that may differ, words for an error, and for an
exchange a table: what this rank sends to and expects from each. What rank i sends to rank j must be what j expects.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import torch
from torch.distributed import ProcessGroup

from .. import _core
from ..base.errors import make_error
from ..base.ops import name_of

NO_OP = -1
Table = tuple[Sequence[int], Sequence[int]]  # elements this rank sends to each rank, and those it expects from each

_MISMATCH = 1  # its number in errors.py and core/base/status.h
_DIGEST_BYTES = 8
_HEAD = struct.Struct("<8sd240s")  # digest, factor, words; the table comes behind it
_KNOWN_COUNTS = 64  # lists up to this length are remembered; matrices of many ranks take much memory and change


def request_bytes(size: int) -> int:
    """Bytes of a request in a group of so many ranks."""
    return _HEAD.size + 16 * size


class Request:
    """What one rank was asked for, in :func:`request_bytes`."""

    def __init__(
        self,
        size: int,
        verb: str,
        dtype: torch.dtype,
        op: int,
        counts: Sequence[int],
        factor: float = 1.0,
        table: Table | None = None,
    ) -> None:
        self.verb = verb
        self.is_exchange = table is not None
        find = _known_facts if len(counts) <= _KNOWN_COUNTS else _facts
        self.digest, facts = find(verb, dtype, op, tuple(counts))
        if table is not None:
            facts += _short(f"sends {list(table[0])} expects {list(table[1])}")
        words = f"{facts}   {_core.call_site()}".encode()  # cut by struct, or filled up with zeros
        self.bytes = _HEAD.pack(self.digest, factor, words) + self._written(size, table)

    @staticmethod
    def _written(size: int, table: Table | None) -> bytes:
        """The table as it travels; all requests are of one length."""
        return bytes(16 * size) if table is None else struct.pack(f"<{2 * size}q", *table[0], *table[1])


def _facts(verb: str, dtype: torch.dtype, op: int, counts: tuple[int, ...]) -> tuple[bytes, str]:
    """What must be equal: as a digest, and in words, which are cut at some length."""
    facts = f"{verb}  {str(dtype)[6:]}  " + ("" if op == NO_OP else f"{name_of(op)}  ")
    listed = str(list(counts)) if counts else ""
    digest = blake2b((facts + listed).encode(), digest_size=_DIGEST_BYTES).digest()
    return digest, facts + _short(listed)


def _short(text: str) -> str:
    return text if len(text) < 120 else text[:116] + " ..."


_known_facts = lru_cache(maxsize=64)(_facts)


def compare(pg: ProcessGroup, seq: int, request: Request, shown: Sequence[bytes]) -> list[float]:
    """The factors of all ranks, or MismatchError if any was asked for something that does not fit.

    ``shown`` are by rank, each beginning with a request's bytes.
    """
    differing = [rank for rank, bytes in enumerate(shown) if bytes[:_DIGEST_BYTES] != request.digest]
    if not differing and request.is_exchange:
        differing = misfits(shown)
    if differing:
        text = "ranks were asked for different things"
        lines = [_words(bytes) for bytes in shown]
        raise make_error(_MISMATCH, request.verb, seq, pg.group_name, pg.rank(), differing, text, lines, False)
    return [factor_in(bytes) for bytes in shown]


def meet(shown: Sequence[bytes], sender: int, receiver: int) -> bool:
    """Whether what one rank sends is what another expects, whatever else they were asked for."""
    if shown[sender][:_DIGEST_BYTES] != shown[receiver][:_DIGEST_BYTES]:
        return False
    size = len(shown)
    return table_in(shown[sender], size)[0][receiver] == table_in(shown[receiver], size)[1][sender]


def misfits(shown: Sequence[bytes]) -> list[int]:
    """The ranks that send another something else than it expects, or the other way round."""
    size = len(shown)
    tables = [table_in(bytes, size) for bytes in shown]
    wrong = {(i, j) for i in range(size) for j in range(size) if tables[i][0][j] != tables[j][1][i]}
    return sorted({rank for pair in wrong for rank in pair})


def factor_in(bytes: bytes) -> float:
    """The factor of a premul_sum."""
    return float(_HEAD.unpack_from(bytes)[1])


def table_in(bytes: bytes, size: int) -> Table:
    """What a rank sends to each, and what it expects of each."""
    numbers = struct.unpack_from(f"<{2 * size}q", bytes, _HEAD.size)
    return numbers[:size], numbers[size:]


def _words(bytes: bytes) -> str:
    words: str = _HEAD.unpack_from(bytes)[2].rstrip(b"\0").decode(errors="replace")
    return words
