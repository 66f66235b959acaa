"""mindspeed.ops.gmm, on unisono."""

from unisono.ascend import missing
from unisono.ascend.operators import npu_gmm, npu_gmm_v2  # noqa: F401

__getattr__ = missing.attribute_of("mindspeed.ops.gmm")
