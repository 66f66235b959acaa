"""MindSpore itself: unisono.mindspore.comm_func on real mindspore.Tensors, sync, async, by group and with gradients."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import torch
import torch.distributed as dist
from mindspore import ops

import unisono
from tests.clients.case import Case
from unisono.mindspore import comm_func
from unisono.mindspore.tensors import from_torch, to_torch

ENVIRONMENT = "mindspore"
REQUIREMENTS = ["mindspore==2.10.0", "numpy<2", "scipy<1.17"]
SHOWN = ["mindspore"]
RANKS = (2, 3)

#: MindSpore's own functions that take tensors, before ours are in their place.
THEIRS = {
    name: getattr(ms.communication.comm_func, name) for name in comm_func.__all__
    if hasattr(getattr(comm_func, name), "__wrapped__") and hasattr(ms.communication.comm_func, name)
}  # fmt: skip


def _tensor(*shape: int, dtype: Any = np.float32) -> Any:
    """Element i of rank r: i + 10 r."""
    return ms.Tensor((np.arange(np.prod(shape)) + 10 * dist.get_rank()).reshape(shape).astype(dtype))


def _plain(value: Any) -> Any:
    """What is compared and saved: copies as torch tensors."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value if one is not None]
    assert isinstance(value, ms.Tensor), type(value)
    return to_torch(value).clone()


def documents(case: Case) -> Any:
    """The calls of the two pages that compare torch.distributed with MindSpore."""
    case.begin()
    comm = comm_func.GlobalComm.WORLD_COMM_GROUP
    size = dist.get_world_size()
    x = _tensor(2 * size, 4)
    total, handle = comm_func.all_reduce(x, op=ops.ReduceOp.SUM, group=comm, async_op=False)
    assert handle is None and total.shape == x.shape and total.dtype == x.dtype
    expected = sum(np.arange(8 * size).reshape(2 * size, 4) + 10 * r for r in range(size))
    assert (total.asnumpy() == expected).all()
    later, handle = comm_func.all_reduce(x, op=ops.ReduceOp.MAX, group=comm, async_op=True)
    assert isinstance(handle, ms.communication.comm_func.CommHandle)
    handle.wait()
    part, handle = comm_func.reduce_scatter_tensor(x, op=ops.ReduceOp.SUM, group=None, async_op=False)
    assert handle is None and (part.asnumpy() == np.split(expected, size)[dist.get_rank()]).all()
    apart, handle = comm_func.reduce_scatter_tensor(x, async_op=True)
    handle.wait()
    big = ms.Tensor(np.ones((1024, 1024), np.float32))
    case.time(lambda: comm_func.all_reduce(big))
    return _plain([total, later, part, apart, x])


def verbs(case: Case) -> Any:
    """Every other function, on tensors that MindSpore computed, transposed, empty and of many dtypes."""
    case.begin()
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, theirs in THEIRS.items():
        ours = list(inspect.signature(getattr(comm_func, name)).parameters)
        assert ours == list(inspect.signature(theirs).parameters), (name, ours)
    found: list[Any] = []
    floats = (ms.float32, ms.float16, ms.bfloat16, ms.float64)
    for dtype in (*floats, ms.int32, ms.int64, ms.uint8, ms.bool_, ms.complex64):
        x = _tensor(size, 2).astype(dtype)
        found.append(comm_func.all_gather_into_tensor(x)[0])
        assert found[-1].dtype == dtype, (found[-1].dtype, dtype)
        if dtype not in (ms.bool_, ms.complex64):
            found.append(comm_func.reduce_scatter_tensor(x, "max")[0])
    splits = [1 + r for r in range(size)]
    mine = _tensor(1 + rank, 3)
    whole, _ = comm_func.all_gather_into_tensor_uneven(mine, splits)
    back, handle = comm_func.reduce_scatter_tensor_uneven(whole, splits, async_op=True)
    handle.wait()
    assert (back.asnumpy() == size * mine.asnumpy()).all()
    computed = ops.matmul(_tensor(3, 300), _tensor(300, 3))  # MindSpore computes in a thread of its own
    found += [whole, back, comm_func.broadcast(computed, 1), comm_func.all_reduce(_tensor(3, 4).T)[0]]
    found += [comm_func.reduce(_tensor(4), 0), comm_func.gather_into_tensor(_tensor(2, 2), 1)]
    found += [comm_func.scatter_tensor(_tensor(2 * size, 2), 0), comm_func.all_reduce(_tensor(0, 3))[0]]
    found += comm_func.all_to_all_with_output_shape([(2,)] * size, [_tensor(2)] * size)[0]
    found.append(comm_func.all_to_all_single_with_output_shape((size, 2), _tensor(size, 2))[0])
    to, source = (rank + 1) % size, (rank - 1) % size
    got = comm_func.batch_isend_irecv(
        [comm_func.P2POp("isend", _tensor(3), to), comm_func.P2POp("irecv", (3,), source, recv_dtype=ms.float32)]
    )
    found.append(got[1])
    sent = comm_func.isend(_tensor(5), to)
    received, handle = comm_func.irecv(_tensor(5), source)
    handle.wait(), sent.wait()
    found.append(received)
    members = list(range(size - 1, -1, -1))
    comm_func.create_group(f"backwards {case.backend}", members)
    found.append(comm_func.all_gather_into_tensor(_tensor(1), f"backwards {case.backend}")[0])
    comm_func.barrier()
    return _plain(found)


