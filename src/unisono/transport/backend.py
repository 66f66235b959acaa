"""A group of any torch backend, through torch.distributed; the base of the transports for backends that can do more.

What not every backend offers is made of what it has: AVG and PREMUL_SUM of a SUM, gather and scatter of unequal parts
of messages, all-gather of one broadcast per rank and reduce-scatter of one reduce per rank, all under way at once.
Before all-gather, reduce-scatter and all-to-all move data the ranks compare what they were asked for, so that different
splits raise MismatchError on every rank instead of a hang, a crash or wrong numbers. A group without a backend for CPU
tensors cannot be asked without stopping its device's stream; there the comparison is left out. The verbs that the
backend has itself are checked by it, and their time limit is that of the process group: ``timeout_s`` is not read here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import _core
from ..base import ops
from ..base.counter import Counter
from ..base.errors import make_argument_error
from ..base.handle import Handle, Pending
from ..base.tensors import plain
from . import late
from .agreement import NO_OP, Request, compare
from .outputs import are_shapes, new_output
from .pending import MessagesPending, Step, WorksPending, nothing
from .protocol import Counts, Factor, Output, Seconds, Tensors

_PIECE_BYTES = 4 << 20  # of a chunk that has to be copied before a reduce that would overwrite it

Verb = TypeVar("Verb", bound=Callable[..., Any])


def _verb(output: int, input: int, root: int | None = None) -> Callable[[Verb], Verb]:
    """What all verbs have in common: outputs given as a number, and handles.

    The function below it sees tensors only. It begins the call and returns what is pending, or None if all is over. The
    numbers are places of arguments. A verb whose input comes first is in place without an output; with ``root`` only
    that rank gets an output.
    """

    def complete(begin: Verb) -> Verb:
        @wraps(begin)
        def verb(self: BackendTransport, *args: Any) -> Any:
            made: Any = None
            asked, tensors = args[output], list(args)
            if isinstance(asked, int):
                like = tensors[input] = plain(args[input])
                tensors[output] = None
                if root is not None and args[root] != self.rank:
                    made = like.new_zeros(1)
                elif like.layout is not torch.strided and asked < 0:
                    made = tensors[input] = like.clone()  # reduced in place
                else:
                    made = tensors[output] = new_output(begin.__name__, asked, like, self.size)
            elif are_shapes(asked):
                tensors[input] = [plain(tensor) for tensor in args[input]]
                made = tensors[output] = tuple(tensors[input][0].new_empty(shape) for shape in asked)
            args = tuple(tensors)
            pending = begin(self, *args)
            if pending is None:
                return made
            in_place = input == 0 and args[output] is None
            return Handle(pending, begin.__name__, args[input if in_place else output])

        return verb  # type: ignore[return-value]

    return complete


class BackendTransport:
    """A group of another backend.

    A backend's reduce may use the tensors of the other ranks as its scratch (gloo's does). Unless it is known to keep
    them, and for PREMUL_SUM, the chunks of a reduce-scatter are copied piece by piece before they are reduced, one
    after the other.
    """

    cache_bytes = 0
    by_tree = False

    def __init__(self, pg: ProcessGroup, keeps_input: bool = False) -> None:
        self._pg = weakref.ref(pg)  # held weakly, or the group would never be freed
        self.rank = pg.rank()
        self.size = pg.size()
        self.keeps_input = keeps_input
        self.calls = Counter()
        self._can_compare = any(device.type == "cpu" for device in pg._device_types)

    @property
    def pg(self) -> ProcessGroup:
        pg = self._pg()
        assert pg is not None  # the caller of a verb holds it
        return pg

    # -- verbs that the backend has

    @_verb(output=1, input=0)
    def all_reduce(
        self, tensor: Tensor, out: Output, op: Any, factor: Factor, timeout_s: Seconds, async_op: bool, /
    ) -> Any:
        target = _copied(tensor, out)
        torch_op, after = self._as_torch_op(target, *ops.read(op, factor))
        return pending_works([dist.all_reduce(target, torch_op, self.pg, async_op)], async_op, after)

    @_verb(output=2, input=0, root=1)
    def reduce(
        self, tensor: Tensor, root: int, out: Output, op: Any, factor: Factor, timeout_s: Seconds, async_op: bool, /
    ) -> Any:
        # A copy where the tensor has to stay: a backend's reduce may use it as scratch.
        target = _copied(tensor, out) if self.rank == root else tensor.clone()
        torch_op, after = self._as_torch_op(target, *ops.read(op, factor))
        work = dist.reduce(target, op=torch_op, group=self.pg, async_op=async_op, group_dst=root)
        return pending_works([work], async_op, after)

    @_verb(output=2, input=0)
    def broadcast(self, tensor: Tensor, root: int, out: Output, timeout_s: Seconds, async_op: bool, /) -> Any:
        work = dist.broadcast(_copied(tensor, out), group=self.pg, async_op=async_op, group_src=root)
        return pending_works([work], async_op)

    def barrier(self, timeout_s: Seconds, async_op: bool, /) -> Any:
        work = dist.barrier(self.pg, async_op)
        return Handle(WorksPending([work]), "barrier", None) if async_op else None

    def send(self, tensor: Tensor, dst: int, tag: int, timeout_s: Seconds, async_op: bool, /) -> Any:
        if async_op:
            work = dist.isend(tensor, group=self.pg, tag=tag, group_dst=dst)
            return Handle(_pending_messages([work], tensor), "send", tensor)
        return dist.send(tensor, group=self.pg, tag=tag, group_dst=dst)

    def recv(self, tensor: Tensor, src: int | None, tag: int, timeout_s: Seconds, async_op: bool, /) -> Any:
        if async_op:
            work = dist.irecv(tensor, group=self.pg, tag=tag, group_src=src)
            return Handle(_pending_messages([work], tensor), "recv", tensor)
        source = dist.recv(tensor, group=self.pg, tag=tag, group_src=src)
        return dist.get_group_rank(self.pg, source) if src is None else src

    # -- verbs whose parts may be unequal

    @_verb(output=0, input=1)
    def all_gather(self, output: Output, input: Tensor, counts: Counts, timeout_s: Seconds, async_op: bool, /) -> Any:
        if not isinstance(output, Tensor):
            return pending_works([dist.all_gather(list(output), input, self.pg, async_op)], async_op)
        counts = [input.numel()] * self.size if counts is None else counts
        self._compare("all_gather", input.dtype, counts=counts)
        return self._all_gather(flat(output), flat(input), counts, async_op)

    @_verb(output=0, input=1)
    def reduce_scatter(
        self, output: Output, input: Tensors, counts: Counts, op: Any, factor: Factor, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any:  # fmt: skip
        number, times = ops.read(op, factor)
        if counts is None:
            counts = [output.numel()] * self.size
        whole, counts, _ = self._as_one(input, counts)
        self._compare("reduce_scatter", output.dtype, number, counts, times)
        return self._reduce_scatter(flat(output), whole, counts, number, times, async_op)

    @_verb(output=0, input=1)
    def all_to_all(
        self, output: Output, input: Tensors, output_counts: Counts, input_counts: Counts, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any:  # fmt: skip
        target, expected, scattered = self._as_one(output, output_counts)
        source, sent, _ = self._as_one(input, input_counts)
        if expected[self.rank] != sent[self.rank]:
            raise make_argument_error("own_part_size", "output", sent[self.rank], expected[self.rank], "input")

        def part_again() -> None:
            for part, received in zip(output, torch.split(target, list(expected)), strict=True):
                flat(part).copy_(received)

        self._compare("all_to_all", source.dtype, table=(sent, expected))
        return self._all_to_all(target, source, expected, sent, part_again if scattered else nothing, async_op)

    @_verb(output=0, input=1, root=2)
    def gather(
        self, output: Output, input: Tensor, root: int, counts: Counts, timeout_s: Seconds, async_op: bool, /
    ) -> Any:
        if counts is not None:
            return self._move_parts(output, counts, input, root, True, async_op)
        parts = self._parts(output, None, input) if self.rank == root else None
        return pending_works([dist.gather(input, parts, None, self.pg, async_op, root)], async_op)

    @_verb(output=0, input=1)
    def scatter(
        self, output: Output, input: Tensors | None, root: int, counts: Counts, timeout_s: Seconds, async_op: bool, /
    ) -> Any:
        if counts is not None:
            return self._move_parts(input, counts, output, root, False, async_op)
        parts = self._parts(input, None, output) if self.rank == root else None
        return pending_works([dist.scatter(output, parts, None, self.pg, async_op, root)], async_op)

    # -- fused products, and new outputs

    def matmul_reduce(
        self, products: Tensor, output: Tensor, op: Any, scale: float, residual: Tensor | None, counts: Counts,
        hash: int, words: Callable[[], str], timeout_s: Seconds, /,
    ) -> Handle | None:  # fmt: skip
        torch_op, divide = self._as_torch_op(products, *ops.read(op, None))
        work = dist.all_reduce(products, torch_op, self.pg, async_op=True)

        def round_off() -> None:
            divide()
            mine = products
            if counts is not None:
                mine = torch.cat(torch.split_with_sizes(products, list(counts))[self.rank :: self.size])
            round_products(mine, output, scale, residual)

        return Handle(WorksPending([work], round_off), "matmul_reduce", output)

    def new_like(self, tensor: Tensor, /) -> Tensor | None:
        return torch.empty_like(tensor) if _is_plain(tensor) else None

    def new_rows(self, tensor: Tensor, rows: int, /) -> Tensor | None:
        return tensor.new_empty((rows, *tensor.shape[1:])) if _is_plain(tensor) else None

    # -- the way of backends of which nothing more is known; others have their own. Tensors are flat here

    def _all_gather(self, whole: Tensor, part: Tensor, counts: Sequence[int], async_op: bool) -> Pending | None:
        chunks = torch.split(whole, list(counts))
        _copy_unless_same(chunks[self.rank], part)
        works = [
            dist.broadcast(chunk, group=self.pg, async_op=True, group_src=root)
            for root, chunk in enumerate(chunks)
            if chunk.numel()
        ]
        return pending_works(works, async_op)

    def _reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> Pending | None:
        check_reduction(part.dtype, op)
        chunks = list(torch.split(whole, list(counts)))
        chunks[self.rank] = _copied(chunks[self.rank], part)
        torch_op, after = self._as_torch_op(part, op, factor)
        premul = op == ops.PREMUL_SUM
        copies = premul or not self.keeps_input
        works = []
        for root, chunk in enumerate(chunks):
            length = _PIECE_BYTES // chunk.element_size() if copies else chunk.numel()
            for piece in torch.split(chunk, max(1, length)) if chunk.numel() else ():
                if copies and root != self.rank:
                    piece = piece * factor if premul else piece.clone()
                work = dist.reduce(piece, op=torch_op, group=self.pg, async_op=True, group_dst=root)
                if copies:
                    work.wait()
                else:
                    works.append(work)
        return pending_works(works, async_op, after)

    def _all_to_all(
        self, output: Tensor, input: Tensor, expected: Sequence[int], sent: Sequence[int], after: Step,
        async_op: bool,
    ) -> Pending | None:  # fmt: skip
        works = [dist.all_to_all_single(output, input, list(expected), list(sent), self.pg, async_op)]
        return pending_works(works, async_op, after)

    def _move_parts(
        self, whole: Tensors | None, counts: Sequence[int], mine: Tensor, root: int, to_root: bool, async_op: bool
    ) -> Pending | None:
        """Unequal parts as messages: from every rank's own tensor to the root's whole, or the other way."""
        here, elsewhere = (dist.irecv, dist.isend) if to_root else (dist.isend, dist.irecv)
        if self.rank != root:
            messages = [(elsewhere, mine, root)]
        else:
            parts = self._parts(whole, counts, mine)
            own = flat(parts[root])
            _copy_unless_same(*((own, flat(mine)) if to_root else (flat(mine), own)))
            messages = [(here, part, peer) for peer, part in enumerate(parts) if peer != root]
        works = [move(tensor, None, self.pg, 0, peer) for move, tensor, peer in messages if tensor.numel()]
        return _pending_messages(works, mine) if async_op else pending_works(works, False)

    def _compare(
        self, verb: str, dtype: torch.dtype, op: int = NO_OP, counts: Sequence[int] = (), factor: float = 1.0,
        table: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        """Raises MismatchError on all ranks unless all were asked for the same."""
        seq = self.calls.next()
        if self._can_compare:
            request = Request(self.size, verb, dtype, op, counts, factor, table)
            # Not over Python's bytes: a backend's thread may let go of the tensors when Python has ended.
            mine = torch.tensor(list(request.bytes), dtype=torch.uint8)
            shown = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(shown, mine, group=self.pg)
            compare(self.pg, seq, request, [bytes(of_rank.tolist()) for of_rank in shown])

    def _as_torch_op(self, target: Tensor, op: int, factor: float) -> tuple[Any, Step]:
        """What to hand to torch for an op that not every backend has, and a step for after the call.

        A target of PREMUL_SUM is multiplied here, one of AVG divided after a SUM.
        """
        if op in (ops.PREMUL_SUM, ops.AVG):
            check_reduction(target.dtype, op)
        if op == ops.PREMUL_SUM:
            target.mul_(factor)
        elif op == ops.AVG:
            return ops.for_torch(ops.SUM, 1.0), lambda: divide(target, self.size)
        return ops.for_torch(ops.SUM if op == ops.PREMUL_SUM else op, 1.0), nothing

    def _parts(self, tensors: Tensors | None, counts: Counts, like: Tensor) -> list[Tensor]:
        """One tensor per rank: as given, or views of one tensor, in the shape of ``like`` if they are equal."""
        if not isinstance(tensors, Tensor):
            return list(tensors or ())
        if counts is not None:
            return list(torch.split(flat(tensors), list(counts)))
        return [part.view(like.shape) for part in torch.split(flat(tensors), [like.numel()] * self.size)]

    def _as_one(self, tensors: Tensors, counts: Counts) -> tuple[Tensor, Sequence[int], bool]:
        """Tensors as one flat one with counts, and whether that is a copy."""
        if not isinstance(tensors, Tensor):
            return torch.cat([flat(t) for t in tensors]), [t.numel() for t in tensors], True
        whole = flat(tensors)
        return whole, [whole.numel() // self.size] * self.size if counts is None else counts, False


def pending_works(works: Sequence[dist.Work | None], async_op: bool, after: Step = nothing) -> Pending | None:
    """What a verb has begun; None when it is over. A work is None if torch has waited for it already."""
    if async_op:
        return WorksPending(works, after)
    for work in works:
        if work is not None:
            with late.waiting("a call on another backend"):
                work.wait()
    after()
    return None


def _pending_messages(works: Sequence[dist.Work | None], tensor: Tensor) -> Pending:
    return MessagesPending(works) if tensor.device.type == "cpu" else WorksPending(works)


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


@cache
def check_reduction(dtype: torch.dtype, op: int) -> None:
    """Refuses an op that means nothing for a dtype, as the core does."""
    empty = torch.empty(0, dtype=dtype, device="cpu")
    _core.combine(empty, [empty], op, [1.0])


def _copy_unless_same(to: Tensor, source: Tensor) -> None:
    if to.data_ptr() != source.data_ptr():
        to.copy_(source.view(to.shape))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
