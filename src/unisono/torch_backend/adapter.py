"""What torch asks of a process group, over a Group: every function of torch.distributed on CPU tensors.

torch.distributed finds these methods by name; its C++ code (DDP's reducer, functional collectives) reaches allgather,
all_gather_single_coalesced, allreduce, allreduce_coalesced, all_to_all_single, barrier, broadcast, reduce_scatter,
reduce_scatter_single_coalesced, send and recv, and must get a Work from each. A method unpacks torch's options and
hands the tensors on: no copies, one verb of the group's transport, except where torch asks for several together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions, Store

from ..base import tensors
from ..base.counter import Counter
from ..base.errors import ArgumentError, make_argument_error
from ..base.uncompiled import keep_uncompiled
from ..base.work import FINISHED, Work
from ..group import names as groups
from ..group.group import Group
from ..transport.protocol import Transport
from . import monitor, refusals, sparse
from .arguments import counts, nested, one, reduction, settled
from .strided import Copies, is_plain, overlapping

Tensor = torch.Tensor
_CPU = torch.device("cpu")
_SUM = dist.ReduceOp.SUM
_STRIDED = torch.strided
_UNSET = timedelta(milliseconds=-1)  # torch's word for: the group's timeout
_profiling = torch._C._autograd._profiler_enabled


class ProcessGroupAdapter:
    """What torch asks of a process group, and of the backend of one, over a unisono :class:`Group`.

    The methods take torch's option objects, and like torch's own groups also plain arguments:
    ``pg.allreduce([t], opts)`` and ``pg.allreduce(t, ReduceOp.MAX)``. They return a Work.
    """

    supports_splitting = True
    supports_coalescing = False  # the batch is the caller's list; see _start_coalescing
    supports_time_estimate = False
    supports_shrinking = False
    group_type: type[Any]  # what a split gives; set in registration.py

    def _begin(self, group: Group, store: Store | None) -> None:
        self.unisono_group = group
        self._store = store
        self._timeout_s = 0.0  # 0: the group's own
        self._names = [group.name, "undefined"]
        self._batch: list[Work] | None = None
        # DDP.join hands a Work to C++ that does not keep its Python half alive, without which it never ends.
        self._small: deque[Work] = deque(maxlen=64)
        self._comm_name = f"unisono%{group.name}%{group.transport.id:016x}"
        self._splits = Counter()
        self._monitored = Counter()

    @property
    def transport(self) -> Transport:
        """The verbs of the group; none after it was closed."""
        return self.unisono_group.transport

    # -- what torch asks a group about itself

    @property
    def unisono_adapter(self) -> ProcessGroupAdapter:
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

    @property
    def group_name(self) -> str:
        return self._names[0]

    @property
    def group_desc(self) -> str:
        return self._names[1]

    def getGroupName(self) -> str:
        return self._names[0]

    def getGroupDesc(self) -> str:
        return self._names[1]

    def setGroupName(self, name: str) -> None:
        self._names[0] = name

    def setGroupDesc(self, desc: str) -> None:
        self._names[1] = desc
        if desc and desc != "undefined":
            self.unisono_group.rename(desc)  # errors call the group what the user calls it

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> ProcessGroupAdapter:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device).type}: unisono groups are for cpu"
            )
        return self

    def get_group_store(self) -> Store | None:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of later calls."""
        self._timeout_s = timeout.total_seconds()

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
        if not 0 <= rank < self.size():
            raise ValueError(f"argument 'rank' must be from 0 to {self.size() - 1}, got {rank}")
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

    # -- collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        tensor = one(tensors)
        op, options = reduction(opts)
        if tensor.layout is not _STRIDED:
            try:
                return Work((), [sparse.all_reduce(self.unisono_group, tensor, op)])
            except ArgumentError as error:
                raise refusals.refusal(
                    "all_reduce", () if tensor.layout is torch.sparse_coo else (tensor,), error
                ) from None
        work = self._run("all_reduce", self.transport.all_reduce, (tensor, None, op, None), [tensor], options, timeout)
        if work is not FINISHED and tensor.numel() <= 8:
            self._small.append(work)
        return work

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        op, options = reduction(opts)
        calls = [(tensor, None, op, None) for tensor in tensors]
        return self._run_all("all_reduce_coalesced", self.transport.all_reduce, calls, list(tensors), options)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Work:
        tensor = one(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        op = (_SUM if op is None else op) if isinstance(opts, int) else opts.reduceOp
        return self._run("reduce", self.transport.reduce, (tensor, root, None, op, None), [tensor], opts, timeout)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        tensor = one(tensors)
        root = opts if isinstance(opts, int) else 0 if opts is None else opts.rootRank
        return self._run("broadcast", self.transport.broadcast, (tensor, root, None), [tensor], opts, timeout)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        outputs = output_lists[0] if nested(output_lists) else output_lists
        return self._run(
            "all_gather", self.transport.all_gather, (outputs, one(inputs), None), [outputs], opts, timeout
        )

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        return self._run("_all_gather_base", self.transport.all_gather, (output, input, None), [output], opts, timeout)

    _allgather_base = all_gather_single

    def allgather_coalesced(self, output_lists: Any, inputs: Sequence[Tensor], opts: Any = None) -> Work:
        calls = [([of_rank[i] for of_rank in output_lists], tensor, None) for i, tensor in enumerate(inputs)]
        return self._run_all("all_gather", self.transport.all_gather, calls, output_lists, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        calls = [(output, input, None) for output, input in zip(outputs, inputs, strict=True)]
        return self._run_all("all_gather_into_tensor_coalesced", self.transport.all_gather, calls, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        output = one(outputs)
        op, options = reduction(opts)
        inputs = input_lists[0] if nested(input_lists) else input_lists
        return self._run(
            "reduce_scatter",
            self.transport.reduce_scatter,
            (output, inputs, None, op, None),
            [output],
            options,
            timeout,
        )

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        op, options = reduction(opts)
        return self._run(
            "_reduce_scatter_base",
            self.transport.reduce_scatter,
            (output, input, None, op, None),
            [output],
            options,
            timeout,
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        op, options = reduction(opts)
        calls = [(output, input, None, op, None) for output, input in zip(outputs, inputs, strict=True)]
        return self._run_all("reduce_scatter_tensor_coalesced", self.transport.reduce_scatter, calls, outputs, options)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        root = opts if isinstance(opts, int) else opts.rootRank
        outputs = (output_lists[0] if nested(output_lists) else output_lists) or None
        return self._run(
            "gather", self.transport.gather, (outputs, one(inputs), root, None), [outputs or []], opts, timeout
        )

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        root = opts if isinstance(opts, int) else opts.rootRank
        inputs = (input_lists[0] if nested(input_lists) else input_lists) or None
        output = one(outputs)
        return self._run("scatter", self.transport.scatter, (output, inputs, root, None), [output], opts, timeout)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        outputs = list(outputs)
        return self._run(
            "all_to_all", self.transport.all_to_all, (outputs, list(inputs), None, None), outputs, opts, timeout
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        both = counts(output, output_split_sizes, self.size()), counts(input, input_split_sizes, self.size())
        return self._run("all_to_all", self.transport.all_to_all, (output, input, *both), [output], opts, timeout)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        return self._run("barrier", self.transport.barrier, (), [], opts, timeout)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 names the ranks that did not come in time."""
        if isinstance(timeout, BarrierOptions):
            timeout = None if timeout.timeout == _UNSET else timeout.timeout
        number = self._monitored.next()
        limit_s = self.unisono_group.timeout_s if timeout is None else timeout.total_seconds()
        monitor.barrier(self.unisono_group, limit_s, wait_all_ranks, tag=-number)

    # -- point to point

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        return self._message("send", self.transport.send, one(tensors), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._message("recv", self.transport.recv, one(tensors), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._message("recvAnySource", self.transport.recv, one(tensors), None, tag)

    # -- how a call is made

    def _run(
        self,
        name: str,
        verb: Callable[..., Any],
        arguments: tuple[Any, ...],
        outputs: Any,
        opts: Any,
        timeout: timedelta | None,
    ) -> Work:
        """Calls a verb of the group: now if torch's options say asyncOp=False, else in the background."""
        now, timeout_s = self._manner(opts, timeout)
        now = now and self._batch is None
        if now and not _profiling():
            try:
                verb(*arguments, timeout_s, False)
                return FINISHED
            except ArgumentError as error:  # before anything was sent
                if is_plain(arguments):
                    raise refusals.refusal(name, arguments, error) from None
        end = _record(name, arguments) if _profiling() else None
        copies = None
        if not is_plain(arguments):
            copies = Copies(settled(arguments))
            arguments, now = copies.arguments, now and not copies
        handle = _call(name, verb, arguments, now, timeout_s, end)
        if now:
            if end is not None:
                end()
            return FINISHED
        work = Work((handle,), outputs, end, (copies.write_back,) if copies else ())
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _run_all(
        self, name: str, verb: Callable[..., Any], calls: Sequence[tuple[Any, ...]], outputs: Any, opts: Any
    ) -> Work:
        if not calls:
            raise refusals.not_one_tensor(0)
        now, timeout_s = self._manner(opts, None)
        plain = is_plain(calls)
        if not plain:
            calls = [settled(arguments) for arguments in calls]
        apart = overlapping(calls)
        end = _record(name, [arguments[0] for arguments in calls]) if _profiling() else None
        copies: list[Copies] = []
        if apart or not plain:
            copies = [Copies(arguments, apart) for arguments in calls]  # all before the first call writes anything
            calls = [copied.arguments for copied in copies]
            now = now and not any(copies)
        handles = [_call(name, verb, arguments, now, timeout_s, end) for arguments in calls]
        if end is not None and now:
            end()
        after = () if now else [copied.write_back for copied in copies]
        work = Work(() if now else handles, outputs, None if now else end, after)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _message(self, name: str, verb: Callable[..., Any], tensor: Tensor, peer: int | None, tag: int) -> Work:
        end = _record(name, [tensor]) if _profiling() else None
        try:
            if tag < 0:
                raise make_argument_error("tag_negative", "tag", got=tag)  # others are ours, see monitored_barrier
            handle = verb(settled(tensor), peer, tag, self._timeout_s, True)
        except ArgumentError as error:
            if end is not None:
                end()
            raise refusals.refusal(name, (tensor,), error) from None
        work = Work((handle,), [tensor], end)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _manner(self, opts: Any, timeout: timedelta | None) -> tuple[bool, float]:
        """Whether to run the call now, and its time limit in seconds, 0 for the group's."""
        try:
            now, limit = not opts.asyncOp, opts.timeout
        except AttributeError:  # torch's plain forms: a root, a timeout, or nothing
            now, limit = False, opts if isinstance(opts, timedelta) else timeout
        return now, self._timeout_s if limit is None or limit == _UNSET else limit.total_seconds()

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._batch = self._batch or [], None
        return Work(
            [handle for work in works for handle in work._handles],
            [work._outputs for work in works],
            after=[step for work in works for step in work._after],
        )


def _call(
    name: str,
    verb: Callable[..., Any],
    arguments: tuple[Any, ...],
    now: bool,
    timeout_s: float,
    end: Callable[[], None] | None,
) -> Any:
    """Calls a verb of the group; ``end`` closes the profiler's range if that is refused."""
    try:
        return verb(*arguments, timeout_s, not now)
    except ArgumentError as error:
        if end is not None:
            end()
        raise refusals.refusal(name, arguments, error) from None


def _record(name: str, arguments: Sequence[Any]) -> Callable[[], None]:
    """Opens a range of the profiler, with the sizes of the tensors; returns what closes it."""
    shown = [a[0] if isinstance(a, list) and a else a for a in arguments]
    shown = [a for a in shown if isinstance(a, Tensor)]
    record = torch.autograd._record_function_with_args_enter(f"unisono:{name}", *shown)  # type: ignore[attr-defined]
    return lambda: torch.autograd._record_function_with_args_exit(record)  # type: ignore[attr-defined]


keep_uncompiled(ProcessGroupAdapter, Work)
