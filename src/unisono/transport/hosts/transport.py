"""The verbs of a group over several hosts; see the package's text for the parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base import ops
from ...base.errors import MismatchError, UnisonoError
from ...base.handle import Handle, Pending
from ...base.tensors import empty, plain
from ..backend import flat, round_products
from ..outputs import are_shapes
from ..pending import Step
from ..protocol import Counts, Factor, Output, Seconds, Tensors, Transport
from ..spans import spans_of
from . import bulk, small
from .agreement import RESULT_AT
from .calling import HostsGroup
from .presence import Listener
from .reduction import Reduction
from .requests import HostsRequest


class HostsTransport(HostsGroup):
    """A group whose ranks are on several hosts."""

    # -- verbs

    def all_reduce(
        self, tensor: Tensor, out: Output, op: Any, factor: Factor, timeout_s: Seconds, async_op: bool, /
    ) -> Any:
        tensor = plain(tensor) if isinstance(out, int) else tensor
        made = self._checker.all_reduce(tensor, out, op, factor, timeout_s, False)
        target = tensor if out is None else made if isinstance(out, int) else out
        number, times = ops.read(op, factor)
        source, into = flat(tensor), flat(target)

        def run(seq: int) -> None:
            self._reduce_all(seq, ("all_reduce", ""), source, into, number, times)

        return self._start("all_reduce", run, target, made, timeout_s, async_op)

    def _reduce_all(
        self, seq: int, verb: tuple[str, str], source: Tensor, into: Tensor, op: int, factor: float
    ) -> None:
        """Every rank gets all of the reduced whole."""
        reduction = self._reduction(op, factor, source.dtype)
        request = HostsRequest(self.size, seq, verb[0], source.dtype, [source.numel()], op, factor, facts=verb[1])
        if source.nbytes <= self.whole_bytes:
            every = [[(0, source.numel())]] * self.layout.count
            into.copy_(small.reduce(self, request, source, reduction, every))
        elif source.nbytes <= self.small_bytes:
            small.reduce_in_parts(self, request, source, reduction).take(RESULT_AT, into)
        else:
            small.begin(self, request)
            with self._bulk() as large:
                bulk.all_reduce(self, large, source, into, reduction)

    def reduce(
        self, tensor: Tensor, root: int, out: Output, op: Any, factor: Factor, timeout_s: Seconds, async_op: bool, /
    ) -> Any:
        tensor = plain(tensor) if isinstance(out, int) else tensor
        made = self._checker.reduce(tensor, root, out, op, factor, timeout_s, False)
        target = tensor if out is None else made if isinstance(out, int) else out
        number, times = ops.read(op, factor)
        source = flat(tensor)
        into = flat(target) if self.rank == root else source[:0]

        def run(seq: int) -> None:
            counts = [0] * self.size
            counts[root] = source.numel()
            verb = "reduce", f"root {root}"
            self._reduce_chunks(seq, verb, source, into, counts, number, times)

        return self._start("reduce", run, target, made, timeout_s, async_op)

    def reduce_scatter(
        self, output: Output, input: Tensors, counts: Counts, op: Any, factor: Factor, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any:  # fmt: skip
        if isinstance(output, int) and isinstance(input, Tensor):
            input = plain(input)
        made = self._checker.reduce_scatter(output, input, counts, op, factor, timeout_s, False)
        target = made if isinstance(output, int) else output
        number, times = ops.read(op, factor)
        source, each = self._as_one(input, counts)
        into = flat(target)

        def run(seq: int) -> None:
            self._reduce_chunks(seq, ("reduce_scatter", ""), source, into, each, number, times)

        return self._start("reduce_scatter", run, target, made, timeout_s, async_op)

    def _reduce_chunks(
        self, seq: int, verb: tuple[str, str], source: Tensor, into: Tensor, counts: Sequence[int], op: int,
        factor: float,
    ) -> None:  # fmt: skip
        """Each rank gets its chunk of the reduced whole."""
        reduction = self._reduction(op, factor, source.dtype)
        request = HostsRequest(self.size, seq, verb[0], source.dtype, counts, op, factor, facts=verb[1])
        if source.nbytes <= self.small_bytes:
            chunks = spans_of(counts)
            got = small.reduce(self, request, source, reduction, [[chunks[r] for r in h] for h in self.layout.hosts])
            start = sum(counts[r] for r in self.layout.mine if r < self.rank)
            into.copy_(got[start : start + into.numel()])
        else:
            small.begin(self, request)
            with self._bulk() as large:
                bulk.reduce_scatter(self, large, source, into, counts, reduction)

    def broadcast(self, tensor: Tensor, root: int, out: Output, timeout_s: Seconds, async_op: bool, /) -> Any:
        tensor = plain(tensor) if isinstance(out, int) else tensor
        made = self._checker.broadcast(tensor, root, out, timeout_s, False)
        target = tensor if out is None else made if isinstance(out, int) else out
        source, into = flat(tensor), flat(target)

        def run(seq: int) -> None:
            request = HostsRequest(self.size, seq, "broadcast", source.dtype, [source.numel()], facts=f"root {root}")
            if self.rank == root and into.data_ptr() != source.data_ptr():
                into.copy_(source)
            if source.nbytes <= self.whole_bytes:
                counts = [0] * self.size
                counts[root] = source.numel()
                got = small.gather(self, request, source if self.rank == root else None, counts, source.element_size())
                if self.rank != root:
                    got.take(RESULT_AT, into)
            else:
                small.begin(self, request)
                with self._bulk() as large:
                    bulk.broadcast(self, large, into, root)

        return self._start("broadcast", run, target, made, timeout_s, async_op)

    def all_gather(self, output: Output, input: Tensor, counts: Counts, timeout_s: Seconds, async_op: bool, /) -> Any:
        input = plain(input) if isinstance(output, int) else input
        made = self._checker.all_gather(output, input, counts, timeout_s, False)
        target = made if isinstance(output, int) else output
        parts = None if isinstance(target, Tensor) else [flat(t) for t in target]
        each = [p.numel() for p in parts] if parts is not None else counts
        each = [input.numel()] * self.size if each is None else [int(n) for n in each]
        source = flat(input)

        def run(seq: int) -> None:
            request = HostsRequest(self.size, seq, "all_gather", source.dtype, each)
            if sum(each) * source.element_size() <= self.small_bytes:
                got = small.gather(self, request, source, each, source.element_size())
                at = RESULT_AT
                for part in [flat(target)] if parts is None else parts:
                    got.take(at, part)
                    at += part.nbytes
                return
            small.begin(self, request)
            into = flat(target) if parts is None else empty(sum(each), dtype=source.dtype)
            with self._bulk() as large:
                bulk.all_gather(self, large, into, source, each)
            if parts is not None:
                _deal(into, parts)

        return self._start("all_gather", run, target, made, timeout_s, async_op)

    def gather(
        self, output: Output, input: Tensor, root: int, counts: Counts, timeout_s: Seconds, async_op: bool, /
    ) -> Any:
        input = plain(input) if isinstance(output, int) else input
        made = self._checker.gather(output, input, root, counts, timeout_s, False)
        target = made if isinstance(output, int) else output
        source, nothing = flat(input), flat(input)[:0]
        inputs = [source if r == root else nothing for r in range(self.size)]
        outputs = self._parts(target, counts) if self.rank == root else [nothing] * self.size

        def run(seq: int) -> None:
            self._exchange(seq, ("gather", f"root {root}"), outputs, inputs)

        return self._start("gather", run, target, made, timeout_s, async_op)

    def scatter(
        self, output: Output, input: Tensors | None, root: int, counts: Counts, timeout_s: Seconds, async_op: bool, /
    ) -> Any:
        if isinstance(output, int) and isinstance(input, Tensor):
            input = plain(input)
        made = self._checker.scatter(output, input, root, counts, timeout_s, False)
        target = made if isinstance(output, int) else output
        into = flat(target)
        outputs = [into if r == root else into[:0] for r in range(self.size)]
        inputs = self._parts(input, counts) if self.rank == root else [into[:0]] * self.size

        def run(seq: int) -> None:
            self._exchange(seq, ("scatter", f"root {root}"), outputs, inputs)

        return self._start("scatter", run, target, made, timeout_s, async_op)

    def all_to_all(
        self, output: Output, input: Tensors, output_counts: Counts, input_counts: Counts, timeout_s: Seconds,
        async_op: bool, /,
    ) -> Any:  # fmt: skip
        if isinstance(output, int) and isinstance(input, Tensor):
            input = plain(input)
        elif are_shapes(output):
            input = [plain(tensor) for tensor in input]
        made = self._checker.all_to_all(output, input, output_counts, input_counts, timeout_s, False)
        target = made if made is not None else output
        outputs, inputs = self._parts(target, output_counts), self._parts(input, input_counts)

        def run(seq: int) -> None:
            self._exchange(seq, ("all_to_all", ""), outputs, inputs)

        return self._start("all_to_all", run, target, made, timeout_s, async_op)

    def _exchange(self, seq: int, verb: tuple[str, str], outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        table = [x.numel() for x in inputs], [x.numel() for x in outputs]
        dtype = inputs[0].dtype
        request = HostsRequest(self.size, seq, verb[0], dtype, table=table, facts=verb[1])
        apart = small.exchange(self, request, inputs, outputs, dtype.itemsize)
        with self._bulk() as large:
            bulk.exchange(self, large, outputs, inputs, apart)

    def barrier(self, timeout_s: Seconds, async_op: bool, /) -> Handle | None:
        self._checker.barrier(timeout_s, False)

        def run(seq: int) -> None:
            request = HostsRequest(self.size, seq, "barrier", torch.uint8)
            small.gather(self, request, None, [0] * self.size, 1)

        return self._start("barrier", run, None, None, timeout_s, async_op)  # type: ignore[no-any-return]

    def matmul_reduce(
        self, products: Tensor, output: Tensor, op: Any, scale: float, residual: Tensor | None, counts: Counts,
        hash: int, words: Callable[[], str], timeout_s: Seconds, /,
    ) -> Handle | None:  # fmt: skip
        """Reduced in the background, so that the next products are computed meanwhile."""
        self._checker.matmul_reduce(products, output, op, scale, residual, counts, hash, words, timeout_s)
        number, _ = ops.read(op, None)
        said = f"{words()} {hash:x}"
        source = flat(products)

        def run(seq: int) -> None:
            verb = "matmul_reduce", said
            if counts is None:
                total = torch.empty_like(source)
                self._reduce_all(seq, verb, source, total, number, 1.0)
            else:
                total = torch.empty(output.numel(), dtype=source.dtype)
                done = begin = 0
                for first in range(0, len(counts), self.size):
                    of_output = list(counts[first : first + self.size])
                    n, mine = sum(of_output), of_output[self.rank]
                    part, into = source[begin : begin + n], total[done : done + mine]
                    self._reduce_chunks(seq, verb, part, into, of_output, number, 1.0)
                    begin, done = begin + n, done + mine
            round_products(total, flat(output), scale, None if residual is None else flat(residual))

        return self._start("matmul_reduce", run, output, None, timeout_s, True)  # type: ignore[no-any-return]

    def send(self, tensor: Tensor, dst: int, tag: int, timeout_s: Seconds, async_op: bool, /) -> Any:
        self._checker.send(tensor, dst, tag, timeout_s, async_op)
        dst, tag = int(dst), int(tag)
        if self.layout.host_of[dst] == self.layout.host:
            return self._message_inside("send", tensor, self.layout.mine.index(dst), tag, timeout_s, async_op)
        return self.mailbox.send(tensor, dst, tag, timeout_s, async_op)

    def recv(self, tensor: Tensor, src: int | None, tag: int, timeout_s: Seconds, async_op: bool, /) -> Any:
        self._checker.recv(tensor, src, tag, timeout_s, async_op)
        tag = int(tag)
        if src is None or self.layout.host_of[int(src)] != self.layout.host:
            return self.mailbox.recv(tensor, None if src is None else int(src), tag, timeout_s, async_op)
        return self._message_inside("recv", tensor, self.layout.mine.index(src), tag, timeout_s, async_op)

    def _message_inside(
        self, verb: str, tensor: Tensor, peer: int, tag: int, timeout_s: Seconds, async_op: bool
    ) -> Any:
        self.check_alive(verb, self._done)
        try:
            done = getattr(self.comm, verb)(tensor, peer, tag, timeout_s or self.timeout_s, async_op)
        except MismatchError:
            raise
        except UnisonoError as error:
            raise self.explain(verb, self._done, error) from None
        if async_op:
            return Handle(Inside(self, verb, done._pending), verb, tensor)
        return None if verb == "send" else self.layout.mine[done]

    def new_like(self, tensor: Tensor, /) -> Tensor | None:
        return self._checker.new_like(tensor)

    def new_rows(self, tensor: Tensor, rows: int, /) -> Tensor | None:
        return self._checker.new_rows(tensor, rows)

    def call_now(self, verb: str, arguments: tuple[Any, ...], options: Any, timeout_s: float) -> bool:
        """As the core's: calls a verb for torch, unless its options ask for a call in the background."""
        if options.asyncOp:
            return False
        limit_s = options.timeout.total_seconds()
        getattr(self, verb)(*arguments, timeout_s if limit_s < 0 else limit_s, False)
        return True

    # -- splitting: blocks are made inside the hosts, see joining.py; what ranks show one another is a number instead

    def make_block(self, size: int, /) -> int:
        """The highest number of a group that this rank knows, and the port of its listener for the new one."""
        port = 0
        if self.survival is not None:
            with contextlib.suppress(OSError):  # without one the new group cannot shrink: better than none
                listener = Listener(self.survival.places[self.rank][0])
                port = listener.place[1]
                self._listeners[port] = listener
        return port << 32 | self.links.engine.contexts

    def drop_block(self, offset: int, rank: int, reason: str | None, /) -> None:
        if (listener := self._listeners.pop(offset >> 32, None)) is not None:
            listener.close()

    def split(
        self, members: Sequence[int], blocks: Sequence[int], rank: int, name: str, id: int, timeout_s: float, /
    ) -> Any:
        from .joining import split

        contexts, ports = [block & 0xFFFF_FFFF for block in blocks], [block >> 32 for block in blocks]
        listener = self._listeners.get(ports[rank])
        made = split(self, members, contexts, ports, rank, listener, name, id, timeout_s)
        self._listeners.pop(ports[rank], None)  # it is the new group's now
        return made

    # -- tensors

    def _reduction(self, op: int, factor: float, dtype: torch.dtype) -> Reduction:
        return Reduction(op, factor, dtype, self.size, self.wide_sums)

    def _parts(self, tensors: Tensors | None, counts: Counts) -> list[Tensor]:
        """One flat tensor per rank."""
        if not isinstance(tensors, Tensor):
            return [flat(t) for t in tensors or ()]
        whole = flat(tensors)
        each = [whole.numel() // self.size] * self.size if counts is None else [int(n) for n in counts]
        return [whole[a:b] for a, b in spans_of(each)]

    def _as_one(self, tensors: Tensors, counts: Counts) -> tuple[Tensor, list[int]]:
        """Tensors as one flat one, with counts."""
        if isinstance(tensors, Tensor):
            return flat(tensors), [p.numel() for p in self._parts(tensors, counts)]
        parts = [flat(t) for t in tensors]
        return torch.cat(parts), [p.numel() for p in parts]


def _deal(whole: Tensor, parts: Sequence[Tensor]) -> None:
    start = 0
    for part in parts:
        part.copy_(whole[start : start + part.numel()])
        start += part.numel()


class Inside:
    """A message inside a host, whose ranks have other numbers there."""

    def __init__(self, transport: HostsGroup, verb: str, pending: Pending) -> None:
        self._transport, self._verb, self._pending = transport, verb, pending

    def done(self) -> bool:
        return self._pending.done()

    def wait(self, timeout_s: float) -> bool:
        return self._pending.wait(timeout_s)

    def withdraw(self) -> None:
        self._pending.withdraw()  # type: ignore[attr-defined]

    def error(self) -> Exception | None:
        error = self._pending.error()
        if isinstance(error, UnisonoError) and not isinstance(error, MismatchError):
            return self._transport.explain(self._verb, 0, error)
        return error

    def on_done(self, callback: Step, /) -> None:
        self._pending.on_done(callback)

    @property
    def source(self) -> int:
        return self._transport.layout.mine[self._pending.source]


if TYPE_CHECKING:
    _hosts_is_one: type[Transport] = HostsTransport