def memory(case: Case) -> Any:
    """No copies: inputs are read where MindSpore has them, and results are the group's own shared memory."""
    case.begin()
    x = _tensor(300, 300)  # small calls may copy, whatever the memory
    assert to_torch(x).data_ptr() == x.data_ptr()
    total, _ = comm_func.all_reduce(x)
    assert from_torch(to_torch(total)).data_ptr() == total.data_ptr()
    if case.backend == "unisono":
        assert unisono.is_shared(to_torch(total))
        group = dist.group.WORLD.unisono_group
        before = group.staged_bytes
        comm_func.all_reduce(total)
        assert group.staged_bytes == before
    try:
        comm_func.all_reduce(torch.ones(2))
    except TypeError as error:
        assert "mindspore.Tensor" in str(error)
    else:
        raise AssertionError("torch's tensors are taken")
    return _plain(total)


def gradients(case: Case) -> Any:
    """Of the sum of all ranks' losses, in PyNative mode."""
    case.begin()
    size = dist.get_world_size()

    def loss(x: Any, w: Any) -> Any:
        y, _ = comm_func.all_reduce(x * w)
        z, handle = comm_func.all_gather_into_tensor(x, async_op=True)
        handle.wait()
        part, _ = comm_func.reduce_scatter_tensor(ops.concat([x * w] * size))
        return (y * y).sum() + (z * ops.concat([w] * size)).sum() + (part * x).sum()

    x, w = _tensor(3, 2), _tensor(3, 2) + 1
    value, found = ms.value_and_grad(loss, (0, 1))(x, w)
    step = 1e-2  # the loss of all ranks together, changed in one element of rank 0
    changed = []
    for sign in (1, -1):
        moved = x.asnumpy().copy()
        moved[1, 0] += sign * step * (dist.get_rank() == 0)
        total, _ = comm_func.all_reduce(loss(ms.Tensor(moved), w))
        changed.append(float(total.asnumpy()))
    slope = (changed[0] - changed[1]) / (2 * step)
    if dist.get_rank() == 0:
        assert abs(float(found[0].asnumpy()[1, 0]) - slope) < 0.02 * abs(slope), (found[0], slope)
    return _plain([value, *found])


SCRIPT = """
import sys
import mindspore as ms
import numpy as np
import mindspore.communication as comm
from mindspore.communication import get_group_size, get_rank, init

init(*sys.argv[2:])
x = ms.Tensor(np.ones([2 * get_group_size(), 8]).astype(np.float32) + get_rank())
found = [comm.comm_func.all_reduce(x)[0], comm.comm_func.reduce_scatter_tensor(x)[0]]
found.append(comm.comm_func.all_gather_into_tensor(x)[0])
np.savez(f"{sys.argv[1]}/{get_rank()}.npz", *[one.asnumpy() for one in found])
"""


def script(case: Case) -> Any:
    """A script for MindSpore, as it is, by ``python -m unisono.mindspore``: another process for each rank."""
    case.begin()
    rank, size = dist.get_rank(), dist.get_world_size()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        told = [tempfile.mkdtemp(), str(free.getsockname()[1])]
    dist.broadcast_object_list(told)
    path = Path(told[0]) / f"script{rank}.py"
    path.write_text(SCRIPT)
    environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=told[1], TORCHELASTIC_USE_AGENT_STORE="False")
    command = [sys.executable, "-m", "unisono.mindspore", str(path), told[0]]
    subprocess.run(command + ["gloo"] * (case.backend == "gloo"), env=environment, check=True)
    with np.load(Path(told[0]) / f"{rank}.npz") as saved:
        found = [torch.from_numpy(saved[name]) for name in saved.files]
    assert (found[0] == size * (size + 1) / 2).all() and found[2].shape == (2 * size * size, 8)
    return found


CASES = {
    "all_reduce and reduce_scatter_tensor of MindSpore's pages; 4 MiB": documents,
    "every function of comm_func": verbs,
    "memory": memory,
    "gradients in PyNative mode": gradients,
    "a script, by python -m unisono.mindspore": script,
}
