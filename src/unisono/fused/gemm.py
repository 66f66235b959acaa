"""The products of the fused matmuls: float32 sums (float64 of float64), in one of two ways.

The core's own multiplies 16-bit and float32 matrices in one thread, and turns 16-bit numbers into float32 on the way
into the cache. torch's float32 matmul uses all threads of the rank, on blocks of a 16-bit weight that are turned into
float32 first. torch's own 16-bit matmul is no way: on CPUs without 16-bit matrix instructions it is 50 to 100 times
slower, and on all of them it rounds every rank's products to 16 bits. The two sum in different orders, so which one it
is follows from a rule (:func:`_is_for_core`) and not from time: the same on all ranks and in every run.
``UNISONO_GEMM=core`` or ``torch`` decides instead.

In the tree order (``order="tree"``) it is always the core's, and all that decides an element's bits is the whole depth
k of the product, over all ranks: :func:`slice_of` halves it, and core/kernels/runs.h has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _core
from ..base import settings

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FEW_ROWS = 4  # as in core/kernels/gemm_kernels.h: up to here the core reads a weight where it is
_BLOCK = 1 << 18  # elements of a 16-bit weight that are turned into float32 at a time: half of a usual L2 cache
_LONGEST_BLOCK = 255  # as in core/kernels/runs.h
_MANY_ROWS = 128  # from here on torch's float32 matmul is about as fast as the core in one thread, and can use more
# Where the core is faster also then, in one thread: on processors that are not Intel's torch's BLAS, MKL, uses no
# AVX-512 and takes twice as long.
_BEATS_MKL = ("avx512", "avx512_bf16")
_PAIRS = "avx512_bf16"  # the core multiplies bfloat16 as it is, for which there is nothing to prepare


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products are summed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class PreparedWeight:
    """A weight made ready for many products: turned into float32 and laid out for the cache, once.

    >>> import torch, unisono
    >>> weight = unisono.PreparedWeight(torch.ones(4, 3, dtype=torch.float16))
    >>> weight
    PreparedWeight([4, 3], torch.float16)

    It stands wherever a fused matmul takes a weight, for inference: no gradient reaches it, and the weight must not
    change afterwards. It holds the weight itself, for calls with few rows, and twice (16 bit) or once (32 bit) as much
    memory again. The layout is that of this process's CPU.
    """

    requires_grad = False

    def __init__(self, weight: torch.Tensor) -> None:
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"PreparedWeight takes a torch.Tensor, got {type(weight).__name__}")
        if weight.dim() != 2 or not weight.dtype.is_floating_point or weight.device.type != "cpu":
            raise ValueError(
                f"PreparedWeight takes a floating-point matrix [K, N] on the CPU, got {list(weight.shape)}, "
                f"{weight.dtype}, {weight.device}"
            )
        self.weight = weight.detach()
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.device = weight.device
        self._is_core = self.dtype is not torch.float64 and _is_for_core(self.dtype, FEW_ROWS + 1)
        # The core multiplies it as it is, but in the tree order.
        is_even = self.dtype is torch.bfloat16 and self.shape[0] % 2 == 0
        self._in_pairs = self._is_core and is_even and _core.isa() == _PAIRS
        self._made: torch.Tensor | None = None
        if not self._in_pairs:
            self._make()

    def _make(self) -> torch.Tensor:
        k, n = self.shape
        if self._made is not None:
            return self._made
        if self._is_core:
            width = _core.panel_columns()
            self._made = torch.empty(-(-n // width), k, width)
            _core.pack_panels(self.weight, self._made)
        else:
            self._made = self.weight.to(wide(self.dtype))
        return self._made

    def dim(self) -> int:
        return 2

    def for_rows(self, rows: int, by_tree: bool) -> torch.Tensor:
        """The tensor to use for this many rows."""
        if not self._is_core:
            return self._make()
        few = rows <= FEW_ROWS and self.weight.stride(1) == 1
        if few or (self._in_pairs and not by_tree) or not (by_tree or _is_for_core(self.dtype, rows)):
            return self.weight
        return self._make()

    def __repr__(self) -> str:
        return f"PreparedWeight({list(self.shape)}, {self.dtype})"


def plain_weight(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """A weight as a matrix again, if it is panels."""
    if weight.dim() == 2:
        return weight
    panels, k, width = weight.shape
    return weight.transpose(0, 1).reshape(k, panels * width)[:, :columns]


def slice_of(depth: int) -> int:
    """What sums in the tree order are made of: the depth, halved until it is one block or odd.

    >>> slice_of(4096), slice_of(11008), slice_of(100), slice_of(1001)
    (128, 172, 100, 1001)
    """
    while depth > _LONGEST_BLOCK and depth % 2 == 0:
        depth //= 2
    return depth


def is_one_subtree_each(depths: Sequence[int]) -> bool:
    """Whether the parts of a depth are equal, and a power of two of them: then each is one subtree."""
    return len(set(depths)) == 1 and len(depths) & (len(depths) - 1) == 0


def subtrees(depths: Sequence[int], group: int) -> tuple[int, list[list[tuple[int, int, int]]]]:
    """The slice of a depth that is cut into these parts, one for every rank, and the subtrees each part is made of.

    A subtree is where in the part it begins and ends, and how many sums of subtrees before it are joined to its own
    then, from the last on: what is left after the last one is the sum of all. Raises ValueError where a part would cut
    a slice: it could not have the bits of one rank.

    >>> subtrees([512, 256, 256], 0)
    (128, [[(0, 512, 0)], [(0, 256, 0)], [(0, 256, 2)]])
    >>> subtrees([128, 384, 512], 0)[1]
    [[(0, 128, 0)], [(0, 128, 1), (128, 384, 1)], [(0, 512, 1)]]
    """
    whole = sum(depths)
    unit = slice_of(whole) or 1
    if any(k % unit for k in depths):
        raise ValueError(
            f"order 'tree', group {group}: a depth of {whole} is summed in blocks of {unit}, which the ranks with "
            f"{', '.join(map(str, depths))} would cut\n  every rank must have a multiple of {unit}"
        )
    found, at = [], 0
    for k in depths:
        first, mine = at, []
        while at < first + k:
            begin, left = at // unit, (first + k - at) // unit
            size = min(begin & -begin or left, 1 << left.bit_length() - 1)  # the largest that begins here and fits
            turn, joins = begin // size, 0
            while turn & 1:
                turn, joins = turn >> 1, joins + 1
            mine.append((at - first, at - first + size * unit, joins))
            at += size * unit
        found.append(mine)
    return unit, found


def multiply(
    out: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    columns: Sequence[int],
    bias: Sequence[torch.Tensor] | None,
    parts: int = 0,
    unit: int = 0,
) -> None:
    """Writes ``a[i] @ b[i] + bias[i]`` one behind the other into the flat ``out`` of :func:`wide` dtype.

    ``parts``: in the tree order, where the depth of a is one of so many parts; 0: in any order. ``unit`` instead: in
    the tree order, of slices so deep.
    """
    if not a:
        return
    if parts or unit:
        _core.multiply(a, b, columns, out, bias, [unit or slice_of(x.shape[1] * parts) or 1 for x in a])
        return
    on_cpu = out.dtype is torch.float32 and out.device.type == "cpu"
    if on_cpu and _is_for_core(a[0].dtype, max([x.shape[0] for x in a])):
        _core.multiply(a, b, columns, out, bias)
        return
    at = 0
    for i, (x, w, n) in enumerate(zip(a, b, columns, strict=True)):
        end = at + x.shape[0] * n
        y = out[at:end].view(x.shape[0], n)
        if w.dim() == 3:  # panels fit the core only
            _core.multiply([x], [w], [n], y, [bias[i]] if bias else None)
        else:
            _by_torch(y, x, w, bias[i] if bias else None)
        at = end


def _by_torch(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    k, n = weight.shape
    x = x.to(y.dtype)
    step = n if weight.dtype is y.dtype else max(64, _BLOCK // max(k, 1))
    for j in range(0, n, step):
        block = weight[:, j : j + step].to(y.dtype)
        if bias is None:
            torch.mm(x, block, out=y[:, j : j + step])
        else:
            torch.addmm(bias[j : j + step], x, block, out=y[:, j : j + step])


def _is_for_core(dtype: torch.dtype, rows: int) -> bool:
    """Whether the core multiplies matrices of this dtype, the tallest with so many rows.

    It asks only for what is the same in every run of a program on a machine, and not for the depth of the product,
    which ranks may cut unequally. The instruction set is the common one of all ranks. Without one the core's kernels
    are plain loops.
    """
    if settings.gemm:
        return settings.gemm == "core"
    isa = _core.isa()
    if dtype is torch.float32 and rows >= _MANY_ROWS:
        return isa in _BEATS_MKL and not _core.is_intel() and torch.get_num_threads() == 1
    return isa != "scalar"
