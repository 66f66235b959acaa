"""The model: what every collective must give, computed in one process from all ranks' inputs.

The number rule (core/kernels/reduce.h): combine by the binary tree over ranks, ((0+1)+(2+3))+...,
where what has no right neighbour passes on; float16 and bfloat16 accumulate in float32 and
are rounded once; AVG divides the accumulator by W (integers: toward zero); PREMUL_SUM multiplies each input
by its rank's factor in the accumulator's type; integers wrap; bool sum is "or"; complex numbers are pairs.
Comparison is by bits; a NaN equals any NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
REDUCIBLE = (*FLOATS, *INTEGERS, "bool", *COMPLEX)
MOVED = (  # never reduced
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
MOVABLE = (*REDUCIBLE, *MOVED)
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
PERIOD = 131_101  # elements of noise per dtype; prime, so a misplaced block never matches by chance


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def ops_of(name: str) -> tuple[str, ...]:
    """The ops that mean something for this dtype."""
    if name in FLOATS:
        return ("sum", "avg", "product", "min", "max", "premul_sum")
    if name in INTEGERS:
        return ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
    if name in COMPLEX:
        return ("sum", "avg", "product", "premul_sum")
    return ("sum", "product", "min", "max", "band", "bor", "bxor") if name == "bool" else ()


REDUCTIONS = [(name, op) for name in REDUCIBLE for op in ops_of(name)]


# --- inputs -------------------------------------------------------------------------------------------------


@functools.cache
def _noise(name: str, special: bool) -> Tensor:
    """PERIOD random elements; `special` sprinkles NaN, infinities, zeros of both signs and denormals."""
    generator = torch.Generator().manual_seed(len(name) * 7 + special)
    dtype = dtype_of(name)
    if name in COMPLEX:
        part = "float32" if name == "complex64" else "float64"
        pairs = torch.stack([_noise(part, special), _noise(part, special).roll(4099)], dim=1)
        return torch.view_as_complex(pairs)
    if name == "bool":
        return torch.randint(0, 2, (PERIOD,), generator=generator, dtype=torch.uint8).view(torch.bool)
    if name in FLOATS:
        values = torch.randn(PERIOD, generator=generator, dtype=torch.float64)
        values *= torch.exp2(torch.randint(-4, 5, (PERIOD,), generator=generator).double())
        values = values.to(dtype)
        if special:
            limits = torch.finfo(dtype)
            infinity, denormal = float("inf"), limits.smallest_normal / 4
            strange = [float("nan"), infinity, -infinity, 0.0, -0.0, limits.max, denormal]
            for value in strange:
                values[torch.randint(0, PERIOD, (PERIOD // 40,), generator=generator)] = value
        return values
    raw = torch.randint(0, 256, (PERIOD * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def make_input(name: str, count: int, rank: int, seed: int, special: bool = False) -> Tensor:
    """The `count` elements that `rank` brings to the call with this seed: the same whoever asks."""
    noise = _noise(name, special)
    start = (seed * 7919 + rank * 15_485_863 + 1) % PERIOD
    if start + count <= PERIOD:
        return noise[start : start + count].clone()
    repeats = (start + count) // PERIOD + 1
    raw = noise.view(torch.uint8)
    size_bytes = noise.element_size()
    return raw.repeat(repeats)[start * size_bytes : (start + count) * size_bytes].clone().view(noise.dtype)


# --- the number rule ----------------------------------------------------------------------------------------


def reduced(inputs: Sequence[Tensor], op: str, factors: Sequence[float] | None = None) -> Tensor:
    """Combine one tensor per rank by the tree over ranks."""
    dtype = inputs[0].dtype
    if inputs[0].numel() == 0:
        return inputs[0].clone()
    if dtype == torch.bool:
        return torch.from_numpy(_fold([t.numpy() for t in inputs], _LOGICAL[op]))
    if dtype.is_complex:
        return _reduced_complex(inputs, op, factors)
    if not dtype.is_floating_point:
        return _reduced_integers(inputs, op)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    parts = [t.to(wide) for t in inputs]
    if op == "premul_sum":
        assert factors is not None
        parts = [part * torch.tensor(factor, dtype=wide) for part, factor in zip(parts, factors, strict=True)]
    total = _fold(parts, _FLOAT[op])
    if op == "avg":
        total = total / torch.tensor(len(inputs), dtype=wide)
    return total.to(dtype) if total.dtype != dtype else total.clone()


def _fold(parts, combine):
    """Level by level: neighbours are combined, and the last one passes on if it has none."""
    while len(parts) > 1:
        pairs = [combine(left, right) for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + ([parts[-1]] if len(parts) % 2 else [])
    return parts[0].copy() if isinstance(parts[0], np.ndarray) else parts[0]


_FLOAT = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
_LOGICAL = {
    **dict.fromkeys(("sum", "max", "bor"), np.logical_or),
    **dict.fromkeys(("product", "min", "band"), np.logical_and),
    "bxor": np.logical_xor,
}
_INTEGER = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def _reduced_integers(inputs: Sequence[Tensor], op: str) -> Tensor:
    total = _fold([t.numpy() for t in inputs], _INTEGER[op])
    if op == "avg":
        size = total.dtype.type(len(inputs))
        quotient, rest = np.divmod(total, size)  # rounds down, the rule says toward zero
        total = quotient + ((rest != 0) & (total < 0)).astype(total.dtype)
    return torch.from_numpy(total)


def _reduced_complex(inputs: Sequence[Tensor], op: str, factors: Sequence[float] | None) -> Tensor:
    pairs = [torch.view_as_real(t) for t in inputs]
    if op != "product":
        return torch.view_as_complex(reduced(pairs, op, factors))

    def multiply(x, y):
        (a, b), (c, d) = x.unbind(-1), y.unbind(-1)
        return torch.stack([a * c - b * d, a * d + b * c], dim=-1)

    return torch.view_as_complex(_fold(pairs, multiply).clone())


# --- the verbs ----------------------------------------------------------------------------------------------


def expected(
    rank: int, verb: str, inputs: Sequence[Tensor], counts, op: str = "sum", root: int = 0, factors=None
) -> Tensor | None:
    """What `rank` must hold after the call, flat; None if the verb gives this rank nothing.

    `counts`: elements per rank, for all_to_all the matrix whose row r is what rank r sends to each rank.
    """
    if verb == "all_reduce":
        return reduced(inputs, op, factors)
    if verb == "reduce":
        return reduced(inputs, op, factors) if rank == root else None
    if verb == "broadcast":
        return inputs[root]
    if verb == "all_gather":
        return joined(inputs)
    if verb == "gather":
        return joined(inputs) if rank == root else None
    if verb == "reduce_scatter":
        mine = span(counts, rank)
        return reduced([t[mine] for t in inputs], op, factors)
    if verb == "scatter":
        return inputs[root][span(counts, rank)]
    if verb == "all_to_all":
        return joined([t[span(row, rank)] for t, row in zip(inputs, counts, strict=True)])
    raise AssertionError(f"no model for verb {verb!r}")


def span(counts: Sequence[int], rank: int) -> slice:
    """Where `rank`'s chunk lies in the whole."""
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat by bytes: works for dtypes that cat does not know."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)


