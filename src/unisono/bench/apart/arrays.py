"""A case's numpy arrays on one rank of a peer: filling them with test values, and counting what came out wrong."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .cases import STALE, Case, Piece

Array = Any  # numpy's generic types say nothing useful here


def dtype_of(name: str) -> Any:
    """numpy's dtype; bfloat16, which numpy has not, travels as the 16 bits it is."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def _table(piece: Piece, dtype: str) -> Array:
    turned = piece.turned()
    if dtype == "bfloat16":
        return np.array([struct.unpack("<HH", struct.pack("<f", value))[1] for value in turned], np.uint16)
    return np.array(turned).astype(dtype_of(dtype))  # whole numbers wrap as they do in the sum


def tile(piece: Piece, dtype: str) -> Array:
    return np.resize(_table(piece, dtype), piece.count)


class Arrays:
    """Input and output of one rank; either may be missing."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        kind = dtype_of(case.dtype)
        sizes = case.shapes(rank)
        self.input: Array = None if sizes[0] is None else np.empty(sizes[0], kind)
        self.output: Array = None if sizes[1] is None else np.empty(sizes[1], kind)

    def fill(self) -> None:
        """Test values into the input, and into the output what no right result holds."""
        if self.input is not None:
            self.input[:] = tile(self.case.input(self.rank), self.case.dtype)
        if self.output is not None:
            self.output[:] = STALE

    def clear(self) -> None:
        """All zero: a sum repeated in place stays 0 and never meets slow subnormal numbers."""
        for array in (self.input, self.output):
            if array is not None:
                array[:] = 0

    def count_wrong(self) -> int:
        pieces = self.case.expected(self.rank)
        result = self.input if self.output is None else self.output
        if pieces is None or result is None:
            return 0
        expected = np.concatenate([tile(piece, self.case.dtype) for piece in pieces])
        return int(np.count_nonzero(result != expected))
