"""mindspore.ops: its communication, on unisono and torch tensors."""

from unisono.ascend import missing
from unisono.ascend.mindspore_names import ReduceOp  # noqa: F401

from . import communication  # noqa: F401

__getattr__ = missing.attribute_of("mindspore.ops")
