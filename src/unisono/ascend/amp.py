"""Mixed precision on the emulated device: ``torch.autocast("npu")``, ``torch.npu.amp`` and the gradient scaler.

torch leaves it to a device to say which operators run in lower precision; the lists here are those torch has for its
own accelerators, so a model behaves as it would on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from . import missing

_LOWER = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell scaled_dot_product_attention
"""
_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor
"""
_FLOAT32_IF_FLOAT16 = """
    prod softmax.int log_softmax.int cumprod cumsum sum norm.Scalar norm.ScalarOpt_dim
"""
_WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot grid_sample index_put tensordot scatter_add vdot cat stack
"""
_REFUSED = "binary_cross_entropy"

_HALVES = (torch.float16, torch.bfloat16)
_registered: list[torch.library.Library] = []


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes ``torch.autocast("npu")`` takes."""
    return [torch.float16, torch.bfloat16]


def register() -> None:
    """Puts the casts into torch's dispatcher, once per process."""
    if _registered:
        return
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    kinds: list[tuple[str, Callable[[list[torch.Tensor]], torch.dtype | None]]] = [
        (_LOWER, lambda tensors: torch.get_autocast_dtype("npu")),
        (_FLOAT32, _float32),
        (_FLOAT32_IF_FLOAT16, _float32),
        (_WIDEST, _widest),
        (_REFUSED, _refuse),
    ]
    for names, choose in kinds:
        for name in names.split():
            op = _find(name)
            if op is not None:
                aten.m.impl(name, "AutocastPrivateUse1", functools.partial(_cast, op, choose), False)  # type: ignore[union-attr]
    _registered.extend((everything, aten))


def _find(name: str) -> OpOverload | None:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload or "default", None)


def _cast(op: OpOverload, choose: Callable[[list[torch.Tensor]], torch.dtype | None], *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        dtype = choose(_eligible([*args, *kwargs.values()]))
        if dtype is None:
            return op(*args, **kwargs)
        return op(*(_to(a, dtype) for a in args), **{name: _to(a, dtype) for name, a in kwargs.items()})


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def _eligible(values: list[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() and value.dtype is not torch.float64 and value.device.type == "npu":
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _eligible(list(value))
    return found


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if _eligible([value]) and value.dtype is not dtype else value
    if isinstance(value, (list, tuple)):
        return type(value)(_to(part, dtype) for part in value)
    return value


def _float32(tensors: list[torch.Tensor]) -> torch.dtype | None:
    return torch.float32 if any(tensor.dtype in _HALVES for tensor in tensors) else None


def _widest(tensors: list[torch.Tensor]) -> torch.dtype | None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) < 2:
        return None
    return functools.reduce(torch.promote_types, dtypes)


def _refuse(tensors: list[torch.Tensor]) -> torch.dtype | None:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "  Use torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss"
    )


class autocast(torch.amp.autocast_mode.autocast):
    """``torch.npu.amp.autocast``: float16 unless told."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("npu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.npu.amp.GradScaler``."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
        enabled: bool = True,
    ) -> None:
        if not dynamic:
            missing.refuse("torch.npu.amp.GradScaler(dynamic=False)")
        super().__init__("npu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


__getattr__ = missing.attribute_of("torch.npu.amp")
