"""mindspore.communication, on unisono and torch tensors: the names of its ``management``, and ``comm_func``."""

from unisono.ascend import missing

from . import comm_func, management  # noqa: F401
from .management import *  # noqa: F403

__getattr__ = missing.attribute_of("mindspore.communication")
