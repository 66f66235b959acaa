"""The model of ``order="tree"``: one element of a product in exactly the order that is promised, in numpy.

The whole depth k is halved until it is at most 255 or odd: a slice. A slice of more than 255 is cut into blocks of 128,
the last shorter; else it is one block. A block's sum is a chain of fused multiply-adds from zero in the order of k. The
blocks of a slice, then the slices, are added by the binary tree: neighbours first, what has none passes on.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch


def fma_exact(a: float, b: float, c: float) -> np.float32:
    """a * b + c of float32 numbers rounded once, by whole numbers; finite and not tiny."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return np.float32(0)
    exponent = -126
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    return np.float32(float(round(exact / unit) * unit))  # Python rounds halves to even


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The same for arrays: the product is exact in float64, and the sum is made odd if it was not."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    of_addend = total - product
    lost = (product - (total - of_addend)) + (addend - of_addend)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(lost > 0, np.inf, -np.inf)
    return np.where((lost != 0) & even, np.nextafter(total, toward), total).astype(np.float32)


def tree(parts: list[np.ndarray], swap: int = -1) -> np.ndarray:
    """``swap``, to be wrong: parts number swap and swap + 1 change places."""
    if 0 <= swap < len(parts) - 1:
        parts[swap : swap + 2] = reversed(parts[swap : swap + 2])
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def slice_of(depth: int) -> int:
    while depth > 255 and depth % 2 == 0:
        depth //= 2
    return depth


def blocks_of(depth: int, whole: int | None = None) -> list[list[tuple[int, int]]]:
    """The blocks of every slice of a depth that is part of a whole."""
    piece = slice_of(whole or depth)
    size = piece if piece <= 255 else 128
    return [
        [(at, min(at + size, begin + piece)) for at in range(begin, begin + piece, size)]
        for begin in range(0, depth, piece or 1)
    ]


def product(x: torch.Tensor, w: torch.Tensor, whole: int | None = None, swap: int = -1) -> torch.Tensor:
    """The float32 sums of x [m, k] @ w [k, n], where k is all or one part of a ``whole`` depth."""
    a, b = x.detach().float().numpy(), w.detach().float().numpy()
    zero = np.zeros((a.shape[0], b.shape[1]), dtype=np.float32)
    slices = []
    for blocks in blocks_of(a.shape[1], whole):
        sums = []
        for begin, end in blocks:
            total = zero
            for k in range(begin, end):
                total = fma(a[:, k : k + 1], b[k : k + 1], total)
            sums.append(total)
        slices.append(tree(sums, swap))
    return torch.from_numpy(tree(slices, swap) if slices else zero)


def result(x, w, bias=None, scale=1.0, residual=None) -> torch.Tensor:
    """What every call in the tree order gives, of the whole x and w."""
    total = product(x, w)
    if bias is not None:
        total = total + bias.float()
    if scale != 1:
        total = total * torch.tensor(scale, dtype=torch.float32)
    if residual is not None:
        total = total + residual.float()
    return total.to(x.dtype)
