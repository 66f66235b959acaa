from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .base.errors import ArgumentError, UnisonoError
from .base.handle import Handle

_ReduceOp = str | dist.ReduceOp | dist.ReduceOp.RedOpType

OPS: dict[str, int]
RULES: dict[str, int]
LAYOUT: int

def setup(
    *,
    tensor: type[torch.Tensor],
    reduce_op: type[dist.ReduceOp],
    handle: Callable[[Pending, str, Any], Handle],
    make_error: Callable[..., UnisonoError],
    make_argument_error: Callable[[str, str, Any, Any, str, int], ArgumentError],
    call_site: Callable[[], str],
    heap_max: int,
    spin_us: int,
    fork_copy_max: int,
) -> None: ...
def read_op(op: _ReduceOp, factor: float | None = None) -> tuple[int, float]: ...
def cut_rows(splits: object, rows: int, row: int, size: int) -> tuple[int, ...] | None: ...
def is_part(whole: object, part: object, counts: Sequence[int], rank: int, size: int) -> bool: ...
def cut_matrix(matrix: object, row: int, rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None: ...
def is_exchange(
    output: object, input: object, received: Sequence[int], sent: Sequence[int], rank: int, size: int
) -> bool: ...
def empty(shape: Sequence[int], code: int, bits: int, /) -> torch.Tensor: ...
def empty_like(tensor: torch.Tensor, /) -> torch.Tensor | None: ...
def in_region(address: int, /) -> bool: ...
def combine(output: torch.Tensor, inputs: list[torch.Tensor], op: int, factors: Sequence[float], /) -> None: ...
def heap_usage() -> dict[str, int]: ...
def isa() -> str: ...
def set_isa(name: str, /) -> bool: ...
def multiply(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    columns: Sequence[int],
    c: torch.Tensor,
    bias: Sequence[torch.Tensor] | None,
    /,
) -> None: ...
def pack_panels(b: torch.Tensor, panels: torch.Tensor, /) -> None: ...
def panel_columns() -> int: ...

class Pending:
    @property
    def source(self) -> int: ...
    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def error(self) -> UnisonoError | None: ...
    def on_done(self, callback: Callable[[], None], /) -> None: ...

_Tensors = torch.Tensor | Sequence[torch.Tensor]
_Output = Any

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def staged_bytes(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def id(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def pids(self) -> list[int]: ...
    def rename(self, name: str, /) -> None: ...
    def barrier(self, timeout_s: float | None, async_op: bool) -> Handle | None: ...
    def all_reduce(
        self,
        tensor: torch.Tensor,
        out: _Output,
        op: _ReduceOp,
        factor: float | None,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any: ...
    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        out: _Output,
        op: _ReduceOp,
        factor: float | None,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any: ...
    def broadcast(
        self, tensor: torch.Tensor, root: int, out: _Output, timeout_s: float | None, async_op: bool
    ) -> Any: ...
    def all_gather(
        self,
        output: _Output,
        input: torch.Tensor,
        counts: Sequence[int] | None,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any: ...
    def reduce_scatter(
        self,
        output: _Output,
        input: _Tensors,
        counts: Sequence[int] | None,
        op: _ReduceOp,
        factor: float | None,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any: ...
    def gather(
        self,
        output: _Output,
        input: torch.Tensor,
        root: int,
        counts: Sequence[int] | None,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any: ...
    def scatter(
        self,
        output: _Output,
        input: _Tensors | None,
        root: int,
        counts: Sequence[int] | None,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any: ...
    def all_to_all(
        self,
        output: _Output,
        input: _Tensors,
        output_counts: Sequence[int] | None,
        input_counts: Sequence[int] | None,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any: ...
    def matmul_reduce(
        self,
        products: torch.Tensor,
        output: torch.Tensor,
        op: _ReduceOp,
        scale: float,
        residual: torch.Tensor | None,
        counts: Sequence[int] | None,
        hash: int,
        words: Callable[[], str],
        timeout_s: float | None,
    ) -> None: ...
    def send(
        self, tensor: torch.Tensor, dst: int, tag: int, timeout_s: float | None, async_op: bool
    ) -> Handle | None: ...
    def recv(
        self, tensor: torch.Tensor, src: int | None, tag: int, timeout_s: float | None, async_op: bool
    ) -> Handle | int: ...
    def call_now(self, verb: str, arguments: tuple[Any, ...], options: Any, timeout_s: float) -> bool: ...
    def new_like(self, tensor: torch.Tensor) -> torch.Tensor | None: ...
    def new_rows(self, tensor: torch.Tensor, rows: int) -> torch.Tensor | None: ...
    def close(self, reason: str, linger_s: float, /) -> None: ...
    def abort(self, reason: str, /) -> None: ...
    def make_block(self, size: int, /) -> int: ...
    def drop_block(self, offset: int, rank: int, reason: str | None, /) -> None: ...
    def split(
        self, members: Sequence[int], blocks: Sequence[int], rank: int, name: str, id: int, timeout_s: float, /
    ) -> Communicator: ...
    def offset_of(self, tensor: torch.Tensor, /) -> int: ...
    def peer_bytes(self, rank: int, offset: int, bytes: int, /) -> torch.Tensor: ...

class Listener:
    @property
    def name(self) -> str: ...
    def __init__(self) -> None: ...
    def join(
        self,
        rank: int,
        size: int,
        group: str,
        nonce: bytes,
        id: int,
        timeout_s: float,
        names: Sequence[str],
        limit_s: float | None = None,
    ) -> Communicator: ...
