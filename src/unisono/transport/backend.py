"""The verbs that every torch backend has, through torch.distributed; the base of all transports on other backends.

What not every backend offers is made of what it has: AVG and PREMUL_SUM of a SUM, gather and scatter of unequal parts
of messages. All-gather with counts, and reduce-scatter, differ from backend to backend and are the subclasses' own.
Before these move data the ranks compare what they were asked for, so that different splits raise MismatchError on every
rank instead of a hang, a crash or wrong numbers. A group without a backend for CPU tensors cannot be asked without
stopping its device's stream; there the comparison is left out. The verbs that the backend has itself are checked by it,
and their time limit is that of the process group: ``timeout_s`` is not read here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import _core
from ..base import ops
from ..base.counter import Counter
from ..base.errors import make_argument_error
from ..base.handle import Handle
from .agreement import NO_OP, Request, compare
from .pending import Step, WorksPending
from .protocol import Counts, Factor, Output, Seconds, Tensors

# torch 2.13 renamed it and warns of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class BackendTransport:
    """A group of another backend."""

    cache_bytes = 0

    def __init__(self, pg: ProcessGroup) -> None:
        self._pg = weakref.ref(pg)  # held weakly, or the group would never be freed
        self.rank = pg.rank()
        self.size = pg.size()
        self._calls = Counter()
        self._can_compare = any(device.type == "cpu" for device in pg._device_types)

    @property
    def pg(self) -> ProcessGroup:
        pg = self._pg()
        assert pg is not None  # the caller of a verb holds it
        return pg

    # -- verbs that the backend has

    def all_reduce(
        self, tensor: Tensor, out: Output, op: Any, factor: Factor, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any:  # fmt: skip
        if isinstance(out, int):
            return self._into_new(out, tensor, lambda o, t: self.all_reduce(t, o, op, factor, timeout_s, async_op))
        target = _copied(tensor, out)
        torch_op, after = self._as_torch_op(target, *ops.read(op, factor))
        works = [dist.all_reduce(target, torch_op, self.pg, async_op)]
        return handle_or_none("all_reduce", works, target, async_op, after)

    def reduce(
        self, tensor: Tensor, root: int, out: Output, op: Any, factor: Factor, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any:  # fmt: skip
        if isinstance(out, int):
            if self.rank != root:
                return self.reduce(_plain(tensor), root, None, op, factor, timeout_s, async_op)
            return self._into_new(out, tensor, lambda o, t: self.reduce(t, root, o, op, factor, timeout_s, async_op))
        # A copy where the tensor has to stay: a backend's reduce may use it as scratch.
        target = _copied(tensor, out) if self.rank == root else tensor.clone()
        torch_op, after = self._as_torch_op(target, *ops.read(op, factor))
        works = [dist.reduce(target, op=torch_op, group=self.pg, async_op=async_op, group_dst=root)]
        return handle_or_none("reduce", works, target if self.rank == root else tensor, async_op, after)

    def broadcast(self, tensor: Tensor, root: int, out: Output, timeout_s: Seconds, async_op: bool, /) -> Any:
        if isinstance(out, int):
            return self._into_new(out, tensor, lambda o, t: self.broadcast(t, root, o, timeout_s, async_op))
        target = _copied(tensor, out)
        works = [dist.broadcast(target, group=self.pg, async_op=async_op, group_src=root)]
        return handle_or_none("broadcast", works, target, async_op)

    def barrier(self, timeout_s: Seconds, async_op: bool, /) -> Any:
        return handle_or_none("barrier", [dist.barrier(self.pg, async_op)], None, async_op)

    def send(self, tensor: Tensor, dst: int, tag: int, timeout_s: Seconds, async_op: bool, /) -> Any:
        if async_op:
            return handle_or_none("send", [dist.isend(tensor, group=self.pg, tag=tag, group_dst=dst)], tensor, True)
        return dist.send(tensor, group=self.pg, tag=tag, group_dst=dst)

    def recv(self, tensor: Tensor, src: int | None, tag: int, timeout_s: Seconds, async_op: bool, /) -> Any:
        if async_op:
            return handle_or_none("recv", [dist.irecv(tensor, group=self.pg, tag=tag, group_src=src)], tensor, True)
        source = dist.recv(tensor, group=self.pg, tag=tag, group_src=src)
        return dist.get_group_rank(self.pg, source) if src is None else src

    # -- verbs whose parts may be unequal

    def all_gather(self, output: Output, input: Tensor, counts: Counts, timeout_s: Seconds, async_op: bool, /) -> Any:
        if isinstance(output, int):
            return self._into_new(output, input, lambda o, i: self.all_gather(o, i, counts, timeout_s, async_op))
        if not isinstance(output, Tensor):
            return handle_or_none(
                "all_gather", [dist.all_gather(list(output), input, self.pg, async_op)], output, async_op
            )
        counts = [input.numel()] * self.size if counts is None else counts
        return self._all_gather(flat(output), flat(input), counts, output, async_op)

    def reduce_scatter(
        self, output: Output, input: Tensors, counts: Counts, op: Any, factor: Factor, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any:  # fmt: skip
        if isinstance(output, int):
            make = self.reduce_scatter
            return self._into_new(output, input, lambda o, i: make(o, i, counts, op, factor, timeout_s, async_op))
        number, times = ops.read(op, factor)
        if not isinstance(input, Tensor):
            counts = [part.numel() for part in input]
            input = torch.cat([flat(part) for part in input])
        elif counts is None:
            counts = [output.numel()] * self.size
        return self._reduce_scatter(flat(output), flat(input), counts, number, times, output, async_op)

    def all_to_all(
        self, output: Output, input: Tensors, output_counts: Counts, input_counts: Counts, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any:  # fmt: skip
        if isinstance(output, int):
            make = self.all_to_all
            return self._into_new(
                output, input, lambda o, i: make(o, i, output_counts, input_counts, timeout_s, async_op)
            )
        _check_exchange(output, input)
        target, expected, scattered = self._as_one(output, output_counts)
        source, sent, _ = self._as_one(input, input_counts)

        if expected[self.rank] != sent[self.rank]:
            raise make_argument_error("own_part_size", "output", sent[self.rank], expected[self.rank], "input")

        def part_again() -> None:
            for part, received in zip(output, torch.split(target, list(expected)), strict=True):
                flat(part).copy_(received)

        return self._all_to_all(target, source, expected, sent, output, part_again if scattered else None, async_op)

    def gather(
        self, output: Output, input: Tensor, root: int, counts: Counts, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any:  # fmt: skip
        here = self.rank == root
        if isinstance(output, int):
            if not here:
                return self.gather(None, _plain(input), root, counts, timeout_s, async_op)
            return self._into_new(output, input, lambda o, i: self.gather(o, i, root, counts, timeout_s, async_op))
        if counts is None:
            parts = self._parts(output, None, input) if here else None
            works = [dist.gather(input, parts, None, self.pg, async_op, root)]
            return handle_or_none("gather", works, output, async_op)
        works = []
        if not here:
            works = [dist.isend(input, group=self.pg, group_dst=root)] if input.numel() else []
        else:
            for peer, part in enumerate(self._parts(output, counts, None)):
                if peer == root:
                    _copy_unless_same(part, flat(input))
                elif part.numel():
                    works.append(dist.irecv(part, group=self.pg, group_src=peer))
        return handle_or_none("gather", works, output, async_op, wait=True)

    def scatter(
        self, output: Output, input: Tensors | None, root: int, counts: Counts, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any:  # fmt: skip
        if isinstance(output, int):
            return self._into_new(output, input, lambda o, i: self.scatter(o, i, root, counts, timeout_s, async_op))
        here = self.rank == root
        if counts is None:
            parts = self._parts(input, None, output) if here else None
            works = [dist.scatter(output, parts, None, self.pg, async_op, root)]
            return handle_or_none("scatter", works, output, async_op)
        works = []
        if not here:
            works = [dist.irecv(output, group=self.pg, group_src=root)] if output.numel() else []
        else:
            for peer, part in enumerate(self._parts(input, counts, None)):
                if peer == root:
                    _copy_unless_same(flat(output), part)
                elif part.numel():
                    works.append(dist.isend(part, group=self.pg, group_dst=peer))
        return handle_or_none("scatter", works, output, async_op, wait=True)

    # -- fused products, and new outputs

    def matmul_reduce(
        self, products: Tensor, output: Tensor, op: Any, scale: float, residual: Tensor | None, counts: Counts,
        hash: int, words: Callable[[], str], timeout_s: Seconds, /,
    ) -> Handle | None:  # fmt: skip
        torch_op, divide = self._as_torch_op(products, *ops.read(op, None))
        work = dist.all_reduce(products, torch_op, self.pg, async_op=True)

        def round_off() -> None:
            if divide is not None:
                divide()
            mine = products
            if counts is not None:
                mine = torch.cat(torch.split_with_sizes(products, list(counts))[self.rank :: self.size])
            round_products(mine, output, scale, residual)

        return handle_or_none("matmul_reduce", [work], output, True, round_off)

    def new_like(self, tensor: Tensor, /) -> Tensor | None:
        return torch.empty_like(tensor) if _is_plain(tensor) else None

    def new_rows(self, tensor: Tensor, rows: int, /) -> Tensor | None:
        return tensor.new_empty((rows, *tensor.shape[1:])) if _is_plain(tensor) else None

    def _into_new(self, rows: int, like: Any, call: Callable[[Any, Tensor], Any]) -> Any:
        """A call into a new tensor of so many rows, -1 for as many as ``like`` has: the tensor, or the handle."""
        like = _plain(like)
        if like.layout is not torch.strided and rows < 0:
            out = like.clone()  # reduced in place
            handle = call(None, out)
            return out if handle is None else handle
        out = torch.empty_like(like) if rows < 0 else like.new_empty((rows, *like.shape[1:]))
        handle = call(out, like)
        return out if handle is None else handle

    # -- what subclasses do in their own way; ``result`` is the output as the caller knows it

    def _all_gather(
        self, whole: Tensor, part: Tensor, counts: Sequence[int], result: Any, async_op: bool
    ) -> Handle | None:
        raise NotImplementedError

    def _reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, result: Any, async_op: bool
    ) -> Handle | None:
        raise NotImplementedError

    def _all_to_all(
        self, output: Tensor, input: Tensor, expected: Sequence[int], sent: Sequence[int], result: Any,
        after: Step | None, async_op: bool,
    ) -> Handle | None:  # fmt: skip
        self._compare("all_to_all", input.dtype, table=(sent, expected))
        works = [dist.all_to_all_single(output, input, list(expected), list(sent), self.pg, async_op)]
        return handle_or_none("all_to_all", works, result, async_op, after)

    def _compare(
        self, verb: str, dtype: torch.dtype, op: int = NO_OP, counts: Sequence[int] = (), factor: float = 1.0,
        table: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        """Raises MismatchError on all ranks unless all were asked for the same."""
        seq = self._calls.next()
        if self._can_compare:
            request = Request(self.size, verb, dtype, op, counts, factor, table)
            # Not over Python's bytes: a backend's thread may let go of the tensors when Python has ended.
            mine = torch.tensor(list(request.bytes), dtype=torch.uint8)
            shown = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(shown, mine, group=self.pg)
            compare(self.pg, seq, request, [bytes(of_rank.tolist()) for of_rank in shown])

    def _as_torch_op(self, target: Tensor, op: int, factor: float) -> tuple[Any, Step | None]:
        """What to hand to torch for an op that not every backend has, and a step for after the call.

        A target of PREMUL_SUM is multiplied here, one of AVG divided after a SUM.
        """
        if op in (ops.PREMUL_SUM, ops.AVG):
            check_reduction(target, op)
        if op == ops.PREMUL_SUM:
            target.mul_(factor)
        elif op == ops.AVG:
            return ops.for_torch(ops.SUM, 1.0), lambda: divide(target, self.size)
        return ops.for_torch(ops.SUM if op == ops.PREMUL_SUM else op, 1.0), None

    def _parts(self, tensors: Tensors | None, counts: Counts, like: Tensor | None) -> list[Tensor]:
        """One tensor per rank: as given, or views of one tensor, in the shape of ``like`` if they are equal."""
        if not isinstance(tensors, Tensor):
            return list(tensors or ())
        if counts is not None or like is None:
            return list(torch.split(flat(tensors), list(counts or ())))
        return [part.view(like.shape) for part in torch.split(flat(tensors), [like.numel()] * self.size)]

    def _as_one(self, tensors: Tensors, counts: Counts) -> tuple[Tensor, Sequence[int], bool]:
        """Tensors as one flat one with counts, and whether that is a copy."""
        if not isinstance(tensors, Tensor):
            return torch.cat([flat(t) for t in tensors]), [t.numel() for t in tensors], True
        whole = flat(tensors)
        return whole, [whole.numel() // self.size] * self.size if counts is None else counts, False


def handle_or_none(
    verb: str,
    works: Sequence[Any],
    result: Any,
    async_op: bool,
    after: Step | None = None,
    wait: bool = False,
) -> Handle | None:
    """What a verb returns: its handle, or None when it is over. ``wait``: the works run although it is synchronous."""
    if async_op:
        return Handle(WorksPending(works, after), verb, result)
    if wait:
        for work in works:
            work.wait()
    if after is not None:
        after()
    return None


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one dimension."""
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def divide(tensor: Tensor, by: int) -> None:
    """The division of an AVG, which rounds whole numbers towards zero."""
    tensor.div_(by, rounding_mode=None if tensor.is_floating_point() or tensor.is_complex() else "trunc")


