"""Operators of torch_npu and MindSpeed: grouped matrix products, and products fused with a collective.

Those with a collective are unisono's own fused operators, on the same bytes. All compute in float32 (float64 for
float64) and round once, and gradients flow through. The quantized modes are not emulated, and say so by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..group import names as groups
from .crossing import on_host
from .missing import refuse

Tensor = torch.Tensor
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The quantized mode that an argument belongs to.
_MODES = {
    "scale": "full quantization",
    "offset": "full quantization",
    "per_token_scale": "per-token quantization",
    "pertoken_scale": "per-token quantization",
    "dequant_scale": "full quantization",
    "antiquant_scale": "weight-only quantization",
    "antiquant_offset": "weight-only quantization",
    "antiquant_group_size": "weight-only per-group quantization",
    "comm_quant_scale_1": "quantized communication",
    "comm_quant_scale_2": "quantized communication",
    "x1_scale": "per-token quantization",
    "x2_scale": "per-channel quantization",
    "activation_input": "backward of an activation",
    "activation_quant_scale": "quantized activation",
    "activation_quant_offset": "quantized activation",
    "tuning_config": "tuned quantization",
}


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Any = None,
    offset: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    per_token_scale: Any = None,
    group_list: Sequence[int] | Tensor | None = None,
    activation_input: Any = None,
    activation_quant_scale: Any = None,
    activation_quant_offset: Any = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: torch.dtype | None = None,
    tuning_config: Any = None,
) -> list[Tensor]:
    """Multiplies pairs of matrices: ``torch_npu.npu_grouped_matmul``, without its quantized modes.

    ========== ========================== ============= ===========================
    x          weight                     group_list    y
    ========== ========================== ============= ===========================
    E tensors  E × [K_i, N_i]             none or rows  E, or with split_item 2, 3
    one [M, K] E × [K, N_i]               needed        one: the rows of all
    one [M, K] one [E, K, N]              needed        one [M, N] (split_item 2, 3)
    one [M, K] one [K, N], group_type 2   needed        one [E, M, N] (split_item 2, 3)
    ========== ========================== ============= ===========================

    A list of numbers holds running totals of rows; a tensor too (group_list_type 0), or counts (group_list_type 1).
    ``group_type`` is None or -1 for groups that are tensors of their own, 0 for groups of rows, 2 for groups
    of columns of x and rows of the weight, as the gradients of weights need them.
    """
    name = "torch_npu.npu_grouped_matmul"
    _refuse_modes(
        name,
        scale=scale,
        offset=offset,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        per_token_scale=per_token_scale,
        activation_input=activation_input,
        activation_quant_scale=activation_quant_scale,
        activation_quant_offset=activation_quant_offset,
        tuning_config=tuning_config,
    )
    if act_type not in (None, 0):
        refuse(f"{name}(act_type={act_type}), an activation of per-token quantization,")
    if group_list_type == 2:
        refuse(f"{name}(group_list_type=2), a form of full quantization,")
    xs, weights = _tensors(name, "x", x), _tensors(name, "weight", weight)
    _refuse_dtypes(name, *xs, *weights)
    if output_dtype not in (None, xs[0].dtype):
        refuse(f"{name}(output_dtype={output_dtype}) for x of {xs[0].dtype}")
    _check_kinds(name, split_item, group_list_type, group_type)
    one_output = split_item in (2, 3)
    totals = not isinstance(group_list, Tensor) or group_list_type in (None, 0)
    counts = None if group_list is None else _counts(name, group_list, totals)
    if group_type == 2:
        if not one_output or len(xs) != 1 or len(weights) != 1 or bias:
            raise RuntimeError(f"{name}: group_type 2 takes one x, one weight, no bias, and split_item 2 or 3")
        return [_products_along_k(name, xs[0], weights[0], counts)]
    parts, matrices = _groups(name, xs, weights, counts)
    biases = _biases(name, bias, len(matrices))
    products = [_product(part, matrix, b) for part, matrix, b in zip(parts, matrices, biases, strict=True)]
    return [_joined(name, products)] if one_output else products


def _joined(name: str, products: list[Tensor]) -> Tensor:
    """The rows of all products in one matrix."""
    if len({product.shape[-1] for product in products}) > 1:
        raise RuntimeError(
            f"{name}: with split_item 2 or 3 all weights must have the same number of columns, "
            f"got {[product.shape[-1] for product in products]}"
        )
    return products[0] if len(products) == 1 else torch.cat(products)


def _check_kinds(name: str, split_item: Any, group_list_type: Any, group_type: Any) -> None:
    if split_item not in (None, 0, 1, 2, 3):
        raise RuntimeError(f"The given split_item [{split_item}] is invalid, which must be one of 0/1/2/3")
    if group_list_type not in (None, 0, 1):
        raise RuntimeError(f"Expected group_list_type 0, 1 or 2, got {group_list_type}")
    if group_type not in (None, -1, 0, 2):
        refuse(f"{name}(group_type={group_type})")


def npu_gmm(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group_list: Any = None,
    group_type: int = 0,
    gemm_fusion: bool = False,
    original_weight: Tensor | None = None,
) -> Tensor:
    """Multiplies groups of rows of x by the matrices of ``weight [E, K, N]``; group_list holds running totals.

    With group_type 2 groups of columns of x by groups of rows of ``weight [K, N]``, which gives ``[E, M, N]``.
    MindSpeed's ``mindspeed.ops.gmm.npu_gmm``.
    """
    return _gmm("npu_gmm", x, weight, bias, group_list, group_type, gemm_fusion, totals=True)


def npu_gmm_v2(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group_list: Any = None,
    group_type: int = 0,
    gemm_fusion: bool = False,
    original_weight: Tensor | None = None,
) -> Tensor:
    """As :func:`npu_gmm`; group_list is a tensor and holds counts of rows."""
    return _gmm("npu_gmm_v2", x, weight, bias, group_list, group_type, gemm_fusion, totals=False)


def _gmm(
    function: str, x: Any, weight: Any, bias: Any, group_list: Any, group_type: int, gemm_fusion: bool, totals: bool
) -> Tensor:
    name = f"mindspeed.ops.gmm.{function}"
    for argument, value in (("x", x), ("weight", weight)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: argument '{argument}' must be a torch.Tensor, got {type(value).__name__}")
    _refuse_dtypes(name, x, weight)
    if gemm_fusion:
        refuse(f"{name}(gemm_fusion=True)")
    if group_type not in (0, 2):
        refuse(f"{name}(group_type={group_type})")
    if group_type == 0 and (group_list is None or weight.dim() != 3):
        raise ValueError(f"{name}: group_type 0 needs a group_list and a weight [E, K, N], got {tuple(weight.shape)}")
    if isinstance(group_list, Tensor) and group_list.dtype != torch.int64:
        raise TypeError(f"{name}: argument 'group_list' must be of int64, got {group_list.dtype}")
    if not totals and not isinstance(group_list, Tensor):
        raise TypeError(f"{name}: argument 'group_list' must be a torch.Tensor, got {type(group_list).__name__}")
    counts = None if group_list is None else _counts(name, group_list, totals)
    if group_type == 2:
        if bias is not None:
            raise ValueError(f"{name}: group_type 2 takes no bias")
        return _products_along_k(name, x, weight, counts)
    parts, matrices = _groups(name, [x], [weight], counts)
    biases = [None] * len(matrices) if bias is None else list(bias.reshape(len(matrices), -1))
    return torch.cat([_product(part, matrix, b) for part, matrix, b in zip(parts, matrices, biases, strict=True)])


# -- with a collective


def npu_grouped_mat_mul_all_reduce(
    x: list[Tensor],
    weight: list[Tensor],
    hcomm: str,
    *,
    bias: list[Tensor] | None = None,
    group_list: list[int] | None = None,
    split_item: int = 0,
    reduce_op: str = "sum",
    comm_turn: int = 0,
) -> list[Tensor]:
    """Multiplies pairs of matrices and sums each product over the ranks: ``unisono.grouped_matmul_all_reduce``.

    MindSpeed's ``mindspeed.ops.npu_grouped_mat_mul_all_reduce``. ``hcomm`` is what ``get_hccl_comm_name`` gave.
    """
    from ..fused import matmul as fused

    run = on_host(fused.grouped_matmul_all_reduce)
    return run(
        x,
        weight,
        hcomm,
        bias=bias,
        group_list=group_list,
        split_item=split_item,
        reduce_op=reduce_op,
        comm_turn=comm_turn,
    )


def npu_mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    x3: Tensor | None = None,
    dequant_scale: Any = None,
    pertoken_scale: Any = None,
    comm_quant_scale_1: Any = None,
    comm_quant_scale_2: Any = None,
    comm_turn: int = 0,
    antiquant_group_size: int = 0,
) -> Tensor:
    """``all_reduce(x1 @ x2 + bias + x3)``, where every rank's own bias and x3 are added: ``unisono.matmul_all_reduce``.

    A rank without a bias adds none, so the bias of one rank only is added once. x3 is given on all ranks or on none.
    """
    name = "torch_npu.npu_mm_all_reduce_base"
    _refuse_modes(
        name,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        dequant_scale=dequant_scale,
        pertoken_scale=pertoken_scale,
        comm_quant_scale_1=comm_quant_scale_1,
        comm_quant_scale_2=comm_quant_scale_2,
        antiquant_group_size=antiquant_group_size,
    )
    _refuse_dtypes(name, x1, x2)
    from .. import comm_func
    from ..fused import matmul as fused

    total = None if x3 is None else on_host(comm_func.all_reduce)(x3, reduce_op, hcom)[0]
    run = on_host(fused.matmul_all_reduce)
    bias = _every_rank(bias, x1, x2)
    return run(x1, x2, hcom, bias=bias, bias_mode="sum", residual=total, reduce_op=reduce_op, comm_turn=comm_turn)


def npu_mm_reduce_scatter_base(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x1_scale: Any = None,
    x2_scale: Any = None,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> Tensor:
    """``reduce_scatter(input @ x2 + bias)``, every rank's own bias added: ``unisono.matmul_reduce_scatter``."""
    name = "torch_npu.npu_mm_reduce_scatter_base"
    _check_fused(name, input, x2, hcom, world_size, x1_scale, x2_scale, output_dtype, comm_mode)
    from ..fused import matmul as fused

    run = on_host(fused.matmul_reduce_scatter)
    bias = _every_rank(bias, input, x2)
    return run(input, x2, hcom, bias=bias, bias_mode="sum", reduce_op=reduce_op, comm_turn=comm_turn)