# --- comparison ---------------------------------------------------------------------------------------------


def raw_bytes(t: Tensor) -> Tensor:
    return t.detach().reshape(-1).view(torch.uint8)


def difference(got: Tensor, want: Tensor, signs_of_zero: bool = True) -> str | None:
    """None if the bits agree (a NaN equals any NaN), otherwise a line about the first that differs."""
    got, want = got.detach().reshape(-1), want.detach().reshape(-1)
    if got.dtype != want.dtype or got.numel() != want.numel():
        return f"got {got.numel()} of {got.dtype}, want {want.numel()} of {want.dtype}"
    if torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
        return None
    if got.dtype.is_complex:
        got, want = torch.view_as_real(got).reshape(-1), torch.view_as_real(want).reshape(-1)
    wrong = (got.view(torch.uint8) != want.view(torch.uint8)).view(got.numel(), -1).any(dim=1)
    if got.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        wrong &= ~(got.isnan() & want.isnan())
        if not signs_of_zero:
            wrong &= ~((got == 0) & (want == 0))
    places = wrong.nonzero().reshape(-1)
    if places.numel() == 0:
        return None
    first = int(places[0])
    return (
        f"element {first} of {got.numel()}: got {got[first].item()!r}, want {want[first].item()!r}"
        f" ({places.numel()} differ, the last at {int(places[-1])})"
    )
