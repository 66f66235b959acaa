"""What one rank was asked for, in the form that travels: as on other backends, with a table only if there is one."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from ..agreement import NO_OP, Request, Table

_HEAD_BYTES = 256
_FACTOR = struct.Struct("<8xd")


class HostsRequest(Request):
    """A request with its number; ``facts`` are words that must be equal too, such as the root."""

    def __init__(
        self,
        size: int,
        seq: int,
        verb: str,
        dtype: torch.dtype,
        counts: Sequence[int] = (),
        op: int = NO_OP,
        factor: float = 1.0,
        table: Table | None = None,
        facts: str = "",
    ) -> None:
        super().__init__(size, f"{verb} {facts}" if facts else verb, dtype, op, counts, factor, table)
        self.verb = verb
        self.seq = seq

    @staticmethod
    def _written(size: int, table: Table | None) -> bytes:
        return b"" if table is None else Request._written(size, table)


def factor_in(request: bytes) -> float:
    """The factor of a premul_sum."""
    return float(_FACTOR.unpack_from(request)[0])


def table_in(request: bytes, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a rank sends to each, and what it expects of each."""
    numbers = struct.unpack_from(f"<{2 * size}q", request, _HEAD_BYTES)
    return numbers[:size], numbers[size:]
