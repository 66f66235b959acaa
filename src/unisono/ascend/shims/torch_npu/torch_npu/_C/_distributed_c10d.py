"""torch_npu._C._distributed_c10d: the class of hccl groups, and its options."""

from unisono.ascend import missing
from unisono.ascend.hccl import ProcessGroupHCCL  # noqa: F401

__getattr__ = missing.attribute_of("torch_npu._C._distributed_c10d")
