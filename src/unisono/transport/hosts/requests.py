"""What one rank was asked for, in the form that travels: as on other backends, with a table only if there is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..agreement import NO_OP, Request, Table


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
