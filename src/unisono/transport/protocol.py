"""What every way of moving data offers: one method per verb, on one group.

An adapter reads what a user wrote (``unisono.calls``), finds the group's transport (:func:`unisono.transport.find`)
and calls one verb of it. Transports are

    unisono._core.Communicator   the core, on groups of ours; the protocol is its Python interface
    HostsTransport               groups of ours over several hosts: the core inside, an engine between
    GlooTransport                gloo: send and receive in place
    ListsTransport               nccl, hccl, xccl: list forms that take unequal tensors
    BackendTransport             any other backend: one broadcast, or one reduce, per rank

A new one is a file beside these and a line in ``find.py``; the tests in ``tests/transports`` take it by its name.

Words: tensors are contiguous and of one dtype; ``counts`` are elements per rank, None for equal parts; ``op`` is a
name or a torch ReduceOp, as ``_core.read_op`` reads it; ranks are ranks in the group; ``timeout_s`` None is
the group's, as it always is on other backends. A verb returns None when the call is over, or with ``async_op`` a
Handle. Arguments are passed by position.

An output may also be a number: the rows of a new tensor like the input, -1 for as many as the verb gives for equal
parts (``outputs.py``). For all_to_all it may be a list of shapes. The verb then returns the new tensor or tensors, or
with ``async_op`` a Handle that has them; the input may have gaps, and is copied if it has. Ranks that get no result, in
a reduce or a gather, return a new 0 of shape [1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor

from ..base.handle import Handle

if TYPE_CHECKING:
    from .. import _core

Counts = Sequence[int] | None
Tensors = Tensor | Sequence[Tensor]
Output: TypeAlias = Any  # a tensor, one per rank, None, or a number: the rows of a new tensor
Seconds = float | None
Factor = float | None


class Transport(Protocol):
    """The verbs of one group."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def cache_bytes(self) -> int:
        """The cache that all ranks share; pieces of fused products are cut to fit it. 0: do not cut."""

    @property
    def by_tree(self) -> bool:
        """Whether sums over the ranks follow the tree of core/kernels/reduce.h, whatever their size and path."""

    def all_reduce(
        self, tensor: Tensor, out: Output, op: Any, factor: Factor, timeout_s: Seconds, async_op: bool, /
    ) -> Any:
        """Combines ``tensor`` over all ranks into ``out``, or in place."""

    def reduce(
        self, tensor: Tensor, root: int, out: Output, op: Any, factor: Factor, timeout_s: Seconds, async_op: bool, /
    ) -> Any:
        """As all_reduce, on the root only; other ranks' tensors stay as they are."""

    def broadcast(self, tensor: Tensor, root: int, out: Output, timeout_s: Seconds, async_op: bool, /) -> Any:
        """The root's ``tensor`` into every rank's ``out``, or in place."""

    def all_gather(
        self, output: Output, input: Tensor, counts: Counts, timeout_s: Seconds, async_op: bool, /
    ) -> Any: ...

    def reduce_scatter(
        self, output: Output, input: Tensors, counts: Counts, op: Any, factor: Factor, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any: ...  # fmt: skip

    def gather(
        self, output: Output, input: Tensor, root: int, counts: Counts, timeout_s: Seconds, async_op: bool, /
    ) -> Any: ...

    def scatter(
        self, output: Output, input: Tensors | None, root: int, counts: Counts, timeout_s: Seconds, async_op: bool, /
    ) -> Any: ...

    def all_to_all(
        self, output: Output, input: Tensors, output_counts: Counts, input_counts: Counts, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any: ...  # fmt: skip

    def barrier(self, timeout_s: Seconds, async_op: bool, /) -> Handle | None: ...

    def send(self, tensor: Tensor, dst: int, tag: int, timeout_s: Seconds, async_op: bool, /) -> Any: ...

    def recv(self, tensor: Tensor, src: int | None, tag: int, timeout_s: Seconds, async_op: bool, /) -> Any:
        """Returns the source's rank, or with ``async_op`` a Handle."""

    def matmul_reduce(
        self, products: Tensor, output: Tensor, op: Any, scale: float, residual: Tensor | None, counts: Counts,
        hash: int, words: Callable[[], str], timeout_s: Seconds, /,
    ) -> Handle | None:  # fmt: skip
        """Reduces products, scales, adds the residual and rounds once into ``output``.

        With ``counts`` (outputs × ranks) each rank gets its part only. ``hash`` stands for what must be equal on all
        ranks, ``words`` say it in an error. The tensors are made by :meth:`new_rows`. A transport that reduces in the
        background returns a Handle; the products must stay as they are until it is done.
        """

    def new_like(self, tensor: Tensor, /) -> Tensor | None:
        """A new tensor of this shape and dtype, for an output; None if the tensor is not contiguous, dense, plain."""

    def new_rows(self, tensor: Tensor, rows: int, /) -> Tensor | None:
        """As :meth:`new_like`, with another number of rows; a number counts as one row."""


if TYPE_CHECKING:
    _core_is_one: type[Transport] = _core.Communicator
