"""One rank of oneCCL under the benchmark; MPI, which oneCCL needs below it, hands the address of its store around."""

from __future__ import annotations

import ctypes
import os
from functools import partial
from typing import Any

from mpi4py import MPI

from .arrays import Arrays
from .cases import OPS, Case, Lacking
from .turns import serve_turns

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "barrier")
_NUMBERS = {**{name: i for i, name in enumerate(_OPS)}, "p2p_latency": 7, "p2p_bandwidth": 8}  # enum class Op
_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 6,
    "float16": 8,
    "float32": 9,
    "float64": 10,
    "bfloat16": 11,
}
_REDOPS = {"sum": 0, "product": 1, "min": 2, "max": 3}
ADDRESS_BYTES = 256


class CaseStruct(ctypes.Structure):
    """struct Case of oneccl_calls.cc."""

    _fields_ = (
        ("op", ctypes.c_int),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("sent", ctypes.POINTER(ctypes.c_size_t)),
        ("received", ctypes.POINTER(ctypes.c_size_t)),
        ("ranks", ctypes.c_size_t),
        ("count", ctypes.c_size_t),
        ("even", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("redop", ctypes.c_int),
        ("rank", ctypes.c_int),
    )


def open_library(comm: Any) -> Any:
    library = ctypes.CDLL(os.environ["UNISONO_BENCH_ONECCL"])
    library.unisono_ccl_run.restype = ctypes.c_double
    library.unisono_ccl_error.restype = ctypes.c_char_p
    library.unisono_ccl_version.restype = ctypes.c_char_p
    address = ctypes.create_string_buffer(ADDRESS_BYTES)
    if comm.rank == 0 and library.unisono_ccl_open(0, comm.size, address, 0):
        raise RuntimeError(library.unisono_ccl_error().decode())
    address = ctypes.create_string_buffer(comm.bcast(address.raw, 0), ADDRESS_BYTES)
    if library.unisono_ccl_open(comm.rank, comm.size, address, 1):
        raise RuntimeError(library.unisono_ccl_error().decode())
    return library


class CclJob:
    """A case on this rank, ready to run."""

    def __init__(self, comm: Any, library: Any, case: Case) -> None:
        if case.op not in _NUMBERS:
            raise Lacking(f"oneCCL has no {case.op} for the CPU")
        if OPS[case.op].reduces and case.redop not in _REDOPS:
            raise Lacking(f"oneCCL has no {case.redop} on the CPU")
        if case.op == "reduce_scatter" and not case.even:
            raise Lacking("oneCCL's reduce_scatter takes equal chunks only")
        self.library = library
        self.arrays = Arrays(case, comm.rank)
        numbers = ctypes.c_size_t * case.ranks
        sent, received = numbers(*case.counts), numbers(*case.counts)
        if case.op == "all_to_all":
            received = numbers(*[case.counts[comm.rank]] * case.ranks)
        self.case = self._struct(case, comm.rank, sent, received)
        self.meeting = self._struct(Case("barrier", 0, (0,) * case.ranks), comm.rank, sent, received)

    def _struct(self, case: Case, rank: int, sent: Any, received: Any) -> CaseStruct:
        x, y = (None if a is None else a.ctypes.data for a in (self.arrays.input, self.arrays.output))
        redop = _REDOPS.get(case.redop, 0)
        kind = _TYPES[case.dtype]
        return CaseStruct(_NUMBERS[case.op], x, y, sent, received, case.ranks, case.count, case.even, kind, redop, rank)

    def _loop(self, case: CaseStruct, calls: int) -> float:
        seconds = float(self.library.unisono_ccl_run(ctypes.byref(case), calls))
        if seconds < 0:
            raise Lacking(self.library.unisono_ccl_error().decode().splitlines()[0])
        return seconds

    def check(self) -> tuple[int, float]:
        self.arrays.fill()
        self._loop(self.meeting, 1)
        seconds = self._loop(self.case, 1)
        wrong = self.arrays.count_wrong()
        self.arrays.clear()
        return wrong, seconds

    def run(self, warmup: int, calls: int) -> float:
        if warmup:
            self._loop(self.case, warmup)
        self._loop(self.meeting, 1)
        return self._loop(self.case, calls)


def main() -> None:
    comm = MPI.COMM_WORLD
    library = open_library(comm)
    version = "oneCCL " + library.unisono_ccl_version().decode()
    serve_turns(os.environ["UNISONO_BENCH_TURNS"], comm.rank, version, partial(CclJob, comm, library))
