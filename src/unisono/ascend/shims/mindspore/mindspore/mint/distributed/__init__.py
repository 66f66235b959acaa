"""mindspore.mint.distributed, on torch.distributed and torch tensors."""

from unisono.ascend import mindspore_names, missing

globals().update(mindspore_names.mint_functions())
__getattr__ = missing.attribute_of("mindspore.mint.distributed")
