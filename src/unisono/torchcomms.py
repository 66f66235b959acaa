"""A backend for torchcomms: ``torchcomms.new_comm("unisono", torch.device("cpu"), name="world")``.

torchcomms loads this module by its entry-point group ``torchcomms.backends``, and loading registers the backend. It is
written for the Python backends of torchcomms' ABI 1.3: methods by name, tensors written in place, None or something
with ``wait()`` returned.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torchcomms
from torch import Tensor

from .base import ops
from .calls.splits import cut_if_unequal
from .group.group import Group


class Backend(torchcomms.TorchCommBackend):  # type: ignore[misc]
    """One communicator of torchcomms over one :class:`unisono.Group`."""

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self._joined = group
        self._limit_s: float | None = None  # the group's own

    @property
    def group(self) -> Group:
        """The group behind it."""
        if self._joined is None:
            raise RuntimeError("the communicator is not initialized, or was finalized")
        return self._joined

    # -- coming and going

    def init(self, device: Any, name: str, options: Any) -> None:
        """Joins the ranks of torchcomms' or torchrun's environment, through the store of the options if it has one."""
        if device.type != "cpu":
            raise ValueError(f"Expected device cpu, got {device}")
        limit_s = options.timeout.total_seconds()
        if options.store is None:
            self._joined = Group.from_env(name=name, timeout_s=limit_s)
        else:
            rank = _environment("TORCHCOMM_RANK", "RANK")
            size = _environment("TORCHCOMM_SIZE", "WORLD_SIZE")
            self._joined = Group.from_store(options.store, rank, size, name=name, timeout_s=limit_s)

    def finalize(self) -> None:
        self.group.close()
        self._joined = None

    def split(self, ranks: Sequence[int], name: str, options: Any) -> Backend | None:
        """All ranks call it; one that gives no ranks is in none and gets None."""
        made = self.group.split(list(ranks) or None, name=name)
        return None if made is None else Backend(made)

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit_s = timeout.total_seconds()

    def get_rank(self) -> int:
        return self.group.rank

    def get_size(self) -> int:
        return self.group.size

    def get_backend_name(self) -> str:
        return "unisono"

    def get_comm_name(self) -> str:
        return self.group.name

    # -- calls

    def send(self, tensor: Tensor, dst: int, async_op: bool) -> Any:
        return self.group.send(tensor, dst, async_op=async_op, timeout_s=self._limit_s)

    def recv(self, tensor: Tensor, src: int, async_op: bool) -> Any:
        handle = self.group.recv(tensor, src, async_op=async_op, timeout_s=self._limit_s)
        return handle if async_op else None

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Any:
        return self.group.broadcast(tensor, root, async_op=async_op, timeout_s=self._limit_s)

    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Any:
        return self.group.all_reduce(tensor, _op(op), async_op=async_op, timeout_s=self._limit_s)

    def reduce(self, tensor: Tensor, root: int, op: Any, async_op: bool) -> Any:
        return self.group.reduce(tensor, root, _op(op), async_op=async_op, timeout_s=self._limit_s)

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool) -> Any:
        return self.group.all_gather(tensor_list, tensor, async_op=async_op, timeout_s=self._limit_s)

    all_gather_v = all_gather  # the list says how much each rank has

    def all_gather_single(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        return self.group.all_gather(output, input, async_op=async_op, timeout_s=self._limit_s)

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any, async_op: bool) -> Any:
        return self.group.reduce_scatter(output, input_list, None, _op(op), async_op=async_op, timeout_s=self._limit_s)

    reduce_scatter_v = reduce_scatter

    def reduce_scatter_single(self, output: Tensor, input: Tensor, op: Any, async_op: bool) -> Any:
        return self.group.reduce_scatter(output, input, None, _op(op), async_op=async_op, timeout_s=self._limit_s)

    def all_to_all(self, output_list: list[Tensor], input_list: list[Tensor], async_op: bool) -> Any:
        return self.group.all_to_all(output_list, input_list, async_op=async_op, timeout_s=self._limit_s)

    def all_to_all_single(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        return self.group.all_to_all(output, input, async_op=async_op, timeout_s=self._limit_s)

    def all_to_all_v_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], async_op: bool
    ) -> Any:
        """Splits are rows of dimension 0."""
        expected = cut_if_unequal(output_splits, output.shape, self.group.size)
        sent = cut_if_unequal(input_splits, input.shape, self.group.size)
        return self.group.all_to_all(output, input, expected, sent, async_op=async_op, timeout_s=self._limit_s)

    def scatter(self, output: Tensor, input_list: list[Tensor], root: int, async_op: bool) -> Any:
        given = input_list if self.group.rank == root else None
        return self.group.scatter(output, given, root, async_op=async_op, timeout_s=self._limit_s)

    def gather(self, output_list: list[Tensor], input: Tensor, root: int, async_op: bool) -> Any:
        given = output_list if self.group.rank == root else None
        return self.group.gather(given, input, root, async_op=async_op, timeout_s=self._limit_s)

    def barrier(self, async_op: bool) -> Any:
        return self.group.barrier(async_op=async_op, timeout_s=self._limit_s)


def _op(op: Any) -> str:
    """The name of a torchcomms ReduceOp; PREMUL_SUM has a factor that torchcomms does not show to Python."""
    name: str = op.type.name.lower()
    if ops.NUMBERS.get(name) not in ops.TORCH_OPS:
        known = ", ".join(ops.name_of(number).upper() for number in ops.TORCH_OPS)
        raise ValueError(f"Expected one of {known}, got {op.type.name}")
    return name


def _environment(*names: str) -> int:
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    raise ValueError(f"{' or '.join(names)} not set: start the ranks with torchrun")


torchcomms.register_backend("unisono", Backend)
