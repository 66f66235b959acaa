"""Stands in for Huawei's torch_npu on hosts without NPUs; put on the path by unisono.ascend, never installed."""

import sys

import torch

import unisono.ascend

unisono.ascend.install(["torch_npu"], force=True)

from unisono.ascend import missing, npu  # noqa: E402
from unisono.ascend.operators import (  # noqa: E402, F401
    npu_all_gather_base_mm,
    npu_grouped_matmul,
    npu_mm_all_reduce_base,
    npu_mm_reduce_scatter_base,
)

sys.modules["torch_npu.npu"] = npu
sys.modules["torch_npu.npu.amp"] = npu.amp

from . import distributed  # noqa: E402, F401

__unisono__ = True
__version__ = torch.__version__.partition("+")[0] + "+unisono"
__getattr__ = missing.attribute_of("torch_npu")
