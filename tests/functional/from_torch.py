"""The rows P of docs/migration.md: comm_func gives what torch.distributed gives."""

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.functional.rows import WORLD, same
from unisono import comm_func


def old(name, *arguments, **options):
    """A function of torch.distributed, without its remark that it was renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(dist, name)(*arguments, **options)


def p1(r):
    written = r.x.clone()
    dist.all_reduce(written)
    before = r.x.clone()
    out, _ = comm_func.all_reduce(r.x)
    same(out, written)
    same(r.x, before)


def p2(r):
    for op, name in (("SUM", "sum"), ("PRODUCT", "prod"), ("MIN", "min"), ("MAX", "max")):
        written = r.x.clone()
        dist.all_reduce(written, getattr(dist.ReduceOp, op))
        same(comm_func.all_reduce(r.x, name)[0], written)
        same(comm_func.all_reduce(r.x, getattr(dist.ReduceOp, op))[0], written)
    for op in ("avg", dist.ReduceOp.AVG):
        same(comm_func.all_reduce(r.x, op)[0], (r.x + r.other) / 2)
    premul = dist._make_nccl_premul_sum(0.5)
    same(comm_func.all_reduce(r.x, premul)[0], (r.x + r.other) / 2)
    bits = torch.tensor([1, 2, 6])
    same(comm_func.all_reduce(bits + r.rank, dist.ReduceOp.BAND)[0], bits & (bits + 1))


def p3(r):
    made = dist.new_group([0, 1])
    comm_func.create_group("p3", [0, 1])
    for group in (None, made, dist.group.WORLD, made.group_name, WORLD, "p3"):
        same(comm_func.all_reduce(r.x, group=group)[0], r.x + r.other)
    own = getattr(dist.group.WORLD, "unisono_group", None)
    if own is not None:
        same(comm_func.all_reduce(r.x, group=own)[0], r.x + r.other)
    comm_func.destroy_group("p3")
    dist.destroy_process_group(made)


def p4(r):
    written = r.x.clone()
    work = dist.all_reduce(written, async_op=True)
    out, handle = comm_func.all_reduce(r.x, async_op=True)
    work.wait()
    handle.wait()
    same(out, written)


def p5(r):
    assert dist.all_reduce(r.x.clone()) is None
    out, handle = comm_func.all_reduce(r.x)
    assert isinstance(out, torch.Tensor) and handle is None
    out, handle = comm_func.all_reduce(r.x, async_op=True)
    assert isinstance(handle, unisono.Handle) and handle.result() is out


def p6(r):
    output = torch.empty(2, 2)
    dist.reduce_scatter(output, list(r.x.chunk(2)))
    same(comm_func.reduce_scatter_tensor(r.x)[0], output)
    assert "output" not in inspect.signature(comm_func.reduce_scatter_tensor).parameters


def p7(r):
    pieces = [torch.full((3,), r.rank + 1.0), torch.full((3,), r.rank + 5.0)]
    output = torch.empty(3)
    dist.reduce_scatter(output, pieces)
    same(comm_func.reduce_scatter_tensor(torch.cat(pieces))[0], output)
    with pytest.raises(ValueError, match="must be divided by 'rank_size'"):
        comm_func.reduce_scatter_tensor(torch.ones(3))


def p8(r):
    for op, name in ((dist.ReduceOp.MAX, "max"), (dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.PRODUCT, "prod")):
        output = torch.empty(2, 2)
        dist.reduce_scatter(output, list(r.x.chunk(2)), op)
        same(comm_func.reduce_scatter_tensor(r.x, name)[0], output)
        same(comm_func.reduce_scatter_tensor(r.x, op)[0], output)


def p9(r):
    made = dist.new_group([0, 1])
    want = (r.x + r.other)[2 * r.rank : 2 * r.rank + 2]
    for group in (None, made, WORLD, made.group_name):
        same(comm_func.reduce_scatter_tensor(r.x, group=group)[0], want)
    dist.destroy_process_group(made)


def p10(r):
    output = torch.empty(2, 2)
    work = dist.reduce_scatter(output, list(r.x.chunk(2)), async_op=True)
    out, handle = comm_func.reduce_scatter_tensor(r.x, async_op=True)
    work.wait()
    handle.wait()
    same(out, output)


def p11(r):
    out, handle = comm_func.reduce_scatter_tensor(r.x)
    assert out.shape == (2, 2) and handle is None
    assert isinstance(comm_func.reduce_scatter_tensor(r.x, async_op=True)[1].result(), torch.Tensor)


def p12(r):
    output = torch.empty(2, 2)
    old("reduce_scatter_tensor", output, r.x, dist.ReduceOp.MIN)
    same(comm_func.reduce_scatter_tensor(r.x, "min")[0], output)


def p13(r):
    outputs, output = [torch.empty(4, 2), torch.empty(4, 2)], torch.empty(8, 2)
    dist.all_gather(outputs, r.x)
    old("all_gather_into_tensor", output, r.x)
    out, _ = comm_func.all_gather_into_tensor(r.x)
    same(out, output)
    for mine, theirs in zip(out.chunk(2), outputs, strict=True):
        same(mine, theirs)


def p14(r):
    out, _ = comm_func.all_gather_into_tensor(torch.tensor(r.rank))
    assert out.tolist() == [0, 1]


def p15(r):
    made = dist.new_group([0, 1])
    out, handle = comm_func.all_gather_into_tensor(r.x, made, True)
    same(handle.result(), torch.cat(r.both))
    assert out is handle.result() and comm_func.all_gather_into_tensor(r.x)[1] is None
    dist.destroy_process_group(made)


def p16(r):
    rows = [1, 3]
    outputs = [torch.empty(n, 2) for n in rows]
    if r.backend == "unisono":  # gloo's all_gather takes equal sizes only
        dist.all_gather(outputs, r.x[: rows[r.rank]])
    else:
        outputs = [t[:n] for t, n in zip(r.both, rows, strict=True)]
    same(comm_func.all_gather_into_tensor_uneven(r.x[: rows[r.rank]], rows)[0], torch.cat(outputs))


def p17(r):
    rows = [1, 3]
    output = torch.empty(rows[r.rank], 2)
    if r.backend == "unisono":
        dist.reduce_scatter(output, list(r.x.split(rows)))
    else:
        output = (r.x + r.other).split(rows)[r.rank]
    same(comm_func.reduce_scatter_tensor_uneven(r.x, rows)[0], output)


def p18(r):
    for src in (0, 1):
        written = r.x.clone()
        dist.broadcast(written, src)
        same(comm_func.broadcast(r.x, src), written)
    same(comm_func.broadcast(r.x), r.both[0])


def p19(r):
    for dst in (0, 1):
        written = r.x.clone()
        dist.reduce(written, dst, dist.ReduceOp.MAX)
        same(comm_func.reduce(r.x, dst, "max"), written if r.rank == dst else torch.zeros(1))


def p20(r):
    for src in (0, 1):
        share = torch.empty(2, 2)
        dist.scatter(share, list(r.x.chunk(2)) if r.rank == src else None, src)
        same(comm_func.scatter_tensor(r.x, src), share)


def p21(r):
    for dst in (0, 1):
        outputs = [torch.empty(4, 2), torch.empty(4, 2)] if r.rank == dst else None
        dist.gather(r.x, outputs, dst)
        same(comm_func.gather_into_tensor(r.x, dst), torch.zeros(1) if outputs is None else torch.cat(outputs))


def p22(r):
    send = [torch.full((2,), r.rank + 1.0), torch.full((3,), r.rank + 5.0)]
    shapes = [(2,), (2,)] if r.rank == 0 else [(3,), (3,)]
    outputs = [torch.empty(shape) for shape in shapes]
    if r.backend == "unisono":  # gloo has no all_to_all of lists
        dist.all_to_all(outputs, send)
    else:
        outputs = [torch.full(shapes[0], [1.0, 5.0][r.rank]), torch.full(shapes[0], [2.0, 6.0][r.rank])]
    for given in (shapes, outputs):
        out, handle = comm_func.all_to_all_with_output_shape(given, send)
        assert isinstance(out, tuple) and handle is None
        for mine, theirs in zip(out, outputs, strict=True):
            same(mine, theirs)
    assert comm_func.all_to_all_with_output_shape(shapes, send, async_op=True)[1].result()[0].shape == shapes[0]


def p23(r):
    sent, got = ([1, 3], [1, 3]) if r.rank == 0 else ([3, 1], [3, 1])
    output = torch.empty(4, 2)
    dist.all_to_all_single(output, r.x, got, sent)
    for shape in ((4, 2), output):
        same(comm_func.all_to_all_single_with_output_shape(shape, r.x, got, sent)[0], output)
    dist.all_to_all_single(output, r.x)
    _, handle = comm_func.all_to_all_single_with_output_shape((4, 2), r.x, async_op=True)
    same(handle.result(), output)


def p24(r):
    for transfer in ("torch", "comm_func"):
        like = torch.zeros(4, 2)
        if r.rank == 0:
            (dist if transfer == "torch" else comm_func).send(r.x, 1, tag=4)
        elif transfer == "torch":
            dist.recv(like, 0, tag=4)
            same(like, r.other)
        else:
            same(comm_func.recv(like, 0, tag=4), r.other)
            assert like.sum() == 0


def p25(r):
    handle = comm_func.isend(r.x, r.peer, tag=2)
    out, receiving = comm_func.irecv(r.x, r.peer, tag=2)
    receiving.wait()
    handle.wait()
    same(out, r.other)
    mine = torch.zeros(4, 2)
    works = [dist.isend(r.x, r.peer), dist.irecv(mine, r.peer)]
    for work in works:
        work.wait()
    same(mine, out)


def p26(r):
    like = torch.zeros(4, 2)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, r.x, r.peer), dist.P2POp(dist.irecv, like, r.peer)])
    for work in works:
        work.wait()
    ops = [comm_func.P2POp("isend", r.x, r.peer), comm_func.P2POp("irecv", (4, 2), r.peer, recv_dtype=torch.float32)]
    out = comm_func.batch_isend_irecv(ops)
    same(out[1], like)
    assert out[0].shape == () and out[0] == 0


def p27(r):
    assert dist.barrier() is None and comm_func.barrier() is None and comm_func.barrier(dist.group.WORLD) is None


def p28(r):
    before = dist.group.WORLD
    comm_func.init()  # tests/functional/test_members.py makes one
    assert dist.group.WORLD is before


def p29(r):
    made = dist.new_group([1, 0], sort_ranks=False)
    comm_func.create_group("p29", [1, 0])
    assert comm_func.get_rank("p29") == dist.get_rank(made) == 1 - r.rank
    same(comm_func.all_gather_into_tensor(r.x, "p29")[0], torch.cat(r.both[::-1]))
    if r.rank == 1:
        comm_func.create_group("p29 alone", [1])  # rank 0 need not call
        same(comm_func.all_reduce(r.x, group="p29 alone")[0], r.x)
        comm_func.destroy_group("p29 alone")
    comm_func.destroy_group("p29")
    dist.destroy_process_group(made)


def p30(r):
    comm_func.create_group("p30", [0, 1])
    comm_func.barrier("p30")  # gloo takes it ill if a rank leaves while the other still connects
    comm_func.destroy_group("p30")
    with pytest.raises(ValueError, match="no group is named"):
        comm_func.barrier("p30")


def p31(r):
    assert (comm_func.get_rank(), comm_func.get_group_size()) == (dist.get_rank(), dist.get_world_size())
    comm_func.create_group("p31", [0])
    if r.rank == 1:
        with pytest.raises(ValueError, match="must be in the group"):
            comm_func.get_rank("p31")
    comm_func.destroy_group("p31")


def p32(r):
    made = dist.new_group([1, 0], sort_ranks=False)
    assert comm_func.get_process_group_ranks(made) == dist.get_process_group_ranks(made) == [1, 0]
    assert comm_func.get_world_rank_from_group_rank(made, 0) == dist.get_global_rank(made, 0) == 1
    assert comm_func.get_group_rank_from_world_rank(0, made) == dist.get_group_rank(made, 0) == 1
    dist.barrier(made)  # as in p30
    dist.destroy_process_group(made)
