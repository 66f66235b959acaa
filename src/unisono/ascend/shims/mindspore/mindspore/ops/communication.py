"""mindspore.ops.communication, on unisono and torch tensors: the functions of comm_func by the same names."""

from unisono.ascend import mindspore_names, missing

globals().update(mindspore_names.functions())
__getattr__ = missing.attribute_of("mindspore.ops.communication")
