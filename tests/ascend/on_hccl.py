"""What a script may expect of groups of backend hccl, one function each; two ranks run each of them together."""

import contextlib
import gc
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono

from .on_npu import expect, same


@contextlib.contextmanager
def default_group(group, backend, folder):
    """torch's default group on a backend, among the ranks of `group`, each with its own device."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    number = torch.tensor([int.from_bytes(os.urandom(4), "little")])
    group.broadcast(number, 0)
    store = dist.FileStore(f"{folder}/store-{int(number)}", group.size)
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        gc.collect()


def npu(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).npu()


# -- torch.distributed


def collectives(rank):
    one = rank + 1.0
    x = npu(one, 10 * one)
    assert x.device.index == rank
    dist.all_reduce(x)
    same(x, torch.tensor([3.0, 30.0]))
    x = npu(one, 10 * one)
    work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert work.is_completed()
    same(x, torch.tensor([2.0, 20.0]))
    x = npu(one)
    dist.broadcast(x, 1)
    same(x, torch.tensor([2.0]))
    dist.reduce(x, 0)
    assert x.item() == (4.0 if rank == 0 else 2.0)
    parts = [torch.zeros(2, device="npu") for _ in range(2)]
    dist.all_gather(parts, npu(one, -one))
    same(torch.cat(parts), torch.tensor([1.0, -1.0, 2.0, -2.0]))
    whole = torch.zeros(4, device="npu")
    dist.all_gather_into_tensor(whole, npu(one, -one))
    same(whole, torch.tensor([1.0, -1.0, 2.0, -2.0]))
    part = torch.zeros(2, device="npu")
    dist.reduce_scatter_tensor(part, whole)
    same(part, torch.tensor([2.0, -2.0]) * one)
    dist.reduce_scatter(part, [npu(1.0, 2.0), npu(3.0, 4.0)])
    same(part, torch.tensor([[2.0, 4.0], [6.0, 8.0]])[rank])
    out = torch.zeros(2, device="npu")
    dist.all_to_all_single(out, npu(one, 10 * one))
    same(out, torch.tensor([[1.0, 2.0], [10.0, 20.0]])[rank])
    outs = [torch.zeros(1, device="npu") for _ in range(2)]
    dist.all_to_all(outs, [npu(one), npu(10 * one)])
    same(torch.cat(outs), torch.tensor([[1.0, 2.0], [10.0, 20.0]])[rank])
    got = [torch.zeros(1, device="npu") for _ in range(2)] if rank == 0 else None
    dist.gather(npu(one), got, 0)
    if got is not None:
        same(torch.cat(got), torch.tensor([1.0, 2.0]))
    mine = torch.zeros(1, device="npu")
    dist.scatter(mine, [npu(5.0), npu(6.0)] if rank == 1 else None, 1)
    assert mine.item() == 5.0 + rank
    dist.barrier()
    dist.barrier(device_ids=[rank])
    # A view in the middle of a tensor is written where it is.
    x = torch.zeros(4, device="npu")
    dist.all_reduce(x[1:3].fill_(one))
    same(x, torch.tensor([0.0, 3.0, 3.0, 0.0]))
    # So are tensors with gaps, sync and async.
    x = torch.zeros(2, 3, device="npu")
    dist.all_reduce(x[:, 1].fill_(one))
    same(x, torch.tensor([[0.0, 3.0, 0.0]] * 2))
    work = dist.all_reduce(x.t()[1], async_op=True)
    work.wait()
    same(x, torch.tensor([[0.0, 6.0, 0.0]] * 2))
    (output,) = work.result()
    assert output.device.index == rank


def messages(rank):
    peer = 1 - rank
    if rank == 0:
        dist.send(npu(7.0), 1)
    else:
        x = torch.zeros(1, device="npu")
        assert dist.recv(x) == 0
        same(x, torch.tensor([7.0]))
    x = torch.zeros(2, device="npu")
    works = [dist.isend(npu(1.0, float(rank)), peer), dist.irecv(x, peer)]
    for work in works:
        work.wait()
    same(x, torch.tensor([1.0, float(peer)]))
    ops = [dist.P2POp(dist.isend, npu(float(rank)), peer), dist.P2POp(dist.irecv, x[:1], peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert x[0].item() == peer


def objects(rank):
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank, "device": torch.npu.current_device()})
    assert objects == [{"rank": r, "device": r} for r in range(2)]
    words = ["a", 1] if rank == 0 else [None, None]
    dist.broadcast_object_list(words, src=0)
    assert words == ["a", 1]
    words = [None]
    dist.scatter_object_list(words, ["x", "y"] if rank == 0 else None, src=0)
    assert words == ["xy"[rank]]
    gathered = [None, None] if rank == 1 else None
    dist.gather_object(rank, gathered, dst=1)
    assert gathered in (None, [0, 1])


def the_group(rank):
    world = dist.group.WORLD
    assert dist.get_backend() == "hccl"
    assert dist.is_hccl_available()
    assert dist.get_backend_config() == "npu:hccl"
    backend = world._get_backend(torch.device("npu"))
    name = backend.get_hccl_comm_name(rank)
    names = [None, None]
    dist.all_gather_object(names, name)
    assert isinstance(name, str)
    assert names[0] == names[1]
    expect(ValueError, "must be this process's rank", backend.get_hccl_comm_name, 1 - rank)
    expect(RuntimeError, "No backend type associated with device type cpu", dist.all_reduce, torch.ones(1))
    expect(RuntimeError, "No backend type associated with device type cpu", world._get_backend, torch.device("cpu"))
    expect(NotImplementedError, "ProcessGroupHCCL.get_hccl_comm is not emulated", lambda: backend.get_hccl_comm(0))
    alone = dist.new_group([1], backend="hccl")
    if rank == 1:
        x = npu(4.0)
        dist.all_reduce(x, group=alone)
        assert x.item() == 4.0
        own = alone._get_backend(torch.device("npu"))
        assert own.get_hccl_comm_name(1) == own.get_hccl_comm_name(0) != name  # global rank, group rank
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": 200}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both = dist.new_group([0, 1], backend="hccl", pg_options=options)
    assert any("hccl_config changes nothing" in str(w.message) for w in caught)
    x = npu(1.0)
    dist.all_reduce(x, group=both)
    assert x.item() == 2.0


def reinit(rank):
    import torch_npu

    x = npu(1.0)
    dist.all_reduce(x)
    name = dist.group.WORLD.get_hccl_comm_name(rank)
    assert torch_npu.distributed.reinit_process_group(rebuild_link=False) is None
    assert torch_npu.distributed.reinit_process_group() is dist.group.WORLD
    dist.all_reduce(x)
    assert x.item() == 4.0
    total = unisono.matmul_all_reduce(torch.ones(1, 1), torch.ones(1, 1), name)  # an old name still finds the group
    assert total.item() == 2.0
    with contextlib.suppress(unisono.UnisonoError):
        if rank == 1:
            dist.send(x, 0)  # it is through with all before
        else:
            dist.recv(x, 1)
            dist.group.WORLD.unisono_group.abort("test")
        dist.all_reduce(x)
    dist.reinit_process_group()
    x.fill_(1)
    dist.all_reduce(x)
    assert x.item() == 2.0


# -- torch_npu.distributed


def uneven(rank):
    import torch_npu

    rows, mine = [1, 3], rank * 2 + 1
    x = torch.arange(8.0).reshape(4, 2).npu() * (rank + 1)
    part = torch.zeros(mine, 2, device="npu")
    assert torch_npu.distributed.reduce_scatter_tensor_uneven(part, x, rows) is None
    expected = torch.arange(8.0).reshape(4, 2).mul(3).split(rows)[rank]
    same(part, expected)
    work = torch_npu.distributed.reduce_scatter_tensor_uneven(
        part, x, input_split_sizes=torch.tensor(rows).npu(), op=dist.ReduceOp.MAX, async_op=True
    )
    work.wait()
    same(part, torch.arange(8.0).reshape(4, 2).mul(2).split(rows)[rank])
    (output,) = work.result()
    assert output is part
    (in_future,) = work.get_future().wait()
    assert in_future.device == part.device
    whole = torch.zeros(4, 2, device="npu")
    torch_npu.distributed.all_gather_into_tensor_uneven(whole, part, rows)
    same(whole, torch.arange(8.0).reshape(4, 2).mul(2))
    counts = [[1, 2], [0, 1]]
    out = torch.zeros(sum(row[rank] for row in counts), device="npu")
    torch_npu.distributed.all_to_all_vc(out, [npu(1.0, 2.0, 3.0), npu(4.0)][rank], counts)
    same(out, [torch.tensor([1.0]), torch.tensor([2.0, 3.0, 4.0])][rank])
    # Inputs that require grad are taken as they are, and get none.
    weight = torch.ones(4, 2, device="npu", requires_grad=True)
    torch_npu.distributed.reduce_scatter_tensor_uneven(part, weight * 1, rows)
    assert not part.requires_grad
    for text, splits in (
        ("Number of tensor splits not equal to group size", [4]),
        ("Split sizes doesn't match total dim 0 size", [1, 2]),
    ):
        expect(RuntimeError, text, torch_npu.distributed.reduce_scatter_tensor_uneven, part, x, splits)
        expect(RuntimeError, text, torch_npu.distributed.all_gather_into_tensor_uneven, whole, part, splits)
    other = torch.zeros(4, 2, device=f"npu:{1 - rank}")
    expect(RuntimeError, "two devices", torch_npu.distributed.all_gather_into_tensor_uneven, other, part, rows)


# -- operators


def _matrices(rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(6, 4, generator=generator).to(dtype)
    w = torch.randn(4, 3, generator=generator).to(dtype)
    return x, w


def fused(rank):
    import torch_npu

    hcom = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        pairs = [_matrices(r, dtype) for r in range(2)]
        x, w = pairs[rank][0].npu(), pairs[rank][1].npu()
        total = sum(a.double() @ b.double() for a, b in pairs)

        def close(got, want, dtype=dtype):
            assert got.device == torch.device("npu", rank)
            assert got.dtype is dtype
            torch.testing.assert_close(got.detach().cpu().double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)

        bias, x3 = torch.tensor([1.0, 2.0, 3.0], dtype=dtype), torch.full((6, 3), 0.5, dtype=dtype)
        close(torch_npu.npu_mm_all_reduce_base(x, w, hcom), total)
        close(torch_npu.npu_mm_all_reduce_base(x, w, hcom, bias=bias.npu()), total + 2 * bias.double())
        first = bias.npu() if rank == 0 else None
        close(torch_npu.npu_mm_all_reduce_base(x, w, hcom, bias=first), total + bias.double())
        close(torch_npu.npu_mm_all_reduce_base(x, w, hcom, x3=x3.npu()), total + 1.0)
        close(torch_npu.npu_mm_all_reduce_base(x.reshape(2, 3, 4), w, hcom), total.reshape(2, 3, 3))
        close(torch_npu.npu_mm_reduce_scatter_base(x, w, hcom, 2), total.chunk(2)[rank])
        gathered = torch.cat([a for a, _ in pairs])
        product, everyone = torch_npu.npu_all_gather_base_mm(x, w, hcom, 2, bias=bias.npu())
        close(product, gathered.double() @ pairs[rank][1].double() + bias.double())
        same(everyone, gathered)
        product, nothing = torch_npu.npu_all_gather_base_mm(x, w, hcom, world_size=2, gather_output=False)
        close(product, gathered.double() @ pairs[rank][1].double())
        assert nothing.numel() == 0
        from mindspeed.ops.npu_grouped_mat_mul_all_reduce import npu_grouped_mat_mul_all_reduce

        ys = npu_grouped_mat_mul_all_reduce([x, x[:2]], [w, w], hcom, bias=[])
        close(ys[0], total)
        close(ys[1], total[:2])
        (y,) = npu_grouped_mat_mul_all_reduce([x], [w, w], hcom, group_list=[2, 6], split_item=3, bias=[bias.npu()] * 2)
        close(y, total + bias.double())
    x, w = (t.npu().requires_grad_() for t in _matrices(rank))
    torch_npu.npu_mm_all_reduce_base(x, w, hcom).sum().backward()
    same(x.grad, (2.0 * torch.ones(6, 3)) @ _matrices(rank)[1].t())
    for argument, mode in (
        ("antiquant_scale", "weight-only quantization"),
        ("dequant_scale", "full quantization"),
        ("pertoken_scale", "per-token quantization"),
        ("comm_quant_scale_1", "quantized communication"),
    ):
        text = f"torch_npu.npu_mm_all_reduce_base({argument}=…), its {mode} mode, is not emulated"
        expect(NotImplementedError, text, torch_npu.npu_mm_all_reduce_base, x, w, hcom, **{argument: w})
    text = "torch_npu.npu_mm_reduce_scatter_base(x2_scale=…), its per-channel quantization mode"
    expect(NotImplementedError, text, torch_npu.npu_mm_reduce_scatter_base, x, w, hcom, 2, x2_scale=w)
    text = "torch_npu.npu_all_gather_base_mm with torch.int8, its quantized mode"
    expect(NotImplementedError, text, torch_npu.npu_all_gather_base_mm, x.to(torch.int8), w.to(torch.int8), hcom, 2)
    text = "'world_size' must be the size of the group, 2, got 4"
    expect(ValueError, text, torch_npu.npu_mm_reduce_scatter_base, x, w, hcom, 4)
    expect(ValueError, "no group is named 'nobody'", torch_npu.npu_mm_all_reduce_base, x, w, "nobody")


# -- what stands on torch.distributed


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def data_parallel(rank):
    model = DistributedDataParallel(_model().npu(), device_ids=[rank], output_device=rank, broadcast_buffers=True)
    twin = _model()
    data = [torch.randn(3, 4, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    model(data[rank].npu()).pow(2).mean().backward()
    torch.stack([twin(d).pow(2).mean() for d in data]).mean().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.grad.device.index == rank
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-5, atol=1e-7)
    with model.no_sync():
        model(data[rank].npu()).sum().backward()


def functional_and_mesh(rank):
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x = functional.all_reduce(npu(1.0 + rank), "sum", [0, 1])
    same(functional.wait_tensor(x), torch.tensor([3.0]))
    mesh = init_device_mesh("npu", (2,))
    whole = torch.arange(8.0).reshape(4, 2).npu()
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    same(sharded.to_local(), torch.arange(8.0).reshape(4, 2).chunk(2)[rank])
    same((sharded * 2).full_tensor(), whole.cpu() * 2)
    columns = distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)])
    same((sharded @ columns).full_tensor(), whole.cpu() @ whole.cpu().t())


def fully_sharded(rank):
    from torch.distributed.fsdp import fully_shard

    model, twin = _model().npu(), _model()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    data = [torch.randn(3, 4, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    for _ in range(2):
        model(data[rank].npu()).pow(2).mean().backward()
        torch.stack([twin(d).pow(2).mean() for d in data]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor().detach().cpu(), b.detach(), rtol=1e-4, atol=1e-6)


def both_kinds_of_tensors(rank):
    assert {d.type for d in dist.group.WORLD._device_types} == {"cpu", "npu"}
    for x in (npu(1.0 + rank), torch.tensor([1.0 + rank])):
        dist.all_reduce(x)
        assert x.item() == 3.0
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    assert objects == [0, 1]


# -- MindSpore


def mindspore_names(rank):
    import mindspore.communication as comm
    from mindspore import mint
    from mindspore.communication import GlobalComm, create_group, get_group_size, get_rank, init
    from mindspore.ops import ReduceOp
    from mindspore.ops import communication as functions

    init()
    assert (get_rank(), get_group_size()) == (rank, 2)
    one = rank + 1.0
    for make in (npu, lambda *values: torch.tensor(values)):
        x = make(one, 10 * one)
        for module in (comm.comm_func, functions):
            total, handle = module.all_reduce(x, ReduceOp.SUM, GlobalComm.WORLD_COMM_GROUP)
            assert handle is None
            assert total.device == x.device
            assert total.tolist() == [3.0, 30.0]
            assert x.tolist() == [one, 10 * one]
        part, _ = comm.comm_func.reduce_scatter_tensor(x)
        assert part.tolist() == [[3.0], [30.0]][rank]
        whole, handle = comm.comm_func.all_gather_into_tensor(x, async_op=True)
        handle.wait()
        assert handle.result() is whole
        assert whole.tolist() == [1.0, 10.0, 2.0, 20.0]
        uneven, _ = comm.comm_func.all_gather_into_tensor_uneven(x[: rank + 1], [1, 2])
        assert uneven.tolist() == [1.0, 2.0, 20.0]
        assert comm.comm_func.broadcast(x, 1).tolist() == [2.0, 20.0]
        ops = [comm.comm_func.P2POp("isend", x, 1 - rank), comm.comm_func.P2POp("irecv", x, 1 - rank)]
        assert comm.comm_func.batch_isend_irecv(ops)[1].tolist() == [2.0 - rank, 10 * (2.0 - rank)]
    weight = npu(one).requires_grad_()
    comm.comm_func.all_reduce(weight * 2)[0].sum().backward()
    assert weight.grad.tolist() == [4.0]
    create_group("pair", [1, 0])
    assert comm.get_rank("pair") == 1 - rank
    total, _ = comm.comm_func.all_reduce(npu(one), "max", "pair")
    assert total.tolist() == [2.0]
    x = npu(one)
    mint.distributed.all_reduce(x, "sum", "pair")
    assert x.tolist() == [3.0]
    handle = mint.distributed.all_reduce(x, op=ReduceOp.MAX, async_op=True)
    handle.wait()
    whole = torch.zeros(2, device="npu")
    mint.distributed.all_gather_into_tensor(whole, npu(one), group="pair")
    assert whole.tolist() == [2.0, 1.0]
    mint.distributed.all_gather_into_tensor_uneven(whole, npu(one), [1, 1], "pair")
    assert whole.tolist() == [2.0, 1.0]
    everyone = mint.distributed.new_group([0, 1])
    assert isinstance(everyone, str)
    mint.distributed.barrier(everyone)
    assert mint.distributed.get_world_size(everyone) == 2
    x = torch.zeros(1, device="npu")
    ops = [
        mint.distributed.P2POp(mint.distributed.isend, npu(one), 1 - rank),
        mint.distributed.P2POp("irecv", x, 1 - rank),
    ]
    for work in mint.distributed.batch_isend_irecv(ops):
        work.wait()
    assert x.item() == 2.0 - rank
    comm.destroy_group("pair")
    expect(AttributeError, "mindspore.communication.comm_func.no_such", lambda: comm.comm_func.no_such)
    expect(TypeError, "For all_reduce, the input tensor must be tensor", comm.comm_func.all_reduce, [1.0])


PROBES = [
    collectives, messages, objects, the_group, reinit, uneven, fused, data_parallel, functional_and_mesh, fully_sharded,
    mindspore_names,
]  # fmt: skip
