"""The torch.distributed backend "unisono": every function of torch.distributed on CPU tensors, over a Group.

torch.distributed finds these methods by name; its C++ code (DDP's reducer, functional collectives) reaches allgather,
all_gather_single_coalesced, allreduce, allreduce_coalesced, all_to_all_single, barrier, broadcast, reduce_scatter,
reduce_scatter_single_coalesced, send and recv, and must get a Work from each. A method unpacks torch's options and
hands the tensors on: no copies, one call of the Group, except where torch asks for several together.

One body, :class:`Face`, serves both of torch's bases: ProcessGroup, which every version lets Python inherit from and
calls directly, and since torch 2.14 Backend, which C++ code asks the group for and which alone can be one of several.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, Backend, BarrierOptions, Store
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from . import groups, monitor, refusals, sparse, tensors, torch_fallbacks  # noqa: F401  (registers its kernels)
from .group import Group, _reduce_op
from .handle import Handle
from .strided import Copies
from .uncompiled import keep_uncompiled
from .work import FINISHED, Work, flat

Tensor = torch.Tensor
_CPU = torch.device("cpu")
_SUM = dist.ReduceOp.SUM
_REDUCE_OPS = (dist.ReduceOp, dist.ReduceOp.RedOpType)
_UNSET = timedelta(milliseconds=-1)  # torch's word for: the group's timeout
_profiling = torch._C._autograd._profiler_enabled


class Face:
    """What torch asks of a process group, and of the backend of one, over a unisono :class:`Group`.

    The methods take torch's option objects, and like torch's own groups also plain arguments:
    ``pg.allreduce([t], opts)`` and ``pg.allreduce(t, ReduceOp.MAX)``. They return a Work.
    """

    _takes_short_cut = True  # False where _run does more than here
    supports_splitting = True
    supports_coalescing = False  # the batch is the caller's list; see _start_coalescing
    supports_time_estimate = False
    supports_shrinking = False

    def _begin(self, group: Group, store: Store | None) -> None:
        self.unisono_group = group
        self._store = store
        self._timeout_s = 0.0  # 0: the group's own
        self._names = [group.name, "undefined"]
        self._batch: list[Work] | None = None
        # DDP.join hands a Work to C++ that does not keep its Python half alive, without which it never ends.
        self._small: deque[Work] = deque(maxlen=64)
        self._comm_name = f"unisono%{group.name}%{group._comm.id:016x}"
        self._splits = 0
        self._monitored = 0

    # -- what torch asks a group about itself

    @property
    def unisono_face(self) -> Face:
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

    def _get_backend(self, device: torch.device) -> Face:
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
    ) -> ProcessGroupUnisono | None:
        """Makes a group of some of this group's ranks; all of its ranks call it, and those not listed get None."""
        members = list(ranks) if self.rank() in ranks else None
        self._splits += 1  # all ranks split together, so they agree on it
        child = self.unisono_group.split(
            members,
            name=group_name or f"{self.group_name}/{self._splits}",
            timeout_s=None if timeout is None else timeout.total_seconds(),
        )
        if child is None:
            return None
        group = ProcessGroupUnisono(child, self._store)
        if group_desc:
            group.setGroupDesc(group_desc)
        return group

    splitGroup = split_group

    # -- collectives

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        if (
            self._takes_short_cut
            and type(opts) is AllreduceOptions
            and not (opts.asyncOp or self._batch is not None or _profiling())
        ):
            # The usual call in the fewest steps; whatever is refused here goes the long way below.
            limit = opts.timeout
            try:
                (tensor,) = tensors
                timeout_s = self._timeout_s if limit == _UNSET else limit.total_seconds()
                code, factor = _reduce_op(opts.reduceOp, None)
                self.unisono_group._comm.all_reduce(tensor, None, code, factor, timeout_s, False)
                return FINISHED
            except (TypeError, ValueError):
                pass
        tensor = _one(tensors)
        op, options = _reduction(opts)
        if tensor.layout is not torch.strided:
            try:
                return Work((), [sparse.all_reduce(self.unisono_group, tensor, op)])
            except ValueError as error:
                odd = () if tensor.layout is torch.sparse_coo else (tensor,)
                raise refusals.refusal("all_reduce", odd, error) from None
        work = self._run("all_reduce", self.unisono_group.all_reduce, (tensor, op), [tensor], options, timeout)
        if work is not FINISHED and tensor.numel() <= 8:
            self._small.append(work)
        return work

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        op, options = _reduction(opts)
        calls = [(tensor, op) for tensor in tensors]
        return self._run_all("all_reduce_coalesced", self.unisono_group.all_reduce, calls, list(tensors), options)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Work:
        tensor = _one(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        op = (_SUM if op is None else op) if isinstance(opts, int) else opts.reduceOp
        return self._run("reduce", self.unisono_group.reduce, (tensor, root, op), [tensor], opts, timeout)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        tensor = _one(tensors)
        root = opts if isinstance(opts, int) else 0 if opts is None else opts.rootRank
        return self._run("broadcast", self.unisono_group.broadcast, (tensor, root), [tensor], opts, timeout)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        outputs = output_lists[0] if _nested(output_lists) else output_lists
        return self._run("all_gather", self.unisono_group.all_gather, (outputs, _one(inputs)), [outputs], opts, timeout)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        return self._run("_all_gather_base", self.unisono_group.all_gather, (output, input), [output], opts, timeout)

    _allgather_base = all_gather_single

    def allgather_coalesced(self, output_lists: Any, inputs: Sequence[Tensor], opts: Any = None) -> Work:
        calls = [([of_rank[i] for of_rank in output_lists], tensor) for i, tensor in enumerate(inputs)]
        return self._run_all("all_gather", self.unisono_group.all_gather, calls, output_lists, opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        calls = list(zip(outputs, inputs, strict=True))
        return self._run_all("all_gather_into_tensor_coalesced", self.unisono_group.all_gather, calls, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        output = _one(outputs)
        op, options = _reduction(opts)
        inputs = input_lists[0] if _nested(input_lists) else input_lists
        return self._run(
            "reduce_scatter",
            self.unisono_group.reduce_scatter,
            (output, inputs, None, op),
            [output],
            options,
            timeout,
        )

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        op, options = _reduction(opts)
        return self._run(
            "_reduce_scatter_base",
            self.unisono_group.reduce_scatter,
            (output, input, None, op),
            [output],
            options,
            timeout,
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        op, options = _reduction(opts)
        calls = [(output, input, None, op) for output, input in zip(outputs, inputs, strict=True)]
        return self._run_all(
            "reduce_scatter_tensor_coalesced", self.unisono_group.reduce_scatter, calls, outputs, options
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        root = opts if isinstance(opts, int) else opts.rootRank
        outputs = (output_lists[0] if _nested(output_lists) else output_lists) or None
        return self._run(
            "gather", self.unisono_group.gather, (outputs, _one(inputs), root), [outputs or []], opts, timeout
        )

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        root = opts if isinstance(opts, int) else opts.rootRank
        inputs = (input_lists[0] if _nested(input_lists) else input_lists) or None
        output = _one(outputs)
        return self._run("scatter", self.unisono_group.scatter, (output, inputs, root), [output], opts, timeout)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        outputs = list(outputs)
        return self._run("all_to_all", self.unisono_group.all_to_all, (outputs, list(inputs)), outputs, opts, timeout)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        counts = (
            _counts(output, output_split_sizes, self.size()),
            _counts(input, input_split_sizes, self.size()),
        )
        return self._run("all_to_all", self.unisono_group.all_to_all, (output, input, *counts), [output], opts, timeout)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        return self._run("barrier", self.unisono_group.barrier, (), [], opts, timeout)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 names the ranks that did not come in time."""
        if isinstance(timeout, BarrierOptions):
            timeout = None if timeout.timeout == _UNSET else timeout.timeout
        self._monitored += 1
        limit_s = self.unisono_group.timeout_s if timeout is None else timeout.total_seconds()
        monitor.barrier(self.unisono_group, limit_s, wait_all_ranks, tag=-self._monitored)

    # -- point to point

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        return self._mail("send", self.unisono_group.send, _one(tensors), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._mail("recv", self.unisono_group.recv, _one(tensors), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._mail("recvAnySource", self.unisono_group.recv, _one(tensors), None, tag)

    # -- how a call is made

    def work_of(self, handle: Handle, output: Tensor) -> Work:
        """The torch face of a call that was made on ``unisono_group`` directly."""
        return Work((handle,), [output])

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
        end = _record(name, arguments) if _profiling() else None
        try:
            handle = verb(*arguments, async_op=not now, timeout_s=timeout_s)
            copies: tuple[Copies, ...] = ()
        except (TypeError, ValueError) as error:
            handle, copies = _again(name, verb, arguments, outputs, timeout_s, error, end)
            now = False
        if now:
            if end is not None:
                end()
            return FINISHED
        work = Work((handle,), outputs, end, copies)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _run_all(
        self, name: str, verb: Callable[..., Any], calls: Sequence[tuple[Any, ...]], outputs: Any, opts: Any
    ) -> Work:
        if not calls:
            raise refusals.not_one_tensor(0)
        now, timeout_s = self._manner(opts, None)
        end = _record(name, [arguments[0] for arguments in calls]) if _profiling() else None
        handles: list[Handle] = []
        copies: list[Copies] = []
        for arguments in calls:
            try:
                handle = verb(*arguments, async_op=not now, timeout_s=timeout_s)
            except (TypeError, ValueError) as error:
                handle, copied = _again(name, verb, arguments, outputs, timeout_s, error, end)
                copies += copied
            if handle is not None:
                handles.append(handle)
        if end is not None and not handles:
            end()
        work = Work(handles, outputs, end if handles else None, copies)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _mail(self, name: str, verb: Callable[..., Any], tensor: Tensor, peer: int | None, tag: int) -> Work:
        end = _record(name, [tensor]) if _profiling() else None
        try:
            if tag < 0:
                raise ValueError("Tag must be nonnegative")  # others are ours, see monitored_barrier
            handle = verb(_settled(tensor), peer, tag, async_op=True, timeout_s=self._timeout_s)
        except (TypeError, ValueError) as error:
            if end is not None:
                end()
            raise refusals.refusal(name, (tensor,), error) from None
        work = Work((handle,), [tensor], end)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _manner(self, opts: Any, timeout: timedelta | None) -> tuple[bool, float]:
        """Whether to run the call now, and its time limit in seconds, 0 for the group's."""
        if opts is None or isinstance(opts, (int, timedelta)):
            now, limit = False, opts if isinstance(opts, timedelta) else timeout
        else:
            now, limit = not opts.asyncOp, opts.timeout
        return now, self._timeout_s if limit is None or limit == _UNSET else limit.total_seconds()

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._batch = self._batch or [], None
        return Work(
            [handle for work in works for handle in work._handles],
            [work._outputs for work in works],
            copies=[copies for work in works for copies in work._copies],
        )


if groups.PYTHON_BACKENDS:

    class BackendUnisono(Face, Backend):
        """Unisono as the CPU backend inside of a C++ process group, which may have others for other devices."""

        supports_splitting = False

        def __init__(self, group: Group, store: Store | None = None) -> None:
            Backend.__init__(self, group.rank, group.size)
            self._begin(group, store)

        def start_coalescing(self) -> None:
            self._start_coalescing(_CPU)

        def end_coalescing(self) -> Work:
            return self._end_coalescing(_CPU)

    keep_uncompiled(BackendUnisono)


class ProcessGroupUnisono(Face, dist.ProcessGroup):
    """A torch process group on a unisono :class:`Group`, its attribute ``unisono_group``; see :class:`Face`."""

    def __init__(self, group: Group, store: Store | None = None) -> None:
        dist.ProcessGroup.__init__(self, group.rank, group.size)  # type: ignore[call-arg]
        self._begin(group, store)
        if groups.PYTHON_BACKENDS:
            # C++ code that asks for the backend inside finds one, which does the same.
            self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            self._register_backend(_CPU, dist.ProcessGroup.BackendType.CUSTOM, BackendUnisono(group, store))


def create(opts: Any, backend_options: Any = None) -> Face:
    """Makes the group that init_process_group and new_group ask for, or the CPU backend of one with other devices."""
    others = ", ".join(f'"{device}:{name}"' for device, name in wanted_backends().items() if name != "unisono")
    if others and not groups.PYTHON_BACKENDS:
        raise RuntimeError(
            f"torch {torch.__version__} cannot combine unisono with {others} in one group: it would silently drop the "
            'latter.\n  Make two groups: init_process_group("unisono") for CPU tensors, and new_group(backend=…) for '
            "the others"
        )
    group = join(opts)
    return BackendUnisono(group, opts.store) if others else ProcessGroupUnisono(group, opts.store)


def join(opts: Any) -> Group:
    """Meets the other ranks of a group that torch is making."""
    size = opts.group_size
    group = Group.from_store(
        opts.store, opts.group_rank, size, name=opts.group_id or "0", timeout_s=opts.timeout.total_seconds()
    )
    group.ranks = list(opts.global_ranks_in_group) or list(range(size))
    return group


def wanted_backends() -> dict[str, str]:
    """By device, the backends of the group that torch is making.

    torch tells a backend nothing of the others, and puts a process group written in Python in the place of all of them.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_name != "_new_process_group_helper":
        if frame.f_back is None:
            return {}
        frame = frame.f_back
    config = frame.f_locals.get("backend_config")
    return {} if config is None else {device: str(name) for device, name in config.get_device_backend_map().items()}


def _again(
    name: str,
    verb: Callable[..., Any],
    arguments: tuple[Any, ...],
    outputs: Any,
    timeout_s: float,
    error: Exception,
    end: Callable[[], None] | None,
) -> tuple[Handle, tuple[Copies, ...]]:
    """Makes a call that was refused with settled tensors and contiguous copies where there are any; else torch's error.

    The result of a functional collective that nobody has used yet has no memory of its own, and is to be settled.
    """
    settled = tuple(_settled(argument) for argument in arguments)
    copies = Copies(settled, [_settled(output) for output in flat(outputs)])
    if copies or any(a is not b for a, b in zip(settled, arguments, strict=True)):
        try:
            return verb(*copies.arguments, async_op=True, timeout_s=timeout_s), (copies,)
        except (TypeError, ValueError) as second:
            error = second
    if end is not None:
        end()
    raise refusals.refusal(name, arguments, error) from None


def _settled(argument: Any) -> Any:
    """Waits for the results of functional collectives in an argument and puts the tensors in their place."""
    if isinstance(argument, AsyncCollectiveTensor):
        return argument.trigger_wait()  # type: ignore[no-untyped-call]
    if isinstance(argument, (list, tuple)) and any(isinstance(part, AsyncCollectiveTensor) for part in argument):
        return [_settled(part) for part in argument]
    return argument


def _one(tensors: Any) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise refusals.not_one_tensor(len(tensors))
    tensor: Tensor = tensors[0]
    return tensor


def _nested(lists: Any) -> bool:
    return len(lists) == 1 and not isinstance(lists[0], Tensor)


def _reduction(opts: Any) -> tuple[Any, Any]:
    """The reduce operation, and the options if there are any."""
    if opts is None:
        return _SUM, None
    if type(opts) in _REDUCE_OPS:
        return opts, None
    return opts.reduceOp, opts


def _counts(tensor: Tensor, splits: Sequence[int], size: int) -> list[int] | None:
    """Elements per rank from rows of dim 0 per rank, checked as torch's own backends do and with their words."""
    rows = tensor.size(0) if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        return None
    if len(splits) != size:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(splits) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
    row = tensor.numel() // rows if rows else 0
    return [split * row for split in splits]


def _record(name: str, arguments: Sequence[Any]) -> Callable[[], None]:
    """Opens a range of the profiler, with the sizes of the tensors; returns what closes it."""
    shown = [a[0] if isinstance(a, list) and a else a for a in arguments]
    shown = [a for a in shown if isinstance(a, Tensor)]
    record = torch.autograd._record_function_with_args_enter(f"unisono:{name}", *shown)  # type: ignore[attr-defined]
    return lambda: torch.autograd._record_function_with_args_exit(record)  # type: ignore[attr-defined]


keep_uncompiled(Face, Work)
dist.Backend.register_backend("unisono", create, extended_api=True, devices=["cpu"])
