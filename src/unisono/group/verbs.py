"""Every verb as a method of a group.

A method only gives its arguments their order: the group's ``transport``, the core's communicator or on several hosts
one over those, takes and checks what users write, and returns None, or with ``async_op=True`` a Handle: until its
``wait()`` has returned, neither read the results nor write the inputs. Results are the same bits on every rank,
whatever the message size and wherever the tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from .. import _core
from ..base.handle import Handle
from ..base.ops import Op

Tensors: TypeAlias = Tensor | Sequence[Tensor]
Counts: TypeAlias = Sequence[int] | None
Seconds: TypeAlias = float | None


class Verbs:
    """The calls of a :class:`unisono.Group`."""

    transport: _core.Communicator  # what moves the data; see transport/protocol.py

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        out: Tensor | None = None,
        factor: float | None = None,
        async_op: bool = False,
        timeout_s: Seconds = None,
    ) -> Handle | None:
        """Combines a tensor over all ranks, in place or into ``out``; all ranks get the same bits::

            rank 0  [1, 2]        [11, 22]
            rank 1  [10, 20]  ->  [11, 22]

        Autograd does not see it; :func:`unisono.comm_func.all_reduce` has a gradient.

        Args:
            tensor: this rank's part, and the result if there is no ``out``
            op: sum, avg, product, min, max, band, bor, bxor or premul_sum, or a torch ReduceOp
            out: where the result goes; ``tensor`` then stays as it is
            factor: what premul_sum multiplies by
            async_op: True: return a Handle at once; read no result and change no input before its ``wait()``
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            None, or with ``async_op=True`` a Handle.
        """
        return self.transport.all_reduce(tensor, out, op, factor, timeout_s, async_op)  # type: ignore[no-any-return]

    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: Op = "sum",
        *,
        out: Tensor | None = None,
        factor: float | None = None,
        async_op: bool = False,
        timeout_s: Seconds = None,
    ) -> Handle | None:
        """Combines a tensor over all ranks into the root's tensor (or its ``out``); the others' stay as they are.

        Args:
            tensor: this rank's part
            root: the group rank of the root
            op: sum, avg, product, min, max, band, bor, bxor or premul_sum, or a torch ReduceOp
            out: where the root's result goes, instead of ``tensor``
            factor: what premul_sum multiplies by
            async_op: True: return a Handle at once; read no result and change no input before its ``wait()``
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            None, or with ``async_op=True`` a Handle.
        """
        return self.transport.reduce(tensor, root, out, op, factor, timeout_s, async_op)  # type: ignore[no-any-return]

    def broadcast(
        self, tensor: Tensor, root: int, *, async_op: bool = False, timeout_s: Seconds = None
    ) -> Handle | None:
        """Copies the root's tensor into every other rank's.

        Args:
            tensor: what is sent, or overwritten
            root: the group rank of the root
            async_op: True: return a Handle at once; read no result and change no input before its ``wait()``
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            None, or with ``async_op=True`` a Handle.
        """
        return self.transport.broadcast(tensor, root, None, timeout_s, async_op)  # type: ignore[no-any-return]

    def all_gather(
        self,
        output: Tensors,
        input: Tensor,
        counts: Counts = None,
        *,
        async_op: bool = False,
        timeout_s: Seconds = None,
    ) -> Handle | None:
        """Puts every rank's input behind one another on all ranks. ``counts`` are elements per rank, equal if None::

            counts [1, 2]   rank 0  [1]         [1, 10, 20]
                            rank 1  [10, 20]    [1, 10, 20]

        Args:
            output: one tensor for everything, or a list of one tensor per rank
            input: what this rank gives; may be its own part of the output
            counts: elements (not rows) of each rank, for rows of 4 ``[8, 12]``; None: all the same
            async_op: True: return a Handle at once; read no result and change no input before its ``wait()``
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            None, or with ``async_op=True`` a Handle.
        """
        return self.transport.all_gather(output, input, counts, timeout_s, async_op)  # type: ignore[no-any-return]

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensors,
        counts: Counts = None,
        op: Op = "sum",
        *,
        factor: float | None = None,
        async_op: bool = False,
        timeout_s: Seconds = None,
    ) -> Handle | None:
        """Combines the inputs of all ranks and gives each rank its part. ``counts`` are elements per rank::

            counts [1, 2]   rank 0  [1, 2, 3]        [11]
                            rank 1  [10, 20, 30]     [22, 33]

        Args:
            output: this rank's part of the result; may be its own part of the input
            input: one tensor, or a list of one tensor per rank
            counts: elements (not rows) of each rank's part; None: all the same
            op: sum, avg, product, min, max, band, bor, bxor or premul_sum, or a torch ReduceOp
            factor: what premul_sum multiplies by
            async_op: True: return a Handle at once; read no result and change no input before its ``wait()``
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            None, or with ``async_op=True`` a Handle.
        """
        return self.transport.reduce_scatter(output, input, counts, op, factor, timeout_s, async_op)  # type: ignore[no-any-return]

    def gather(
        self,
        output: Tensors | None,
        input: Tensor,
        root: int,
        counts: Counts = None,
        *,
        async_op: bool = False,
        timeout_s: Seconds = None,
    ) -> Handle | None:
        """Puts every rank's input behind one another on the root; ``output`` and ``counts`` are read there only.

        Args:
            output: on the root one tensor, or a list of one per rank; None elsewhere
            input: what this rank gives
            root: the group rank of the root
            counts: on the root, elements (not rows) of each rank; None: all the same
            async_op: True: return a Handle at once; read no result and change no input before its ``wait()``
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            None, or with ``async_op=True`` a Handle.
        """
        return self.transport.gather(output, input, root, counts, timeout_s, async_op)  # type: ignore[no-any-return]

    def scatter(
        self,
        output: Tensor,
        input: Tensors | None,
        root: int,
        counts: Counts = None,
        *,
        async_op: bool = False,
        timeout_s: Seconds = None,
    ) -> Handle | None:
        """Gives each rank its part of the root's input; ``input`` and ``counts`` are read on the root only.

        Args:
            output: what this rank gets
            input: on the root one tensor, or a list of one per rank; None elsewhere
            root: the group rank of the root
            counts: on the root, elements (not rows) of each rank; None: all the same
            async_op: True: return a Handle at once; read no result and change no input before its ``wait()``
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            None, or with ``async_op=True`` a Handle.
        """
        return self.transport.scatter(output, input, root, counts, timeout_s, async_op)  # type: ignore[no-any-return]

    def all_to_all(
        self,
        output: Tensors,
        input: Tensors,
        output_counts: Counts = None,
        input_counts: Counts = None,
        *,
        async_op: bool = False,
        timeout_s: Seconds = None,
    ) -> Handle | None:
        """Sends part j of rank i's input to part i of rank j's output::

            rank 0  [1, 2]         [1, 10]
            rank 1  [10, 20]   ->  [2, 20]

        Args:
            output: one tensor, or a list of one per rank
            input: one tensor, or a list of one per rank
            output_counts: elements (not rows) that come from each rank; None: all the same
            input_counts: elements (not rows) that go to each rank; None: all the same
            async_op: True: return a Handle at once; read no result and change no input before its ``wait()``
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            None, or with ``async_op=True`` a Handle.
        """
        return self.transport.all_to_all(output, input, output_counts, input_counts, timeout_s, async_op)  # type: ignore[no-any-return]

    def barrier(self, *, async_op: bool = False, timeout_s: Seconds = None) -> Handle | None:
        """Returns when every rank has called it.

        Args:
            async_op: True: return a Handle at once, whose ``wait()`` waits for the others
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            None, or with ``async_op=True`` a Handle.
        """
        return self.transport.barrier(timeout_s, async_op)

    def send(
        self, tensor: Tensor, dst: int, tag: int = 0, *, async_op: bool = False, timeout_s: Seconds = None
    ) -> Handle | None:
        """Sends a tensor to one rank. Messages with the same tag arrive in order; up to 64 KiB it does not wait.

        Args:
            tensor: what is sent
            dst: the group rank that receives it
            tag: the receiver's must be the same
            async_op: True: return a Handle at once; read no result and change no input before its ``wait()``
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            None, or with ``async_op=True`` a Handle.
        """
        return self.transport.send(tensor, dst, tag, timeout_s, async_op)

    def recv(
        self, tensor: Tensor, src: int | None = None, tag: int = 0, *, async_op: bool = False, timeout_s: Seconds = None
    ) -> Handle | int:
        """Receives a tensor of the same size and dtype from ``src``, or from anyone.

        Args:
            tensor: what is overwritten; as many elements, and the same dtype, as was sent
            src: the group rank that sends; None: any
            tag: the sender's must be the same
            async_op: True: return a Handle at once; read no result and change no input before its ``wait()``
            timeout_s: seconds until CollectiveTimeoutError; None: the group's limit

        Returns:
            The rank it came from, or with ``async_op=True`` a Handle.
        """
        return self.transport.recv(tensor, src, tag, timeout_s, async_op)
