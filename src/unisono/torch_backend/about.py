"""What a process group says about itself, and how it comes and goes: the half of the adapter without collectives."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ..base import tensors
from ..base.counter import Counter
from ..base.work import Work
from ..group import names as groups
from ..group.group import Group
from ..group.ranks import check_rank
from . import recorded
from .arguments import group_options

_CPU = torch.device("cpu")


class AboutGroup:
    """Names, options, stores, time limits, splits and the end of a group, as torch asks for them."""

    supports_splitting = True
    supports_coalescing = False  # the batch is the caller's list; see _start_coalescing
    supports_time_estimate = False
    supports_shrinking = False
    group_type: type[Any]  # what a split gives; set in registration.py

    def _begin(self, group: Group, store: c10d.Store | None) -> None:
        self.unisono_group = group
        self._store = store
        self._timeout_s = 0.0  # 0: the group's own
        self._options: Any = None
        self._name, self._desc = group.name, "undefined"
        self._batch: list[Work] | None = None
        # DDP.join hands a Work to C++ that does not keep its Python half alive, without which it never ends.
        self._small: deque[Work] = deque(maxlen=64)
        self._comm_name = f"unisono%{group.name}%{group.transport.id:016x}"
        self._splits = Counter()
        self._monitored = Counter()
        if recorded.capacity():
            recorded.attach(self)  # type: ignore[arg-type]  # the other half is there too

    @property
    def unisono_adapter(self) -> Any:
        """This object itself; the C++ half of a backend hands the look-up on to here."""
        return self

    def rank(self) -> int:
        return self.unisono_group.rank

    def size(self) -> int:
        return self.unisono_group.size

    getRank, getSize = rank, size

    def name(self) -> str:
        return "unisono"

    getBackendName = _get_backend_name = name

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def setGroupName(self, name: str) -> None:
        self._name = name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc
        if desc and desc != "undefined":
            self.unisono_group.rename(desc)  # errors call the group what the user calls it

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device).type}: unisono groups are for cpu"
            )
        return self

    def get_group_store(self) -> c10d.Store | None:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of later calls."""
        self._timeout_s = timeout.total_seconds()
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    @property
    def options(self) -> Any:
        """The group's options, as gloo's groups have them; ``_timeout`` is the limit of calls that have none."""
        if self._options is None:
            self._options = group_options(self.unisono_group)
        return self._options

    def _get_sequence_number_for_group(self) -> int:
        return self.unisono_group.calls

    def _set_sequence_number_for_group(self) -> None:
        pass  # all ranks count from 0

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self.unisono_group.barrier()

    def get_comm_name(self, rank: int) -> str:
        """The communicator's name, the same on every rank; any ``group`` argument of unisono takes it.

        Ascend's ``get_hccl_comm_name``: ``rank`` is this process's rank in the group.
        """
        check_rank("rank", rank, self.size())
        groups.remember(self._comm_name, self)  # type: ignore[arg-type]
        return self._comm_name

    # FSDP2 takes its buffers from here after set_allocate_memory_from_process_group_for_comm(True).
    def supports_tensor_alloc(self, device: torch.device | int) -> bool:
        return isinstance(device, int) or torch.device(device).type == "cpu"  # C++ gives the number of a CPU

    def allocate_tensor(self, size: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor in shared memory, which collectives read and write in place."""
        return tensors.empty([size] if isinstance(size, int) else size, dtype=dtype)

    # -- coming and going

    def shutdown(self) -> None:
        self.unisono_group.close()

    def abort(self) -> None:
        self.unisono_group.abort("ProcessGroup.abort()")

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Any:
        """Makes a group of some of this group's ranks; all of its ranks call it, and those not listed get None."""
        members = list(ranks) if self.rank() in ranks else None
        number = self._splits.next()  # all ranks split together, so they agree on it
        child = self.unisono_group.split(
            members,
            name=group_name or f"{self.group_name}/{number}",
            timeout_s=None if timeout is None else timeout.total_seconds(),
        )
        if child is None:
            return None
        group = self.group_type(child, self._store)
        if group_desc:
            group.setGroupDesc(group_desc)
        return group

    splitGroup = split_group
