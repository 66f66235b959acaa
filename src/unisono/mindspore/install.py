"""unisono in the place of MindSpore's own communication, whose collectives mostly do not run on a CPU."""

from __future__ import annotations

from importlib import import_module

from . import comm_func

_OURS_ONLY = ("all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven", "all_to_all_v_c")


def install() -> None:
    """Puts unisono's functions into ``mindspore.communication`` and ``mindspore.communication.comm_func``.

    Names that a program imported before keep MindSpore's functions. ``python -m unisono.mindspore script.py`` comes
    before every program.
    """
    theirs = import_module("mindspore.communication.comm_func")
    for name in set(comm_func.__all__).difference(comm_func.MEMBERS, ["GlobalComm"]):
        if hasattr(theirs, name) or name in _OURS_ONLY:
            setattr(theirs, name, getattr(comm_func, name))
    for module in ("mindspore.communication", "mindspore.communication.management"):
        for name in comm_func.MEMBERS:
            if hasattr(import_module(module), name):
                setattr(import_module(module), name, getattr(comm_func, name))
