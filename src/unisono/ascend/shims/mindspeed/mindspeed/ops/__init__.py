"""mindspeed.ops, on unisono."""

from unisono.ascend import missing

__getattr__ = missing.attribute_of("mindspeed.ops")
