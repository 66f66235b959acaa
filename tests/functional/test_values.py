"""What every function returns, against the model, on every kind of group, and that it leaves its input alone."""

import pytest
import torch

import unisono
from tests.functional.worlds import OTHERS, WORLDS, world
from tests.reference import COMPLEX, FLOATS, INTEGERS, difference, dtype_of, make_input, ops_of, reduced
from unisono import comm_func

NAMES = {"product": "prod"}  # the model's name -> comm_func's
SHAPES = ((), (1,), (6,), (6, 5), (12, 3, 2), (0, 4), (6000,), (6, 0))


def _bits(t):
    return t.resolve_conj().resolve_neg().contiguous().reshape(-1)


class Check:
    """Makes calls on one rank and collects complaints."""

    def __init__(self, group, kind, where):
        self.rank, self.size, self.kind, self.where = group.rank, group.size, kind, where
        self.native = kind not in OTHERS
        self.complaints = []
        self.seed = 0

    def inputs(self, shape, dtype):
        """Every rank's tensor for the next call."""
        self.seed += 1
        count = torch.Size(shape).numel()
        return [make_input(dtype, count, rank, self.seed).reshape(shape) for rank in range(self.size)]

    def same(self, label, got, want, shared=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            self.complaints.append(f"{label}: {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}")
        elif self.native:
            found = difference(_bits(got), _bits(want))
            if found:
                self.complaints.append(f"{label}: {found}")
            if shared and got.numel() and not unisono.is_shared(got):
                self.complaints.append(f"{label}: the result is not in shared memory")
        elif not torch.allclose(got.to(torch.complex128), want.to(torch.complex128), rtol=1e-2, equal_nan=True):
            self.complaints.append(f"{label}: {got.reshape(-1)[:4].tolist()}, want {want.reshape(-1)[:4].tolist()}")

    def call(self, label, function, mine, *arguments, want, functional=True, shared=True, **options):
        """One call, sync and async if it can be, with the input checked afterwards."""
        before = mine.clone()
        if not functional:
            self.same(label, function(mine, *arguments, group=self.where, **options), want, shared)
        else:
            out, handle = function(mine, *arguments, group=self.where, **options)
            if handle is not None:
                self.complaints.append(f"{label}: a sync call has a handle")
            self.same(label, out, want, shared)
            out, handle = function(mine, *arguments, group=self.where, async_op=True, **options)
            handle.wait()
            self.same(label + " async", handle.result(), want, shared)
            self.same(label + " async", out, want, shared)
        if difference(_bits(mine), _bits(before)):
            self.complaints.append(f"{label}: the input was changed")


def _dtypes(kind):
    if kind in OTHERS:
        return ("float32", "float64", "int32", "uint8")
    return (*FLOATS, *INTEGERS, *COMPLEX, "bool")


def _cheap(kind, shape, dtype, op="sum"):
    """Everything for float32; for others one shape."""
    return dtype == "float32" or shape == (6, 5)


def _reductions(group, kind, folder):
    with world(group, kind, folder) as where:
        check = Check(group, kind, where)
        size, rank = check.size, check.rank
        for dtype in _dtypes(kind):
            for op in ops_of(dtype):
                if op in ("premul_sum",) or (
                    kind in OTHERS and op in ("band", "bor", "bxor", "avg") and dtype == "uint8"
                ):
                    continue
                name = NAMES.get(op, op)
                if name not in ("sum", "prod", "min", "max", "avg"):
                    name = getattr(torch.distributed.ReduceOp, op.upper())
                for shape in SHAPES:
                    if not _cheap(kind, shape, dtype):
                        continue
                    inputs = check.inputs(shape, dtype)
                    total = reduced([t.reshape(-1) for t in inputs], op).reshape(shape)
                    label = f"{kind} {dtype} {op} {shape}"
                    check.call(f"all_reduce {label}", comm_func.all_reduce, inputs[rank], name, want=total)
                    dst = (check.seed) % size
                    want = total if rank == dst else torch.zeros(1, dtype=total.dtype)
                    check.call(
                        f"reduce {label} to {dst}",
                        comm_func.reduce,
                        inputs[rank],
                        dst,
                        name,
                        want=want,
                        functional=False,
                        shared=rank == dst,
                    )
                    if shape and shape[0] % size == 0:
                        part = total[rank * shape[0] // size : (rank + 1) * shape[0] // size]
                        function = comm_func.reduce_scatter_tensor
                        check.call(f"reduce_scatter {label}", function, inputs[rank], name, want=part)
        return check.complaints


def _moves(group, kind, folder):
    with world(group, kind, folder) as where:
        check = Check(group, kind, where)
        size, rank = check.size, check.rank
        for dtype in (*_dtypes(kind), *(() if kind in OTHERS else ("float8_e4m3fn",))):
            for shape in SHAPES:
                if not _cheap(kind, shape, dtype):
                    continue
                inputs = check.inputs(shape, dtype)
                mine = inputs[rank]
                rows = [t if shape else t.reshape(1) for t in inputs]
                label = f"{kind} {dtype} {shape}"
                together = (
                    torch.cat([t.view(torch.uint8) for t in rows]).view(dtype_of(dtype))
                    if dtype[:6] == "float8"
                    else torch.cat(rows)
                )
                check.call(f"all_gather {label}", comm_func.all_gather_into_tensor, mine, want=together)
                root = check.seed % size
                nothing = torch.zeros(1, dtype=mine.dtype)
                broadcast, scatter, gather = (
                    comm_func.broadcast,
                    comm_func.scatter_tensor,
                    comm_func.gather_into_tensor,
                )
                check.call(f"broadcast {label}", broadcast, mine, root, want=inputs[root], functional=False)
                want = together if rank == root else nothing
                check.call(f"gather {label}", gather, mine, root, want=want, functional=False, shared=rank == root)
                if shape and shape[0] % size == 0:
                    n = shape[0] // size
                    want = inputs[root][rank * n : (rank + 1) * n]
                    check.call(f"scatter {label}", scatter, mine, root, want=want, functional=False)
        return check.complaints


def _strided(group, kind, folder):
    """Transposed, sliced, expanded, conjugated and negated inputs are copied, not refused."""
    with world(group, kind, folder) as where:
        check = Check(group, kind, where)
        base = check.inputs((6, 8), "float32")
        for label, view in (
            ("transposed", lambda t: t.t()),
            ("every second", lambda t: t[:, ::2]),
            ("expanded", lambda t: t[:1].expand(6, 8)),
            ("offset", lambda t: t[2:4]),
            ("negated", lambda t: torch.complex(t, t).conj().imag),
        ):
            seen = [view(t) for t in base]
            total = reduced([t.reshape(-1) for t in seen], "sum").reshape(seen[0].shape)
            check.call(f"all_reduce {label}", comm_func.all_reduce, seen[check.rank], want=total)
            function = comm_func.all_gather_into_tensor
            check.call(f"all_gather {label}", function, seen[check.rank], want=torch.cat(seen))
        if check.native:
            lazy = [torch.complex(t, t + 1).conj() for t in base]
            total = reduced([t.resolve_conj().reshape(-1) for t in lazy], "sum").reshape(6, 8)
            check.call("all_reduce conjugated", comm_func.all_reduce, lazy[check.rank], want=total)
        return check.complaints


def _premul(group, kind, folder):
    with world(group, kind, folder) as where:
        check = Check(group, kind, where)
        inputs = check.inputs((6, 5), "float32")
        factors = [0.5 + rank for rank in range(check.size)]
        op = torch.distributed._make_nccl_premul_sum(factors[check.rank])
        total = reduced([t.reshape(-1) for t in inputs], "premul_sum", factors).reshape(6, 5)
        check.call("all_reduce premul", comm_func.all_reduce, inputs[check.rank], op, want=total)
        if 6 % check.size == 0:
            n = 6 // check.size
            want = total[check.rank * n : (check.rank + 1) * n]
            function = comm_func.reduce_scatter_tensor
            check.call("reduce_scatter premul", function, inputs[check.rank], op, want=want)
        return check.complaints


def _run(pool, function, kind, folder):
    lines = [f"rank {rank}: {line}" for rank, found in enumerate(pool.run(function, kind, folder)) for line in found]
    assert not lines, "\n".join(lines[:12])


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_reductions(pool, size, kind, tmp_path):
    _run(pool, _reductions, kind, str(tmp_path))


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_moves(pool, size, kind, tmp_path):
    _run(pool, _moves, kind, str(tmp_path))


@pytest.mark.parametrize("kind", ["Group", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_strided_inputs(pool, size, kind, tmp_path):
    _run(pool, _strided, kind, str(tmp_path))


@pytest.mark.parametrize("kind", ["Group", "gloo"])
@pytest.mark.parametrize("size", [2])
def test_premultiplied_sum(pool, size, kind, tmp_path):
    _run(pool, _premul, kind, str(tmp_path))
