"""torch_npu.distributed, on unisono."""

from unisono.ascend import missing
from unisono.ascend.collectives import (  # noqa: F401
    all_gather_into_tensor_uneven,
    all_to_all_vc,
    reduce_scatter_tensor_uneven,
)
from unisono.ascend.hccl import is_hccl_available, reinit_process_group  # noqa: F401

__getattr__ = missing.attribute_of("torch_npu.distributed")


def is_available() -> bool:
    """Whether torch_npu.distributed works."""
    return True
