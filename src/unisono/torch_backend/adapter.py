"""What torch asks of a process group, over a Group: every function of torch.distributed on CPU tensors.

torch.distributed finds these methods by name; its C++ code (DDP's reducer, functional collectives) reaches allgather,
all_gather_single_coalesced, allreduce, allreduce_coalesced, all_to_all_single, barrier, broadcast, reduce_scatter,
reduce_scatter_single_coalesced, send and recv, and must get a Work from each. A method unpacks torch's options and
hands the tensors on: no copies, one verb of the group's transport, except where torch asks for several together.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ..base.errors import ArgumentError, make_argument_error
from ..base.uncompiled import keep_uncompiled
from ..base.work import FINISHED, Work, tensors_in
from ..calls.splits import cut_if_unequal
from . import checks, monitor, refusals, several, sparse
from .about import AboutGroup
from .arguments import Root, Timeout, inner, of_root, one, options, settled
from .refusals import NotOneTensor
from .strided import Copies, is_plain, overlapping

_STRIDED = torch.strided
_UNSET = timedelta(milliseconds=-1)  # torch's word for: the group's timeout
_IN_BACKGROUND = c10d.BarrierOptions()  # as torch makes them: asyncOp, and the group's timeout
_TAKES_ONE = "send takes a single tensor"  # gloo's words, for recv too
_profiling = torch._C._autograd._profiler_enabled

# Functions of torch that ask for a message and then wait for it at once.
_WAITING = {inspect.unwrap(function).__code__ for function in (dist.send, dist.recv)}


class ProcessGroupAdapter(AboutGroup):
    """What torch asks of a process group, and of the backend of one, over a unisono :class:`Group`.

    The methods take torch's option objects, and like torch's own groups also plain arguments:
    ``pg.allreduce([t], opts)`` and ``pg.allreduce(t, ReduceOp.MAX)``. They return a Work.
    """

    # -- collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Timeout = None, op: Any = None) -> Work:
        opts = options(c10d.AllreduceOptions, opts, timeout, op)
        try:
            tensor = one(tensors)
        except NotOneTensor:
            return several.all_reduce(self, tensors, opts)
        if tensor.layout is not _STRIDED:
            return self._reduce_sparse(tensor, opts.reduceOp)
        work = self._run("all_reduce", (tensor, None, opts.reduceOp, None), opts)
        if work is not FINISHED and tensor.numel() <= 8:
            self._small.append(work)
        return work

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = options(c10d.AllreduceCoalescedOptions, opts)
        calls = [(tensor, None, opts.reduceOp, None) for tensor in tensors]
        return self._run_all("all_reduce", "all_reduce_coalesced", calls, opts, list(tensors))

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Timeout = None, root: Root = None
    ) -> Work:
        opts = options(c10d.ReduceOptions, opts, op, timeout, root)
        tensor = one(tensors, "reduce: requires a single-element tensor list")
        if opts.rootTensor:
            checks.root("reduce", opts.rootRank, self.size(), opts.rootTensor)
        return self._run("reduce", (tensor, opts.rootRank, None, opts.reduceOp, None), opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Timeout = None, root: Root = None) -> Work:
        opts = options(c10d.BroadcastOptions, opts, timeout, root)
        try:
            tensor = one(tensors)
        except NotOneTensor:
            return several.broadcast(self, tensors, opts)
        if opts.rootTensor:
            checks.root("broadcast", opts.rootRank, self.size(), opts.rootTensor)
        return self._run("broadcast", (tensor, opts.rootRank, None), opts)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> Work:
        opts = options(c10d.AllgatherOptions, opts, timeout)
        try:
            tensor = one(inputs)
        except NotOneTensor:
            return several.all_gather(self, output_lists, inputs, opts)
        outputs = inner(output_lists, "allgather: requires input/output tensor lists to have the same length")
        return self._run("all_gather", (outputs, tensor, None), opts, outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None, timeout: Timeout = None) -> Work:
        opts = options(c10d.AllgatherOptions, opts, timeout)
        return self._run("all_gather", (output, input, None), opts, name="_all_gather_base")

    _allgather_base = all_gather_single

    def allgather_coalesced(self, output_lists: Any, inputs: Sequence[Tensor], opts: Any = None) -> Work:
        calls = [([of_rank[i] for of_rank in output_lists], tensor, None) for i, tensor in enumerate(inputs)]
        return self._run_all("all_gather", "all_gather", calls, options(c10d.AllgatherOptions, opts), output_lists)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        calls = [(output, input, None) for output, input in zip(outputs, inputs, strict=True)]
        opts = options(c10d.AllgatherOptions, opts)
        return self._run_all("all_gather", "all_gather_into_tensor_coalesced", calls, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: Timeout = None, op: Any = None
    ) -> Work:
        opts = options(c10d.ReduceScatterOptions, opts, timeout, op)
        output = one(outputs, "reduce_scatter only supports 1 output")
        inputs = inner(input_lists, "reduce_scatter: requires input/output tensor lists to have the same length")
        return self._run("reduce_scatter", (output, inputs, None, opts.reduceOp, None), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None, timeout: Timeout = None) -> Work:
        opts = options(c10d.ReduceScatterOptions, opts, timeout)
        arguments = (output, input, None, opts.reduceOp, None)
        return self._run("reduce_scatter", arguments, opts, name="_reduce_scatter_base")

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        opts = options(c10d.ReduceScatterOptions, opts)
        calls = [(output, input, None, opts.reduceOp, None) for output, input in zip(outputs, inputs, strict=True)]
        return self._run_all("reduce_scatter", "reduce_scatter_tensor_coalesced", calls, opts, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(
        self, output_lists: Any, inputs: Any, opts: Any = None, timeout: Timeout = None, root: Root = None
    ) -> Work:
        opts = options(c10d.GatherOptions, opts, timeout, root)
        tensor, root = one(inputs, "gather: requires a single-element input tensor list"), opts.rootRank
        outputs = of_root("gather", output_lists, self.rank(), root, self.size())
        return self._run("gather", (outputs, tensor, root, None), opts, outputs or [])

    def scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: Timeout = None, root: Root = None
    ) -> Work:
        opts = options(c10d.ScatterOptions, opts, timeout, root)
        output, root = one(outputs, "scatter: requires a single-element output tensor list"), opts.rootRank
        inputs = of_root("scatter", input_lists, self.rank(), root, self.size())
        return self._run("scatter", (output, inputs, root, None), opts)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, timeout: Timeout = None
    ) -> Work:
        opts = options(c10d.AllToAllOptions, opts, timeout)
        outputs = list(outputs)
        return self._run("all_to_all", (outputs, list(inputs), None, None), opts, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Timeout = None,
    ) -> Work:
        opts = options(c10d.AllToAllOptions, opts, timeout)
        size = self.unisono_group.size
        expected = cut_if_unequal(output_split_sizes, output.shape, size, rows_of_number=0)
        sent = cut_if_unequal(input_split_sizes, input.shape, size, rows_of_number=0)
        return self._run("all_to_all", (output, input, expected, sent), opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> Work:
        opts = options(c10d.BarrierOptions, opts, timeout)
        return self._run("barrier", (), opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 names the ranks that did not come in time."""
        if isinstance(timeout, c10d.BarrierOptions):
            timeout = None if timeout.timeout == _UNSET else timeout.timeout
        number = self._monitored.next()
        limit_s = self._timeout_s or self.unisono_group.timeout_s if timeout is None else timeout.total_seconds()
        monitor.barrier(self.unisono_group, limit_s, wait_all_ranks, tag=-number)

    # -- point to point

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        return self._message("send", "send", one(tensors, _TAKES_ONE), dst, tag, sys._getframe().f_back)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._message("recv", "recv", one(tensors, _TAKES_ONE), src, tag, sys._getframe().f_back)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._message("recv", "recvAnySource", one(tensors, _TAKES_ONE), None, tag, None)

    # -- how a call is made

    def _run(
        self, verb: str, arguments: tuple[Any, ...], opts: Any, outputs: Any = None, name: str | None = None
    ) -> Work:
        """Calls a verb of the group: now if torch's options say asyncOp=False, else in the background.

        ``outputs`` is what its future holds, a list of the first argument if None; ``name`` is what torch calls the
        function, in errors and in the profiler, if not like the verb.
        """
        if self._batch is None and not _profiling():
            try:
                if self.unisono_group.transport.call_now(verb, arguments, opts, self._timeout_s):
                    return FINISHED
            except ArgumentError:  # before anything was sent
                pass  # below the call is made with copies if that helps, or refused again
        return self._start(verb, name or verb, [arguments], opts, list(arguments[:1]) if outputs is None else outputs)

    def _run_all(self, verb: str, name: str, calls: Sequence[tuple[Any, ...]], opts: Any, outputs: Any) -> Work:
        """Calls a verb for several tensors together; every input is read before any output is written."""
        if not calls:
            raise refusals.not_one_tensor(0, f"{name}: requires non-empty tensor list")
        calls = calls if is_plain(calls) else settled(calls)
        return self._start(verb, name, calls, opts, outputs, overlapping(calls))

    def _message(
        self, verb: str, name: str, tensor: Tensor, peer: int | None, tag: int, caller: FrameType | None
    ) -> Work:
        """Sends or receives: now if the caller of the caller, dist.send or dist.recv, would wait anyway."""
        if tag < 0:  # others are ours, see monitored_barrier
            raise refusals.refusal(name, (tensor,), make_argument_error("tag_negative", "tag", got=tag))
        group = self.unisono_group
        waits = caller is not None and caller.f_back is not None and caller.f_back.f_code in _WAITING
        if waits and peer != group.rank and self._batch is None and not _profiling():
            try:
                getattr(group.transport, verb)(tensor, peer, tag, self._timeout_s, False)
                return FINISHED
            except ArgumentError:
                pass  # as in _run
        return self._start(verb, name, [(tensor, peer, tag)], _IN_BACKGROUND, [tensor])

    def timeout_of(self, opts: Any) -> float:
        """The time limit of a call in seconds; 0: the group's own."""
        return self._timeout_s if opts.timeout == _UNSET else opts.timeout.total_seconds()

    def _start(
        self,
        verb: str,
        name: str,
        calls: Sequence[tuple[Any, ...]],
        opts: Any,
        outputs: Any,
        apart: Collection[int] = (),
    ) -> Work:
        """Calls a verb, once or for several tensors together, with copies of tensors that it does not take.

        ``apart`` are the ids of tensors that need copies in any case.
        """
        now = not opts.asyncOp and self._batch is None
        timeout_s = self.timeout_of(opts)
        call = getattr(self.unisono_group.transport, verb)
        end = _record(name, calls) if _profiling() else None
        copies: list[Copies] = []
        if apart or not is_plain(calls):
            calls = settled(calls)
            if name not in refusals.MESSAGES:
                copies = [Copies(arguments, apart) for arguments in calls]  # all before the first call writes anything
                calls = [copied.arguments for copied in copies]
                now = now and not any(copies)
        try:
            handles = [call(*arguments, timeout_s, not now) for arguments in calls]
        except ArgumentError as error:
            if end is not None:
                end()
            return self._refused(name, calls, error)
        if now:
            if end is not None:
                end()
            return FINISHED
        work = Work(handles, outputs, end, [copied.write_back for copied in copies])
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _refused(self, name: str, calls: Sequence[Any], error: ArgumentError) -> Work:
        """What becomes of a call whose arguments unisono does not take: an error in torch's words."""
        raise refusals.refusal(name, calls, error) from None

    def _reduce_sparse(self, tensor: Tensor, op: Any) -> Work:
        try:
            return Work((), [sparse.all_reduce(self.unisono_group, tensor, op)])
        except ArgumentError as error:
            shown = () if tensor.layout is torch.sparse_coo else (tensor,)
            raise refusals.refusal("all_reduce", shown, error) from None

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._batch = self._batch or [], None
        return Work.joined(works)


def _record(name: str, calls: Sequence[tuple[Any, ...]]) -> Callable[[], None]:
    """Opens a range of the profiler, with the sizes of the first tensor of each argument; returns what closes it."""
    shown = [tensor for arguments in calls for argument in arguments for tensor in tensors_in(argument)[:1]]
    record = torch.autograd._record_function_with_args_enter(f"unisono:{name}", *shown)  # type: ignore[attr-defined]
    return lambda: torch.autograd._record_function_with_args_exit(record)  # type: ignore[attr-defined]


keep_uncompiled(ProcessGroupAdapter, AboutGroup, Work, type(FINISHED))
