"""Groups that a program asked for as "gloo", on unisono: ``unisono.serve_gloo`` puts them in gloo's place.

torch makes such groups by its class ProcessGroupGloo. :class:`_StandIn` takes that class's place: it makes groups of
:class:`ServedGroup`, its instances are those and gloo's own, and all other attributes are gloo's. Names, options and
checks are gloo's too, so that programs find what they know. What unisono cannot do is handed to a real group of gloo,
which is made when the first such call comes. Where torch can only take gloo itself, and where some rank cannot join a
group of unisono, the whole group is gloo's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from ..base import log, settings
from ..base.errors import (
    AbortedError,
    ArgumentError,
    CollectiveTimeoutError,
    HeapMemoryError,
    PeerLostError,
    SystemCallError,
)
from ..base.uncompiled import keep_uncompiled
from ..base.work import Work
from ..group import names as groups
from ..group import rendezvous
from ..group.group import Group
from . import checks, refusals, registration
from .adapter import ProcessGroupAdapter
from .arguments import Timeout

# What torch 2.13's gloo calls methods that have newer names.
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}

# Functions of torch that make groups of gloo for programs; which of them it has depends on its version.
_MAKERS = ("_new_process_group_helper", "_create_gloo_process_group")
_MAKING = [getattr(distributed_c10d, name).__code__ for name in _MAKERS if hasattr(distributed_c10d, name)]


class ServedAdapter(ProcessGroupAdapter):
    """A group on unisono that passes for one of gloo."""

    def name(self) -> str:
        return "gloo"

    _get_backend_name = name  # not getBackendName: C++ code that hears "gloo" there takes the object for gloo's own

    create_device = staticmethod(dist.ProcessGroupGloo.create_device)
    create_default_device = staticmethod(dist.ProcessGroupGloo.create_default_device)

    def _begin(self, group: Group, store: Any) -> None:
        super()._begin(group, store)
        self._behind: Any = None

    # -- gloo takes equal tensors only, and says so on the rank whose tensors are not

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        checks.all_reduce_coalesced(tensors)
        return super().allreduce_coalesced(tensors, opts)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> Work:
        if output_lists and isinstance(output_lists[0], (list, tuple)):
            checks.all_gather(output_lists, [inputs] if isinstance(inputs, Tensor) else inputs, self.size())
        return super().allgather(output_lists, inputs, opts, timeout)

    def allgather_coalesced(self, output_lists: Any, inputs: Sequence[Tensor], opts: Any = None) -> Work:
        checks.all_gather_coalesced(output_lists, inputs, self.size())
        return super().allgather_coalesced(output_lists, inputs, opts)

    def gather(self, output_lists: Any, inputs: Any, *options: Any, **named: Any) -> Work:
        self._check_parts("gather", output_lists, inputs)
        return super().gather(output_lists, inputs, *options, **named)

    def scatter(self, outputs: Any, input_lists: Any, *options: Any, **named: Any) -> Work:
        self._check_parts("scatter", input_lists, outputs)
        return super().scatter(outputs, input_lists, *options, **named)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, timeout: Timeout = None
    ) -> Work:
        checks.all_to_all(outputs, inputs, self.size())
        return super().alltoall(outputs, inputs, opts, timeout)

    def all_to_all_single(self, output: Tensor, input: Tensor, *options: Any, **named: Any) -> Work:
        checks.all_to_all_single(output, input)
        return super().all_to_all_single(output, input, *options, **named)

    alltoall_base = all_to_all_single

    def _check_parts(self, name: str, lists: Any, part: Any) -> None:
        """Parts unlike the one tensor of this rank; where there are none or too many, the adapter says so."""
        if not isinstance(part, Tensor) and len(part) == 1 == len(lists) and len(lists[0]) == self.size():
            checks.alike(name, lists[0], part[0])

    # -- gloo behind

    def _refused(self, name: str, calls: Sequence[Any], error: ArgumentError) -> Work:
        return self._by_gloo() if _is_for_gloo(name, error) else super()._refused(name, calls, error)

    def _by_gloo(self) -> Work:
        """Makes the call that is under way on gloo, with the arguments of the method that torch called."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (frame.f_locals.get("self") is not self or frame.f_code.co_name[0] == "_"):
            frame = frame.f_back
        assert frame is not None
        method = frame.f_code.co_name
        given = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
        arguments = [frame.f_locals[name] for name in given if name not in ("op", "timeout", "root")]
        if given[0] == "tensors" and isinstance(arguments[0], Tensor):
            arguments[0] = [arguments[0]]
        gloo = self.gloo_behind()
        return getattr(gloo, method if hasattr(gloo, method) else _OLD_NAMES[method])(*arguments)  # type: ignore[no-any-return]

    def gloo_behind(self) -> Any:
        """The real group of gloo, for calls that unisono refuses; made at the first one, which all its ranks make.

        It connects two ranks when they first talk to each other, so a message needs only its two.
        """
        if self._behind is None:
            assert self._store is not None
            options = _real._Options()
            options._timeout = self.options._timeout
            options._devices = [_real.create_default_device(lazy_init=True)]
            store = c10d.PrefixStore(f"gloo behind {self.unisono_group.name}", self._store)
            self._behind = _real(store, self.rank(), self.size(), options)
            _say(f'group "{self.group_name}": a call that unisono does not take goes to gloo')
        return self._behind


