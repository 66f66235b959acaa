"""Which group a caller means: from None, a name, a torch ProcessGroup or a :class:`Group` to the group itself.

A ``group`` argument is looked up at the call, never kept, so the default group may be made, destroyed and made again.
Which transport a group has is not said here but in ``transport/find.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, _resolve_process_group
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import GroupMember

from . import rendezvous
from .group import Group, find_key

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_CPU = torch.device("cpu")
logger = logging.getLogger("unisono")


def can_be_inherited(base: type) -> bool:
    """Whether a class of torch's C++ half, made from a rank and a size, may be the base of one in Python."""
    try:
        type("Probe", (base,), {})(0, 1)
    except TypeError:
        return False
    return True


#: Whether a backend inside of a C++ process group can be written in Python: since torch 2.14.
PYTHON_BACKENDS = can_be_inherited(Backend)

#: What a ``group`` argument may be.
GroupLike: TypeAlias = Group | ProcessGroup | str | None

#: Names that mean the default group: MindSpore's and ours.
WORLD_NAMES = ("hccl_world_group", "nccl_world_group", "mccl_world_group", "world")

_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_elsewhere: dict[str, Any] = {}  # names of groups this process is not in -> weakly, the default group they are of


def remember(name: str, group: ProcessGroup | Group | None) -> None:
    """Lets :func:`resolve` find a group by this name, as long as the group lives; None: this process is not in it."""
    forget(name)
    if group is None:
        _elsewhere[name] = weakref.ref(default_group())
    else:
        _named[name] = group


def forget(name: str) -> None:
    """Undoes :func:`remember`."""
    _named.pop(name, None)
    _elsewhere.pop(name, None)


def is_known(name: str) -> bool:
    """Says whether :func:`remember` was given this name."""
    return name in _named or _is_elsewhere(name)


def _is_elsewhere(name: str) -> bool:
    world = _elsewhere.get(name, lambda: None)()
    return world is not None and world is GroupMember.WORLD


def default_group() -> ProcessGroup:
    """The default process group; under torchrun, if there never was one, makes one on unisono, and says so."""
    if not dist.is_initialized():
        lacking = "Default process group has not been initialized, please make sure to call init_process_group."
        if _was_initialized():
            raise ValueError(f"{lacking}\n  (it was destroyed)")
        if missing := rendezvous.missing_variables():
            raise ValueError(f"{lacking}\n  ({missing}, and unisono makes the default group itself)")
        dist.init_process_group("unisono")
        if dist.get_rank() == 0:
            logger.warning("no default process group: made one, as init_process_group('unisono') does")
    group = dist.group.WORLD
    assert group is not None
    return group


def _was_initialized() -> bool:
    """Whether this process had a default group before.

    torch keeps how the last one was made, and for one made from a store the hook that puts the rank before tracebacks.
    """
    hook = getattr(sys.excepthook, "__qualname__", "")
    return distributed_c10d._default_pg_init_method is not None or hook.startswith("init_process_group.")


def resolve(group: GroupLike) -> ProcessGroup | Group | None:
    """The group that is meant; None if this process is not in it.

    A name is one that :func:`remember` was given (``comm_func.create_group``, ``get_comm_name``), a torch group's
    ``group_name``, a :class:`Group`'s ``key``, or one of ``WORLD_NAMES``.
    """
    if group is None:
        return GroupMember.WORLD or default_group()
    if isinstance(group, (Group, ProcessGroup)):
        return group
    if isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER:
        return None
    if isinstance(group, str):
        found = _named.get(group)
        if found is not None:
            return found  # type: ignore[no-any-return]
        if _is_elsewhere(group):
            return None
        if group in WORLD_NAMES:
            return default_group()
        own = find_key(group)
        if own is not None:
            return own
        try:
            return _resolve_process_group(group)  # type: ignore[arg-type]
        except (RuntimeError, ValueError):
            known = ", ".join(sorted(_named)) or "none"
            raise ValueError(f"no group is named {group!r}; known names: {known}") from None
    cure = ""
    if isinstance(group, (list, tuple)):
        cure = "\n  a list is meant for another argument? pass that one by its name"
    raise TypeError(
        f"argument 'group' must be None, a name, a ProcessGroup or a unisono.Group, got {type(group).__name__}{cure}"
    )


def is_own(group: ProcessGroup | Group | None) -> TypeIs[Group]:
    """Whether it is a :class:`Group` itself, not a process group of torch: the one place that asks.

    The two differ in what a call returns, Handle or Work, and in who knows the name and ends the group. For all else it
    matters only whether a Group is below: :func:`native`.
    """
    return isinstance(group, Group)


def end(group: ProcessGroup | Group) -> None:
    """Gives a group up on this rank."""
    if is_own(group):
        group.close()
    else:
        dist.destroy_process_group(group)


def name_of(group: ProcessGroup | Group) -> str:
    """A name that :func:`resolve` finds this group by, for graphs, which hold no objects."""
    return group.key if is_own(group) else str(group.group_name)


def native(group: GroupLike) -> Group | None:
    """The unisono Group under a process group, None if another backend is."""
    return _look_up(group, "unisono_group")  # type: ignore[no-any-return]


def adapter_of(group: ProcessGroup | Group | None) -> Any:
    """The object on unisono that torch talks to: the process group itself or, inside of one, its backend; or None."""
    return _look_up(group, "unisono_adapter")


def _look_up(group: Any, attribute: str) -> Any:
    """An attribute of a group or, inside of a C++ process group, of its backend for CPU tensors; None if not there."""
    found = getattr(group, attribute, None)
    if found is None and PYTHON_BACKENDS and isinstance(group, ProcessGroup):
        with contextlib.suppress(RuntimeError):  # raised for a group for other devices only
            found = getattr(group._get_backend(_CPU), attribute, None)
    return found


def rank_and_size(group: ProcessGroup | Group) -> tuple[int, int]:
    """This process's rank in a group, and the group's size."""
    ours = native(group)
    return (group.rank(), group.size()) if ours is None else (ours.rank, ours.size)  # type: ignore[operator]


def global_ranks(group: ProcessGroup | Group) -> list[int]:
    """The members' global ranks, by group rank; not to be changed."""
    ours = native(group)
    return dist.get_process_group_ranks(group) if ours is None else ours.ranks  # type: ignore[arg-type]


def devices_of(group: ProcessGroup | Group) -> list[str]:
    """The kinds of devices whose tensors a group takes."""
    kinds = {device.type for device in getattr(group, "_device_types", ())}
    return sorted(kinds | {"cpu"} if native(group) is not None else kinds)


def host_ranks(group: ProcessGroup | Group) -> list[int]:
    """The global ranks of those members that share this process's host; torchrun numbers hosts one after another."""
    ranks = global_ranks(group)
    ours = native(group)
    if ours is not None:
        near = getattr(ours.transport, "host_ranks", None)  # a transport over several hosts knows them
        return ranks if near is None else [ranks[r] for r in near]
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or dist.get_world_size()
    mine = ranks[rank_and_size(group)[0]] // per_host
    return [r for r in ranks if r // per_host == mine]