def npu_all_gather_base_mm(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    x1_scale: Any = None,
    x2_scale: Any = None,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``all_gather(input) @ x2 + bias`` and the gathered input (or an empty tensor): ``unisono.all_gather_matmul``."""
    name = "torch_npu.npu_all_gather_base_mm"
    _check_fused(name, input, x2, hcom, world_size, x1_scale, x2_scale, output_dtype, comm_mode)
    if gather_index != 0:
        refuse(f"{name}(gather_index={gather_index})")
    from .. import comm_func
    from ..fused import matmul as fused

    product = on_host(fused.all_gather_matmul)(input, x2, hcom, bias=bias)
    if not gather_output:
        return product, input.new_empty(0)
    return product, on_host(comm_func.all_gather_into_tensor)(input, hcom)[0]


# -- what they share


def _check_fused(
    name: str,
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    x1_scale: Any,
    x2_scale: Any,
    output_dtype: torch.dtype | None,
    comm_mode: str | None,
) -> None:
    _refuse_modes(name, x1_scale=x1_scale, x2_scale=x2_scale)
    _refuse_dtypes(name, x1, x2)
    if output_dtype not in (None, x1.dtype):
        refuse(f"{name}(output_dtype={output_dtype}), an output of quantization,")
    if comm_mode not in (None, "ai_cpu", "aiv"):
        raise ValueError(f"{name}: argument 'comm_mode' must be 'ai_cpu' or 'aiv', got {comm_mode!r}")
    found = groups.resolve(hcom)
    size = None if found is None else groups.rank_and_size(found)[1]
    if world_size != size:
        raise ValueError(f"{name}: argument 'world_size' must be the size of the group, {size}, got {world_size}")


def _refuse_modes(name: str, **given: Any) -> None:
    for argument, value in given.items():
        if value is not None and not (isinstance(value, (list, tuple, int)) and not value):
            refuse(f"{name}({argument}=…), its {_MODES[argument]} mode,")


def _refuse_dtypes(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in _FLOATS:
            refuse(f"{name} with {tensor.dtype}, its quantized mode,")


def _tensors(name: str, argument: str, value: Any) -> list[Tensor]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(t, Tensor) for t in value):
        raise TypeError(f"{name}: argument '{argument}' must be a list of tensors, got {type(value).__name__}")
    if not value:
        raise RuntimeError("Neither x nor weight could be empty.")
    return list(value)


def _counts(name: str, group_list: Any, totals: bool) -> list[int]:
    """Rows per group, from running totals or from counts."""
    numbers = [int(n) for n in (group_list.tolist() if isinstance(group_list, Tensor) else group_list)]
    if totals:
        numbers = [n - before for n, before in zip(numbers, [0, *numbers], strict=False)]
    if any(n < 0 for n in numbers):
        kind = "must not decrease" if totals else "must not be negative"
        raise RuntimeError(f"{name}: the numbers of 'group_list' {kind}, got {group_list}")
    return numbers


def _groups(
    name: str, xs: list[Tensor], weights: list[Tensor], counts: list[int] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The x and the weight of every group."""
    matrices = list(weights[0]) if len(weights) == 1 and weights[0].dim() == 3 else weights
    if len(xs) == len(matrices) and (len(xs) > 1 or counts is None):
        rows = [x.shape[0] for x in xs]
        if counts is not None and counts != rows:
            raise RuntimeError(f"{name}: 'group_list' says groups of {counts} rows, x has {rows}")
        return xs, matrices
    if len(xs) != 1:
        raise RuntimeError(f"{name}: Expected one x, or as many as weights ({len(matrices)}), got {len(xs)}")
    if counts is None or len(counts) != len(matrices):
        got = "none" if counts is None else f"{len(counts)} numbers"
        raise RuntimeError(f"{name}: one x for {len(matrices)} weights needs a 'group_list' of as many, got {got}")
    if sum(counts) != xs[0].shape[0]:
        raise RuntimeError(f"{name}: 'group_list' is about {sum(counts)} rows, x has {xs[0].shape[0]}")
    return list(xs[0].split(counts)), matrices


def _products_along_k(name: str, x: Tensor, weight: Tensor, counts: list[int] | None) -> Tensor:
    """One product per group of columns of x and rows of the weight; zeros for an empty group."""
    if counts is None or x.dim() != 2 or weight.dim() != 2 or sum(counts) != x.shape[1] or x.shape[1] != len(weight):
        got = f"x {list(x.shape)}, weight {list(weight.shape)}, groups of {counts}"
        raise RuntimeError(f"{name}: group_type 2 needs x [M, K], weight [K, N] and a 'group_list' about K, got {got}")
    parts = zip(x.split(counts, dim=1), weight.split(counts), strict=True)
    return torch.stack([_product(columns, rows, None) for columns, rows in parts])


def _biases(name: str, bias: Any, number: int) -> list[Tensor | None]:
    given = [] if bias is None else [b for b in bias if b is not None and b.numel()]
    if not given:
        return [None] * number
    if len(given) != number:
        raise RuntimeError(f"{name}: Expected as many biases as weights ({number}), got {len(given)}")
    return list(given)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    result = x.to(wide) @ weight.to(wide)
    if bias is not None:
        result = result + bias.to(wide)
    return result.to(x.dtype)


def _every_rank(bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """A bias for this rank, zero if it has none: ranks may differ in that, and cannot see each other's arguments."""
    return x.new_zeros(weight.shape[-1]) if bias is None else bias