def round_products(products: Tensor, output: Tensor, scale: float, residual: Tensor | None) -> None:
    """Scales products, adds the residual, and rounds once."""
    if scale != 1:
        products = products * scale
    if residual is not None:
        products = products + residual
    output.copy_(products)


def _copied(tensor: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return tensor
    _copy_unless_same(out, tensor)
    return out


def _check_exchange(output: Any, input: Any) -> None:
    """Refuses what the core refuses: other dtypes, gaps, lazy views, and outputs over inputs."""
    outputs, inputs = ([t] if isinstance(t, Tensor) else list(t) for t in (output, input))
    for name, tensors in (("output", outputs), ("input", inputs)):
        for tensor in tensors:
            if tensor.dtype is not inputs[0].dtype:
                raise make_argument_error("dtype_of", name, inputs[0].dtype, tensor.dtype, "input")
            if tensor.layout is torch.strided and not tensor.is_contiguous():
                raise make_argument_error("contiguous", name, got=(list(tensor.shape), tensor.stride()))
            if not _is_plain(tensor):
                raise make_argument_error("lazy", name)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, i) for i, ts in enumerate((outputs, inputs)) for t in ts)
    for (_, end, one), (start, _, other) in pairwise([span for span in spans if span[0] != span[1]]):
        if start < end and one != other:
            raise make_argument_error("overlap", "output", other="input")


def check_reduction(tensor: Tensor, op: int) -> None:
    """Refuses an op that means nothing for the tensor's dtype, as the core does."""
    empty = torch.empty(0, dtype=tensor.dtype)
    _core.combine(empty, [empty], op, [1.0])


def _copy_unless_same(to: Tensor, source: Tensor) -> None:
    if to.data_ptr() != source.data_ptr():
        to.copy_(source.view(to.shape))


def _plain(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it has gaps or is a lazy view: what a backend can read."""
    if tensor.layout is not torch.strided:
        return tensor  # the backend says whether it takes it
    return tensor.contiguous().resolve_conj().resolve_neg()


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
