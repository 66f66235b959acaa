"""FSDP2 on unisono: its communication buffers in shared memory, so that all-gather and reduce-scatter copy nothing.

Not imported by ``import unisono``, since it brings in all of FSDP.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .group import names as groups

Model = TypeVar("Model", bound=nn.Module)


def use_shared_memory(model: Model, enable: bool = True) -> Model:
    """Has every ``fully_shard``-ed part of a model take its buffers from its process group; returns the model::

        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        unisono.fsdp.use_shared_memory(fully_shard(model, mesh=mesh))

    It calls FSDP2's own ``set_allocate_memory_from_process_group_for_comm``, which works on one module and not on those
    inside it. What is gathered is then written once, into the buffer the layer's parameters are taken from, and
    gradients are reduced straight from where they are collected. Parts whose group is on another backend stay as
    they are. Parameters need not be in shared memory themselves.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        raise ValueError(
            "use_shared_memory takes a model that fully_shard was called on, got one without any FSDPModule"
        )
    backends = set()
    for part in parts:
        for param_group in part._get_fsdp_state()._fsdp_param_groups:
            process_group = param_group._all_gather_process_group
            backends.add(process_group.name())
            if groups.native(process_group) is not None:
                param_group.set_allocate_memory_from_process_group(enable)
    if backends and "unisono" not in backends:
        raise ValueError(f"Expected process groups on unisono, got {', '.join(sorted(backends))}")
    return model
