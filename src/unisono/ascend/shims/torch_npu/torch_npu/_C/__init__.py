"""torch_npu._C: what scripts reach into for group options."""

from unisono.ascend import missing

from . import _distributed_c10d  # noqa: F401

__getattr__ = missing.attribute_of("torch_npu._C")
