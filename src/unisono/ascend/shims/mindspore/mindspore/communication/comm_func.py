"""mindspore.communication.comm_func, on unisono and torch tensors."""

from unisono.ascend import mindspore_names, missing

globals().update(mindspore_names.functions())
__getattr__ = missing.attribute_of("mindspore.communication.comm_func")
