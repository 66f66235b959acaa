"""mindspore.communication.management, on unisono."""

from unisono.ascend import missing
from unisono.ascend.mindspore_names import (  # noqa: F401
    HCCL_WORLD_COMM_GROUP,
    MCCL_WORLD_COMM_GROUP,
    NCCL_WORLD_COMM_GROUP,
    release,
)
from unisono.comm_func import (  # noqa: F401
    GlobalComm,
    create_group,
    destroy_group,
    get_group_rank_from_world_rank,
    get_group_size,
    get_local_rank,
    get_local_rank_size,
    get_process_group_ranks,
    get_rank,
    get_world_rank_from_group_rank,
    init,
)

__getattr__ = missing.attribute_of("mindspore.communication.management")
