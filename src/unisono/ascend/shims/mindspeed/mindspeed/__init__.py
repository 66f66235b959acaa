"""Stands in for Huawei's MindSpeed on hosts without NPUs; put on the path by unisono.ascend, never installed."""

import unisono.ascend

unisono.ascend.install(["torch_npu", "mindspeed"], force=True)

from unisono.ascend import missing  # noqa: E402

__unisono__ = True
__getattr__ = missing.attribute_of("mindspeed")
