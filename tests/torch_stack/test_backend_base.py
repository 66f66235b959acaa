"""The two bases that torch offers to Python: ProcessGroup, and since 2.14 Backend, with the same body under both."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.torch_stack.worlds import world
from unisono.group import names as groups
from unisono.torch_backend import adapter as torch_face

can_combine = pytest.mark.skipif(not groups.PYTHON_BACKENDS, reason="torch has no Backend for Python before 2.14")


class Inheritable:
    def __init__(self, rank: int, size: int) -> None:
        assert (rank, size) == (0, 1)


class WithoutConstructor:
    """As torch 2.13's Backend: a class that Python may name but not make."""

    def __init__(self, *_: object) -> None:
        raise TypeError("Probe: No constructor defined!")


def test_the_switch_looks_at_what_torch_can():
    assert groups.can_be_inherited(Inheritable)
    assert not groups.can_be_inherited(WithoutConstructor)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert (version >= (2, 14)) == groups.PYTHON_BACKENDS


# What PyBackend of torch 2.14 looks up by name, and with which positional arguments.
CALLED_BY_CPP = {
    "broadcast": 2,
    "allreduce": 2,
    "allreduce_sparse": 2,
    "allreduce_coalesced": 2,
    "reduce": 2,
    "allgather": 3,
    "all_gather_single": 3,
    "allgather_coalesced": 3,
    "all_gather_single_coalesced": 3,
    "gather": 3,
    "scatter": 3,
    "reduce_scatter": 3,
    "reduce_scatter_single": 3,
    "reduce_scatter_single_coalesced": 3,
    "all_to_all_single": 5,
    "alltoall": 3,
    "monitored_barrier": 2,
    "_set_sequence_number_for_group": 0,
    "_get_sequence_number_for_group": 0,
    "send": 3,
    "recv": 3,
    "recv_anysource": 2,
    "barrier": 1,
    "_wait_for_pending_works": 0,
    "_set_group_name": 1,
    "allocate_tensor": 3,
    "supports_tensor_alloc": 1,
    "set_timeout": 1,
    "getBackendName": 0,
    "abort": 0,
    "shutdown": 0,
}


@pytest.mark.parametrize("name", CALLED_BY_CPP)
def test_the_body_has_what_a_backend_is_asked_for(name):
    import inspect

    inspect.signature(getattr(torch_face.ProcessGroupAdapter, name)).bind(None, *range(CALLED_BY_CPP[name]))


def inside_of_a_cpp_group(group) -> list[str]:
    """A group with unisono for CPU tensors and gloo for another device; every call goes through torch's C++."""
    wrong = []

    def expect(what: str, got: object, want: object) -> None:
        if got != want:
            wrong.append(f"{what}: {got} instead of {want}")

    with world(group, "cpu:unisono,cuda:gloo") as pg:
        rank, size = dist.get_rank(), dist.get_world_size()
        native = groups.native(pg)
        expect("native", (type(native), native.rank, native.size), (unisono.Group, rank, size))
        expect("face", type(groups.adapter_of(pg)).__name__, "BackendUnisono")
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x)
        expect("all_reduce", x.tolist(), [10.0] * 3)
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        expect("AVG", x.tolist(), [2.5] * 3)
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future().then(lambda f: f.value()[0] + 1)
        work.wait()
        expect("async", future.wait().tolist(), [11.0] * 3)
        gathered = torch.empty(size * 2)
        dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)))
        expect("all_gather", gathered.tolist(), [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0])
        lists = [torch.empty(r + 1) for r in range(size)]
        dist.all_gather(lists, torch.full((rank + 1,), float(rank)))
        expect("lists", [part.tolist() for part in lists], [[float(r)] * (r + 1) for r in range(size)])
        scattered = torch.empty(2)
        dist.reduce_scatter_tensor(scattered, torch.arange(8.0))
        expect("reduce_scatter", scattered.tolist(), [8.0 * rank, 8.0 * rank + 4])
        swapped = torch.empty(size)
        dist.all_to_all_single(swapped, torch.arange(4.0) + 10 * rank)
        expect("all_to_all", swapped.tolist(), [10.0 * r + rank for r in range(size)])
        told = torch.full((2,), float(rank))
        dist.broadcast(told, 2)
        expect("broadcast", told.tolist(), [2.0, 2.0])
        at_one = torch.full((2,), rank + 1.0)
        dist.reduce(at_one, 1)
        expect("reduce", at_one.tolist(), [10.0 if rank == 1 else rank + 1.0] * 2)
        got = torch.empty(2)
        sending = dist.isend(torch.full((2,), float(rank)), (rank + 1) % size)
        dist.recv(got, (rank - 1) % size)
        sending.wait()
        expect("recv", got.tolist(), [float((rank - 1) % size)] * 2)
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        expect("objects", objects, [{"rank": r} for r in range(size)])
        sparse = torch.eye(4).to_sparse()
        dist.all_reduce(sparse)
        expect("sparse", sparse.to_dense().tolist(), (torch.eye(4) * 4).tolist())
        with dist._coalescing_manager():
            for tensor in (told, at_one):
                dist.all_reduce(tensor)
        expect("coalesced", told.tolist(), [8.0, 8.0])
        unisono.monitored_barrier()
        dist.barrier()
        try:
            dist.all_reduce(torch.ones(2 + rank % 2))
            wrong.append("no MismatchError")
        except unisono.MismatchError:
            pass
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        expect("DDP", model.module.bias.grad.tolist(), [1.0, 1.0])
        expect("DDP", model.module.weight.grad.tolist(), [[2.5] * 3] * 2)
        backend = pg._get_backend(torch.device("cpu"))
        made = backend.allocate_tensor(5, dtype=torch.float32, device=torch.device("cpu"))
        expect("shared", unisono.is_shared(made), True)
    return wrong


@can_combine
def test_one_of_several_backends(stack_pool, stack):
    assert stack_pool.run(inside_of_a_cpp_group) == [[]] * 4
