"""One rank of an MPI library under the benchmark: the calls a user of mpi4py would write, with everything bound."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from mpi4py import MPI

from .arrays import Arrays
from .cases import OPS, ROOT, WINDOW, Case, Lacking
from .turns import Call, serve_turns, timed

_TYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int8": MPI.INT8_T,
    "uint8": MPI.UINT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
}
_OPS = {
    "sum": MPI.SUM,
    "product": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}


class MpiJob:
    """A case on this rank, ready to run."""

    def __init__(self, comm: Any, case: Case) -> None:
        self.comm = comm
        if OPS[case.op].reduces:
            if case.dtype not in _TYPES:
                raise Lacking(f"MPI reduces no {case.dtype}")
            if case.redop not in _OPS:
                raise Lacking(f"MPI has no {case.redop}")
        self.arrays = Arrays(case, comm.rank)
        self.call = self._call(case)

    def check(self) -> tuple[int, float]:
        self.arrays.fill()
        self.comm.Barrier()
        seconds = timed(self.call, 1)
        wrong = self.arrays.count_wrong()
        self.arrays.clear()
        return wrong, seconds

    def run(self, warmup: int, calls: int) -> float:
        for _ in range(warmup):
            self.call()
        self.comm.Barrier()
        return timed(self.call, calls)

    def _call(self, case: Case) -> Call:
        comm, op, x, y = self.comm, case.op, self.arrays.input, self.arrays.output
        kind = _TYPES.get(case.dtype, MPI.UINT16_T)  # 16-bit floats are only moved
        counts = list(case.counts)
        starts = [case.start(r) for r in range(case.ranks)]
        if op == "barrier":
            return comm.Barrier  # type: ignore[no-any-return]
        if op == "all_reduce":
            return partial(comm.Allreduce, MPI.IN_PLACE, [x, case.count, kind], _OPS[case.redop])
        if op == "reduce":
            if comm.rank == ROOT:
                return partial(comm.Reduce, MPI.IN_PLACE, [x, case.count, kind], _OPS[case.redop], ROOT)
            return partial(comm.Reduce, [x, case.count, kind], None, _OPS[case.redop], ROOT)
        if op == "broadcast":
            return partial(comm.Bcast, [x, case.count, kind], ROOT)
        if op == "p2p_latency":
            return self._ping(x, y, case, kind)
        if op == "p2p_bandwidth":
            return self._stream(x, y, case, kind)
        whole = [y, (counts, starts), kind]
        if op == "all_gather":
            if case.even:
                return partial(comm.Allgather, [x, counts[0], kind], [y, counts[0], kind])
            return partial(comm.Allgatherv, [x, x.size, kind], whole)
        if op == "reduce_scatter":
            if case.even:
                return partial(comm.Reduce_scatter_block, [x, counts[0], kind], [y, y.size, kind], _OPS[case.redop])
            return partial(comm.Reduce_scatter, [x, case.count, kind], [y, y.size, kind], counts, _OPS[case.redop])
        if op == "gather":
            if case.even:
                into = None if y is None else [y, counts[0], kind]
                return partial(comm.Gather, [x, counts[0], kind], into, ROOT)
            return partial(comm.Gatherv, [x, x.size, kind], None if y is None else whole, ROOT)
        if op == "scatter":
            if case.even:
                parts = None if x is None else [x, counts[0], kind]
                return partial(comm.Scatter, parts, [y, y.size, kind], ROOT)
            return partial(comm.Scatterv, None if x is None else [x, (counts, starts), kind], [y, y.size, kind], ROOT)
        assert op == "all_to_all", op
        if case.even:
            return partial(comm.Alltoall, [x, counts[0], kind], [y, counts[0], kind])
        mine = counts[comm.rank]
        into = [y, ([mine] * case.ranks, [mine * r for r in range(case.ranks)]), kind]
        return partial(comm.Alltoallv, [x, (counts, starts), kind], into)

    def _ping(self, x: Any, y: Any, case: Case, kind: Any) -> Call:
        comm, last = self.comm, case.ranks - 1
        there, back = [x, case.count, kind], [y, case.count, kind]

        def first() -> None:
            comm.Send(there, last)
            comm.Recv(back, last)

        def answering() -> None:
            comm.Recv(back, 0)
            comm.Send(there, 0)

        return {0: first, last: answering}.get(comm.rank, _nothing)

    def _stream(self, x: Any, y: Any, case: Case, kind: Any) -> Call:
        comm, last = self.comm, case.ranks - 1
        there, back = [x, case.count, kind], [y, case.count, kind]

        def sending() -> None:
            MPI.Request.Waitall([comm.Isend(there, last) for _ in range(WINDOW)])
            comm.Recv([y, 1, kind], last)

        def receiving() -> None:
            MPI.Request.Waitall([comm.Irecv(back, 0) for _ in range(WINDOW)])
            comm.Send([x, 1, kind], 0)

        return {0: sending, last: receiving}.get(comm.rank, _nothing)


def _nothing() -> None:
    """What the ranks between the two ends of a message do."""


def main() -> None:
    comm = MPI.COMM_WORLD
    library = MPI.Get_library_version().replace("\0", "").split("\n")[0].split(", package")[0]
    serve_turns(os.environ["UNISONO_BENCH_TURNS"], comm.rank, " ".join(library.split()), partial(MpiJob, comm))
