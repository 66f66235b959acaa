"""Stands in for MindSpore's communication, on torch tensors; put on the path by unisono.ascend, never installed."""

import unisono.ascend

unisono.ascend.install(["mindspore"], force=True)

from unisono.ascend import missing  # noqa: E402

__unisono__ = True
__getattr__ = missing.attribute_of("mindspore")
