"""Whether two runs gave the same, and by how much not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def difference(ours: Any, theirs: Any, at: str = "") -> float:
    """0 for the same bits; else the largest difference of two tensors or numbers, by the larger one's largest element.

    Raises ValueError with the place where the two are of another kind, shape or dtype.
    """
    if isinstance(ours, Mapping):
        _same(at, sorted(ours), sorted(theirs))
        return max((difference(ours[key], theirs[key], f"{at}[{key!r}]") for key in ours), default=0.0)
    if isinstance(ours, (list, tuple)):
        _same(at, len(ours), len(theirs))
        pairs = zip(ours, theirs, strict=True)
        return max((difference(a, b, f"{at}[{i}]") for i, (a, b) in enumerate(pairs)), default=0.0)
    if isinstance(ours, torch.Tensor):
        _same(at, (ours.shape, ours.dtype), (theirs.shape, theirs.dtype))
        return _of_tensors(ours, theirs)
    if isinstance(ours, float):
        return _of_tensors(torch.tensor(ours), torch.tensor(theirs))
    _same(at, ours, theirs)
    return 0.0


def _same(at: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise ValueError(f"at {at or 'the top'}: unisono {ours}, gloo {theirs}")


def _of_tensors(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if torch.equal(ours, theirs):
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    apart = float((ours - theirs).abs().max() / max(ours.abs().max(), theirs.abs().max()))
    return math.inf if math.isnan(apart) else apart
