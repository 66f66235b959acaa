"""mindspore.mint: its communication, on torch tensors."""

from unisono.ascend import missing

from . import distributed  # noqa: F401

__getattr__ = missing.attribute_of("mindspore.mint")
