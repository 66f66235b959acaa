"""mindspeed.ops.npu_grouped_mat_mul_all_reduce, on unisono."""

from unisono.ascend import missing
from unisono.ascend.operators import npu_grouped_mat_mul_all_reduce  # noqa: F401

__getattr__ = missing.attribute_of("mindspeed.ops.npu_grouped_mat_mul_all_reduce")
