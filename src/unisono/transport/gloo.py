"""Uneven collectives by send and receive, for gloo: every byte goes once from where it is to where it is wanted.

In a call each rank sends each other a *header*, which says what it was asked for and holds the data itself if that is
small. Larger data is sent beside it, under a tag made of the request's digest and the data's length, so it only ever
meets data of an equal request. If requests differ, every rank reads so in the headers and raises.

Of two ranks the lower one writes first and the higher one answers. When both write at once, gloo's thread may find the
connection locked by a sender that it has itself displaced from the CPU, and tries again until its time slice ends.

A reduce-scatter receives the chunk of this rank piece by piece from all peers, and combines each piece with
the core's kernels: the same bits as on a unisono group. While a piece is combined the next ones arrive. The memory
for pieces is at most the size of the output (or ``_LEAST_SCRATCH``, if that is more).

When a rank dies, those that wait for it learn so from gloo, and those that wait for one of these would not. So whoever
fails closes its own connections: all learn, one after the other, and the group is over for everybody.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from ctypes import memmove, string_at
from datetime import timedelta
from functools import wraps
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import _core
from ..base.errors import MismatchError, UnisonoError, make_error
from ..base.handle import Pending
from . import late
from .agreement import NO_OP, Request, compare, meet, request_bytes
from .backend import BackendTransport, check_reduction
from .pending import ProgressThread, Step, nothing
from .spans import Span, spans_of

_HEADERS_BYTES = 1 << 20  # of all headers of a call to and from a rank
_GATHER_BYTES = 8 << 20  # the same in an all-gather, where they are together not more than the output
_LEAST_HEADER = 4 << 10  # of one header, however many ranks there are
_PIECE_BYTES = 2 << 20  # measured: smaller pieces cost more in posting, larger ones leave the caches
_PIECES_AHEAD = 2
_LEAST_SCRATCH = 1 << 20
_LEAST_RELAY = 1 << 20  # bytes of a chunk from which passing it on in shares pays
_TAGS = 0x4000_0000
_HEADER_TAGS = 0x2000_0000
_END_TAG = 0x1FFF_FF00  # nothing is ever sent with it, or one of those that follow it
_PEER_LOST = 2  # its number in errors.py and core/base/status.h

Relay = tuple[int, Span, list[tuple[int, Span]]]  # a root, what it sends this rank, and what others pass on to it
Works = Iterable[tuple[int, Any]]  # messages under way, each with the rank it goes to or comes from


Tried = TypeVar("Tried", bound=Callable[..., Any])


def _telling_others(verb: Tried) -> Tried:
    """Of a call that fails for another reason than what it was asked for, the other ranks learn."""

    @wraps(verb)
    def run(self: GlooTransport, *args: Any, **more: Any) -> Any:
        try:
            return verb(self, *args, **more)
        except UnisonoError:
            raise
        except RuntimeError as error:
            raise self.hang_up(error) from error

    return run  # type: ignore[return-value]


class GlooTransport(BackendTransport):
    """The transport of a gloo group."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        # The next rank first, so that not everybody begins with rank 0.
        self.peers = [(self.rank + by) % self.size for by in range(1, self.size)]
        self._progress = ProgressThread()
        links = max(1, 2 * len(self.peers))
        self.head_bytes = request_bytes(self.size)
        self.header_room = self.head_bytes + max(_LEAST_HEADER, _HEADERS_BYTES // links & -_LEAST_HEADER)
        self.gather_room = self.head_bytes + max(_LEAST_HEADER, _GATHER_BYTES // links & -_LEAST_HEADER)
        self._buffers: list[Tensor] = []  # for headers; kept, since fresh memory would cost a page fault every 4 KiB

    def _compare(self, *request: Any, **more: Any) -> None:
        """Left to the headers, which bring every rank's request."""

    def _all_gather(self, whole: Tensor, part: Tensor, counts: Sequence[int], async_op: bool) -> Pending | None:
        request = Request(self.size, "all_gather", part.dtype, NO_OP, counts)
        to = spans_of(counts)
        spans = [(0, part.numel())] * self.size
        largest = max(counts)
        relay = None
        if self.size > 2 and largest * part.element_size() >= _LEAST_RELAY and 2 * largest > to[-1][1]:
            relay = self._plan_relay(list(counts).index(largest), largest, spans, to)
        return self._exchange(request, part, spans, whole, to, self.gather_room, async_op, relay)

    def _plan_relay(self, root: int, largest: int, spans: list[Span], to: list[Span]) -> Relay | None:
        """One rank, the root, has more than all others together. It sends each of the others a share of its chunk, and
        they pass the shares on to one another, instead of sending everything to everybody while the others have nothing
        to do. Changes the spans accordingly, and returns what this rank passes on."""
        others = [rank for rank in range(self.size) if rank != root]
        edges = [largest * i // len(others) for i in range(len(others) + 1)]
        shares = dict(zip(others, pairwise(edges), strict=True))
        start = to[root][0]
        if self.rank == root:
            spans[:] = [shares.get(rank, spans[root]) for rank in range(self.size)]
            return None
        to[root] = (start + shares[self.rank][0], start + shares[self.rank][1])
        return root, to[root], [(rank, (start + a, start + b)) for rank, (a, b) in shares.items() if rank != self.rank]

    def _all_to_all(
        self, output: Tensor, input: Tensor, expected: Sequence[int], sent: Sequence[int], after: Step,
        async_op: bool,
    ) -> Pending | None:  # fmt: skip
        request = Request(self.size, "all_to_all", input.dtype, NO_OP, (), table=(sent, expected))
        spans, to = spans_of(sent), spans_of(expected)
        return self._exchange(request, input, spans, output, to, self.header_room, async_op, after=after)

    @_telling_others
    def _exchange(
        self, request: Request, source: Tensor, spans: list[Span], output: Tensor, to: list[Span], room: int,
        async_op: bool, relay: Relay | None = None, after: Step = nothing,
    ) -> Pending | None:  # fmt: skip
        """Sends ``spans[r]`` of the source to rank r, and receives ``to[r]`` of the output from it.

        With ``relay``: passes the span on when it has come from the root, and receives the others' spans from them.
        """
        messages = _Messages(self, request, source, spans, room, reply_first=async_op)
        small = messages.fitting_elements
        receiving = {
            peer: messages.recv(output[start:end], peer)
            for peer in reversed(self.peers)
            for start, end in (to[peer],)
            if end - start > small
        }
        others = relay[2] if relay is not None else ()
        passed_on = [messages.recv(output[start:end], peer) for peer, (start, end) in others]
        messages.all_posted()

        def rest() -> None:
            (start, end), own = to[self.rank], spans[self.rank][0]
            _copy(output, start, end, source.data_ptr() + own * source.element_size())  # while headers are on their way
            messages.compare(receiving.items())
            for peer in self.peers:
                start, end = to[peer]
                if start < end <= start + small:
                    _copy(output, start, end, messages.data_place(peer))
            if relay is not None:
                root, (start, end), peers = relay
                if root in receiving:
                    receiving.pop(root).wait()
                messages.works += [messages.send(output[start:end], peer) for peer, _ in peers]
            messages.wait(*receiving.values(), *passed_on)
            after()

        return self._carry_out(rest, async_op)

    @_telling_others
    def _reduce_scatter(
        self, part: Tensor, whole: Tensor, counts: Sequence[int], op: int, factor: float, async_op: bool
    ) -> Pending | None:
        check_reduction(part.dtype, op)
        spans = spans_of(counts)
        request = Request(self.size, "reduce_scatter", part.dtype, op, counts, factor)
        messages = _Messages(self, request, whole, spans, self.header_room, reply_first=async_op, in_pieces=True)
        start, end = spans[self.rank]
        own = whole[start:end]
        pieces = _Pieces(messages, part, own) if part.numel() > messages.fitting_elements and self.peers else None
        messages.all_posted()

        def rest() -> None:
            factors = messages.compare([] if pieces is None else pieces.under_way())
            if pieces is not None:
                pieces.combine(op, factors)
            else:
                inputs = [messages.data_from(rank, part) if rank != self.rank else own for rank in range(self.size)]
                _core.combine(part, inputs, op, factors)
            messages.wait()

        return self._carry_out(rest, async_op)

    def _carry_out(self, rest: Step, async_op: bool) -> Pending | None:
        """The rest of a call of which everything is posted: now, or by the progress thread."""
        if async_op:
            return self._progress.carry_out(lambda: self._finish(rest))
        rest()
        return None

    @_telling_others
    def _finish(self, rest: Step) -> None:
        rest()

    def hang_up(self, error: RuntimeError) -> Exception:
        """Closes this rank's connections, so that who waits for it learns at once; returns what to raise.

        gloo has no call for it, but closes them all when a wait times out.
        """
        pg, gone, probes = self._pg(), [], []
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1  # each has connections of its own
        if pg is None:
            return error
        for peer in sorted(self.peers):
            try:
                probes += [pg.recv([torch.empty(1)], peer, _END_TAG + i) for i in range(interfaces)]
            except RuntimeError:
                gone.append(peer)
        for probe in probes:
            try:
                probe.wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue
        if not gone:
            return error
        who = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        text = f"{who} died, left, or gave the group up after such an error: {error}"
        return make_error(_PEER_LOST, "", 0, pg.group_name, self.rank, gone, text, [], False)

    def pieces(self, chunk: Tensor) -> Sequence[Tensor]:
        """The pieces of a chunk: the same on sender and receiver."""
        scratch_bytes = max(chunk.nbytes, _LEAST_SCRATCH)
        fitting = scratch_bytes // (_PIECES_AHEAD * (self.size - 1))
        return torch.split(chunk, max(1, min(fitting, _PIECE_BYTES) // chunk.element_size()))

    def buffer(self) -> Tensor:
        """Memory for a header, of the longest kind: what a peer will write is not known."""
        try:
            return self._buffers.pop()
        except IndexError:
            return torch.empty(self.gather_room, dtype=torch.uint8, device="cpu")

    def take_back(self, buffers: list[Tensor]) -> None:
        self._buffers += buffers[: max(0, 2 * len(self.peers) - len(self._buffers))]


class _Messages:
    """The messages of one call. A work is waited for once only: gloo would take a second wait for another message."""

    def __init__(
        self, transport: GlooTransport, request: Request, source: Tensor, spans: list[Span], room: int,
        reply_first: bool, in_pieces: bool = False,
    ) -> None:  # fmt: skip
        self.transport = transport
        self.pg = transport.pg
        self.seq = seq = transport.calls.next()
        self.request = request
        self.source = source
        self.spans = spans
        self.in_pieces = in_pieces
        # An equal request has another tag in every other call: what a call has given up must never meet a later one.
        self.tag = int.from_bytes(request.digest[:4], "little") + seq * 0x9E37_79B1
        self.header_tag = _HEADER_TAGS | seq & 0xFF_FFFF
        self.fitting_elements = (room - transport.head_bytes) // source.element_size()
        self.works: list[Any] = []
        self.safe_sends: list[tuple[int, Any]] = []  # sends that an agreeing peer receives even if others disagree
        self.written: dict[Span, Tensor] = {}
        self.sent: list[Any] = []
        self.received: dict[int, tuple[Tensor, Any]] = {}
        # First what others wait for. An asynchronous call answers before it is asked: later there may be no thread of
        # Python's free to do so.
        self.replied = reply_first
        for peer in transport.peers:
            if peer > transport.rank:
                self._write(peer)
                self._send_data(peer)
            elif reply_first:
                self._write(peer)
        for peer in transport.peers:
            buffer = transport.buffer()
            self.received[peer] = (buffer, self.pg.recv([buffer], peer, self.header_tag))

    def all_posted(self) -> None:
        """To be called when all is posted that is to be received."""
        for peer in self.transport.peers:
            if peer < self.transport.rank:
                self._send_data(peer)

    def _write(self, peer: int) -> None:
        start, end = self.spans[peer]
        if end - start > self.fitting_elements:
            start = end = 0
        data_bytes = (end - start) * self.source.element_size()
        header = self.written.get((start, end))
        if header is None:
            # Raw copies: operations of torch would cost as much as the message.
            header = self.written[start, end] = self.transport.buffer()
            place, data = header.data_ptr(), self.source.data_ptr() + start * self.source.element_size()
            memmove(place, self.request.bytes, self.transport.head_bytes)
            memmove(place + self.transport.head_bytes, data, data_bytes)
        self.sent.append(self.pg.send([header[: self.transport.head_bytes + data_bytes]], peer, self.header_tag))

    def _send_data(self, peer: int) -> None:
        start, end = self.spans[peer]
        if end - start > self.fitting_elements:
            chunk = self.source[start:end]
            works = [self.send(piece, peer) for piece in (self.transport.pieces(chunk) if self.in_pieces else (chunk,))]
            self.works += works
            self.safe_sends += [(peer, work) for work in works[:_PIECES_AHEAD]]

    def data_place(self, peer: int) -> int:
        """Where the data in a peer's header is."""
        return self.received[peer][0].data_ptr() + self.transport.head_bytes

    def data_from(self, peer: int, like: Tensor) -> Tensor:
        """The data in a peer's header."""
        start = self.transport.head_bytes
        return self.received[peer][0][start : start + like.nbytes].view(like.dtype)

    def send(self, tensor: Tensor, peer: int) -> Any:
        return self.pg.send([tensor], peer, self._tag(tensor))

    def recv(self, tensor: Tensor, peer: int) -> Any:
        return self.pg.recv([tensor], peer, self._tag(tensor))

    def _tag(self, tensor: Tensor) -> int:
        """Another one for another length: two ranks that disagree about it must not meet."""
        return _TAGS | (self.tag + tensor.numel() * 0x85EB_CA6B) & 0x3FFF_FFFF

    def compare(self, receiving: Works) -> list[float]:
        """Reads the headers and answers them. Raises if requests differ, but not before the data has passed that
        agreeing ranks have asked each other for already: ``receiving`` is what this one has."""
        requests = [self.request.bytes] * self.transport.size
        for peer in sorted(self.received):
            header, work = self.received[peer]
            with late.waiting("call #%d on gloo: rank %d has not come", self.seq, peer):
                work.wait()
            requests[peer] = string_at(header.data_ptr(), self.transport.head_bytes)
            if peer < self.transport.rank and not self.replied:
                self._write(peer)
        try:
            return compare(self.pg, self.seq, self.request, requests)
        except MismatchError:
            me = self.transport.rank
            for peer, work in receiving:
                if meet(requests, peer, me):
                    work.wait()
            for peer, work in self.safe_sends:
                if meet(requests, me, peer):
                    work.wait()
            self._end_headers()
            raise

    def wait(self, *more: Any) -> None:
        """Waits for what was sent, and for more works. After that the headers are used again."""
        for work in (*self.works, *more):
            work.wait()
        self._end_headers()

    def _end_headers(self) -> None:
        for work in self.sent:
            work.wait()
        self.transport.take_back([*self.written.values(), *(header for header, _ in self.received.values())])


def _copy(output: Tensor, start: int, end: int, place: int) -> None:
    """Puts what is in memory at ``place`` into a span of the output, unless it is there already."""
    item_bytes = output.element_size()
    to = output.data_ptr() + start * item_bytes
    if to != place:
        memmove(to, place, (end - start) * item_bytes)


class _Pieces:
    """The chunk of this rank on its way in: up to _PIECES_AHEAD pieces per peer are received while one is combined."""

    def __init__(self, messages: _Messages, part: Tensor, mine: Tensor) -> None:
        self.transport = transport = messages.transport
        self.messages = messages
        self.outputs = transport.pieces(part)
        self.mine = transport.pieces(mine)
        ahead, length = min(_PIECES_AHEAD, len(self.outputs)), self.outputs[0].numel()
        self.scratch = torch.empty(ahead, transport.size - 1, length, dtype=part.dtype, device="cpu")
        self.waiting = deque(self._receive(i) for i in range(ahead))

    def _receive(self, i: int) -> tuple[list[Tensor], list[tuple[int, Any]]]:
        """Posts piece i of every peer; returns the tensors by rank, and the works."""
        length = self.outputs[i].numel()
        tensors = [row[:length] for row in self.scratch[i % len(self.scratch)]]
        tensors.insert(self.transport.rank, self.mine[i])
        return tensors, [(p, self.messages.recv(tensors[p], p)) for p in reversed(self.transport.peers)]

    def under_way(self) -> list[tuple[int, Any]]:
        return [pair for _, works in self.waiting for pair in works]

    def combine(self, op: int, factors: list[float]) -> None:
        for i, output in enumerate(self.outputs):
            tensors, works = self.waiting.popleft()
            for _, work in works:
                work.wait()
            _core.combine(output, tensors, op, factors)
            if i + len(self.scratch) < len(self.outputs):
                self.waiting.append(self._receive(i + len(self.scratch)))
