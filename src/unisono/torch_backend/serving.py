"""The switch for groups that programs ask for as "gloo"."""

from __future__ import annotations

import torch.distributed as dist


def serve_gloo(on: bool = True) -> None:
    """From now on, groups of this program that are asked for as "gloo" are unisono's; ``on=False``: no longer.

    That is ``"gloo"``, ``"cpu:gloo"``, CPU groups without a name, and the CPU half of ``"cpu:gloo,cuda:nccl"`` from
    torch 2.14 on. Their names, options and errors stay gloo's, and gloo does what unisono does not take. Call it before
    the groups are made, on all ranks; ``unisono run`` and ``UNISONO_GLOO=1`` do it for programs as they are::

        unisono.serve_gloo()
        dist.init_process_group("gloo")     # through shared memory

    Args:
        on: False: new groups are gloo's again
    """
    if not dist.is_gloo_available():
        raise RuntimeError("serve_gloo: this build of torch has no gloo, so no program can ask for it")
    from . import served  # not before it is wanted: it looks at classes that only builds with gloo have

    served.install(on)