def _is_for_gloo(name: str, error: ArgumentError) -> bool:
    """Whether gloo takes what unisono has refused; if not, the error is to come at once, and without the others."""
    if error.rule not in ("dense", "device", "dtype_known"):
        return False
    device, layout = error.got[:2] if error.rule == "dense" else (error.got, "torch.strided")
    # Messages are bytes to gloo; it reduces no dtype that unisono does not know.
    is_bytes = name in refusals.MESSAGES and str(layout) == "torch.strided" and not str(device).startswith("meta")
    return str(device).startswith("cuda") or is_bytes


class ServedGroup(ServedAdapter, registration.ProcessGroupUnisono):
    """A process group that was asked for as "gloo"."""


ServedAdapter.group_type = ServedGroup
keep_uncompiled(ServedAdapter, ServedGroup)
_real: Any = dist.ProcessGroupGloo


class _StandIn(type):
    """The class of what stands where torch has ProcessGroupGloo."""

    def __call__(
        cls, store: Any, rank: int, size: int, timeout: Any = None, *, options: Any = None, **more: Any
    ) -> Any:
        given = [value for value in (timeout, options) if value is not None]
        reason = _why_not_ours(sys._getframe(1), more)
        if reason:
            _say(f"{reason}: gloo itself")
            return _real(store, rank, size, *given, **more)
        limit = distributed_c10d.default_pg_timeout
        for value in given:
            limit = value if isinstance(value, timedelta) else value._timeout
        made = _make(store, rank, size, limit, next((v for v in given if not isinstance(v, timedelta)), None))
        if made is None:
            return _real(c10d.PrefixStore("gloo instead of unisono", store), rank, size, *given)
        _say(f'"gloo" is unisono in this program (first group: "{made.unisono_group.name}", {size} ranks)', rank)
        return made

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (_real, ServedAdapter))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, (_real, ServedAdapter))

    def __getattr__(cls, name: str) -> Any:
        return getattr(_real, name)


def _why_not_ours(caller: FrameType, more: dict[str, Any]) -> str:
    """Why a group must be gloo's own, empty if it need not."""
    if wanted := [name for name, value in more.items() if value]:  # since torch 2.15 a group that can be changed later
        return f"unisono has no {', '.join(wanted)}"
    if caller.f_code in _MAKING:
        others = [f"{d}:{name}" for d, name in registration.wanted_backends().items() if name != "gloo"]
        if others and not groups.PYTHON_BACKENDS:
            return f"torch {torch.__version__} cannot have a Python backend beside {', '.join(others)}"
        return ""
    module = str(caller.f_globals.get("__name__"))
    # torch's own code hands it to C++: the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL, RPC, _dist2.
    return f"{module} needs a backend in C++" if module.partition(".")[0] == "torch" else ""


def _make(store: Any, rank: int, size: int, limit: timedelta, options: Any) -> ServedAdapter | None:
    """The group on unisono; None if some rank could not join it: then no rank has it, and all know."""
    asked = registration.torch_is_making()
    ranks = asked.get("global_ranks_in_group") or getattr(options, "global_ranks_in_group", None)
    members = list(ranks) if ranks else list(range(size))
    name = str(asked.get("group_name") or getattr(options, "group_name", "") or "gloo")
    group, why = None, ""
    try:
        group = Group.from_store(store, rank, size, ranks=members, name=name, timeout_s=limit.total_seconds())
    except (SystemCallError, HeapMemoryError, PeerLostError, AbortedError) as error:  # not the program's mistake
        why = str(error)
    reasons = _agree(store, members, rank, name, why, limit)
    if reasons:
        if group is not None:
            group.close()
        if rank == 0:
            log.warn(f'group "{name}" is gloo\'s, since unisono cannot make it: {"; ".join(reasons)}')
        return None
    assert group is not None
    combined = any(name != "gloo" for name in registration.wanted_backends().values())
    made: ServedAdapter = ServedBackend(group, store) if combined else ServedGroup(group, store)
    if options is not None:
        made._options = options
    return made


def _agree(store: Any, members: Sequence[int], rank: int, name: str, why: str, limit: timedelta) -> list[str]:
    """Tells the other ranks whether this one has joined, and returns why some have not; empty if all have."""
    use = store.add(f"unisono/{name}/served/{members[rank]}", 1)  # a name can be used again
    keys = [f"unisono/{name}/served/{use}/{member}" for member in members]
    store.set(keys[rank], why)
    if not rendezvous.wait_for(store, keys, time.monotonic() + limit.total_seconds()):
        late = [member for member, key in zip(members, keys, strict=True) if not store.check([key])]
        raise CollectiveTimeoutError(f'group "{name}": ranks {late} did not say in time whether they have joined')
    found = [value.decode() for value in store.multi_get(keys)]
    return [f"rank {member}: {text}" for member, text in zip(members, found, strict=True) if text]


if groups.PYTHON_BACKENDS:

    class ServedBackend(ServedAdapter, registration.BackendUnisono):
        """The CPU half of a group that was asked for as "cpu:gloo" and something else."""

    keep_uncompiled(ServedBackend)


ProcessGroupGloo = _StandIn("ProcessGroupGloo", (), {"__doc__": __doc__, "__module__": _real.__module__})
_places = (distributed_c10d, dist, c10d)
_said: set[str] = set()


def install(on: bool) -> None:
    """Puts the stand-in where torch has its class, or the class back."""
    for place in _places:
        place.ProcessGroupGloo = ProcessGroupGloo if on else _real  # type: ignore[attr-defined]


def _say(text: str, rank: int = 0) -> None:
    """Tells once what was replaced, with UNISONO_LOG=info."""
    if settings.log == "info" and rank == 0 and text.partition("(")[0] not in _said:
        _said.add(text.partition("(")[0])
        print(f"unisono: {text}", file=sys.stderr, flush=True)
