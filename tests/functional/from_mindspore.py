"""The rows M of docs/migration.md: comm_func does what MindSpore's documentation says and its examples show."""

import asyncio
import inspect
import re

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.functional.rows import WORLD, same, takes
from unisono import comm_func

NONE = inspect.Parameter.empty


def m1(r):
    out, _ = comm_func.all_reduce(tensor=torch.ones(2, 8))
    assert out.tolist() == [[2.0] * 8] * 2


def m2(r):
    for op, want in (("sum", r.x + r.other), ("prod", r.x * r.other), ("min", r.both[0]), ("max", r.both[1])):
        same(comm_func.all_reduce(r.x, op=op)[0], want)
    same(comm_func.all_reduce(r.x, "avg")[0], (r.x + r.other) / 2)
    same(comm_func.all_reduce(r.x, dist.ReduceOp.MAX)[0], r.both[1])


def m3(r):
    for group in (WORLD, "hccl_world_group", "nccl_world_group", "mccl_world_group", None, dist.group.WORLD):
        same(comm_func.all_reduce(r.x, group=group)[0], r.x + r.other)


def m4(r):
    takes(comm_func.all_reduce, tensor=NONE, op="sum", group=None, async_op=False)


def m5(r):
    output, handle = comm_func.all_reduce(torch.ones(2, 8), async_op=True)
    assert handle.wait() is None and output.tolist() == [[2.0] * 8] * 2
    assert comm_func.all_reduce(torch.ones(2, 8))[1] is None


def m6(r):
    for text, arguments in (
        ("For all_reduce, the input tensor must be tensor", ([1.0],)),
        ("For all_reduce, the input op type must be str", (r.x, 1)),
        ("For all_reduce, the input op value must be one of sum, prod, min, max", (r.x, "mean")),
    ):
        with pytest.raises(TypeError, match=text):
            comm_func.all_reduce(*arguments)


def m7(r):
    takes(comm_func.reduce_scatter_tensor, tensor=NONE, op="sum", group=None, async_op=False)
    same(comm_func.reduce_scatter_tensor(r.x, "max", WORLD)[0], r.both[1].chunk(2)[r.rank])


def m8(r):
    output, handle = comm_func.reduce_scatter_tensor(torch.ones(8, 8))
    assert output.tolist() == [[2.0] * 8] * 4 and handle is None
    output, handle = comm_func.reduce_scatter_tensor(torch.ones(8, 8), async_op=True)
    handle.wait()
    assert output.tolist() == [[2.0] * 8] * 4


def m9(r):
    text = (
        "the first dimension for 'input_shape' must be divided by 'rank_size', but got input_shape[0]: 5, rank_size: 2"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        comm_func.reduce_scatter_tensor(torch.ones(5))


def m10(r):
    takes(comm_func.all_gather_into_tensor, tensor=NONE, group=None, async_op=False)


def m11(r):
    output, handle = comm_func.all_gather_into_tensor(torch.ones(2, 8))
    assert output.tolist() == [[1.0] * 8] * 4 and handle is None


def m12(r):
    takes(comm_func.reduce, tensor=NONE, dst=NONE, op="sum", group=None)


def m13(r):
    output = comm_func.reduce(torch.ones(2, 8), dst=1)
    assert output.tolist() == ([[2.0] * 8] * 2 if r.rank == 1 else [0.0])


def m14(r):
    takes(comm_func.broadcast, tensor=NONE, src=0, group=None)
    takes(comm_func.scatter_tensor, tensor=NONE, src=0, group=None)
    takes(comm_func.gather_into_tensor, tensor=NONE, dst=0, group=None)


def m15(r):
    data = torch.arange(8.0).reshape(2, 4)
    same(comm_func.broadcast(tensor=data if r.rank == 0 else data * 0, src=0), data)
    out = comm_func.scatter_tensor(tensor=torch.arange(8.0).reshape(4, 2), src=0)
    assert out.tolist() == [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]][r.rank]
    out = comm_func.gather_into_tensor(tensor=torch.arange(4.0).reshape(2, 2), dst=0)
    assert out.tolist() == ([[0.0, 1.0], [2.0, 3.0]] * 2 if r.rank == 0 else [0.0])


def m16(r):
    takes(comm_func.barrier, group=None)
    assert comm_func.barrier() is None and comm_func.barrier(WORLD) is None


def m17(r):
    for function, argument in (("send", "dst"), ("isend", "dst"), ("recv", "src"), ("irecv", "src")):
        takes(getattr(comm_func, function), tensor=NONE, **{argument: 0}, group=None, tag=0)


def m18(r):
    x = torch.full((2, 2), 0.01 * (r.rank + 1))
    if r.rank == 0:
        assert comm_func.send(x, 1) is None
        comm_func.isend(x, 1).wait()
    else:
        same(comm_func.recv(torch.ones(2, 2), 0), torch.full((2, 2), 0.01))
        output, handle = comm_func.irecv(torch.ones(2, 2), 0)
        handle.wait()
        same(output, torch.full((2, 2), 0.01))


def m19(r):
    takes(comm_func.P2POp, op=NONE, tensor=NONE, peer=NONE, group=None, tag=0, recv_dtype=None)
    for op in ("isend", comm_func.isend):
        assert comm_func.P2POp(op, torch.tensor(1.0), 1).op == "isend"
    comm_func.P2POp("irecv", (), 0, recv_dtype=torch.float32)
    takes(comm_func.batch_isend_irecv, p2p_op_list=NONE)


def m20(r):
    send_op = comm_func.P2POp("isend", torch.tensor(r.rank + 1.0), r.peer)
    recv_op = comm_func.P2POp("irecv", torch.tensor(0.0), r.peer)
    output = comm_func.batch_isend_irecv([send_op, recv_op])
    assert isinstance(output, tuple) and [t.item() for t in output] == [0.0, r.peer + 1.0]


def m21(r):
    takes(
        comm_func.all_to_all_with_output_shape,
        output_shape_list=NONE,
        input_tensor_list=NONE,
        group=None,
        async_op=False,
    )


def m22(r):
    if r.rank == 0:
        send, shapes = [torch.tensor(1.0), torch.tensor([[2, 3], [4, 5.0]])], [(), (2,)]
    else:
        send, shapes = [torch.tensor([2, 2.0]), torch.tensor([4, 5, 6, 7.0])], [(2, 2), (4,)]
    output, handle = comm_func.all_to_all_with_output_shape(shapes, send)
    want = [[1.0, [2.0, 2.0]], [[[2.0, 3.0], [4.0, 5.0]], [4.0, 5.0, 6.0, 7.0]]][r.rank]
    assert [t.tolist() for t in output] == want and isinstance(output, tuple) and handle is None


def m23(r):
    takes(
        comm_func.all_to_all_single_with_output_shape,
        output_shape=NONE,
        tensor=NONE,
        output_split_sizes=None,
        input_split_sizes=None,
        group=None,
        async_op=False,
    )


def m24(r):
    result, handle = comm_func.all_to_all_single_with_output_shape((2,), torch.tensor([0.0, 1.0]) + r.rank * 2)
    assert result.tolist() == [[0.0, 2.0], [1.0, 3.0]][r.rank] and handle is None
    sent, got = ([0, 2], [0, 0]) if r.rank == 0 else ([0, 1], [2, 1])
    tensor = torch.ones(sum(sent), 3)
    result, _ = comm_func.all_to_all_single_with_output_shape((sum(got), 3), tensor, got, sent)
    assert result.shape == (sum(got), 3)


def m25(r):
    takes(comm_func.all_to_all_v_c, output=NONE, input=NONE, send_count_matrix=NONE, group=None, async_op=False)
    output = torch.zeros(3)
    comm_func.all_to_all_v_c(output, torch.tensor([0, 1, 2.0]) * r.rank, [0, 3, 3, 0])
    assert output.tolist() == [[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]][r.rank]


def m26(r):
    output = torch.zeros(3)
    assert comm_func.all_to_all_v_c(output, torch.ones(3), [0, 3, 3, 0]) is None
    handle = comm_func.all_to_all_v_c(output, torch.ones(3) * 2, [0, 3, 3, 0], async_op=True)
    assert handle.wait() is None and output.tolist() == [2.0] * 3


def m27(r):
    takes(unisono.Handle.wait, timeout=None)
    _, handle = comm_func.all_reduce(r.x, async_op=True)
    handle.wait()
    assert handle.is_completed() and handle.exception() is None
    same(handle.result(), r.x + r.other)

    async def wait():
        return await handle

    same(asyncio.run(wait()), r.x + r.other)


def m28(r):
    assert comm_func.get_group_size(comm_func.GlobalComm.WORLD_COMM_GROUP) == 2
    same(comm_func.all_reduce(r.x, "sum", comm_func.GlobalComm.WORLD_COMM_GROUP)[0], r.x + r.other)


def m29(r):
    takes(comm_func.init, backend_name=None)
    comm_func.init()  # there is one already; tests/functional/test_members.py starts without


def m30(r):
    takes(comm_func.create_group, group=NONE, rank_ids=NONE)
    takes(comm_func.destroy_group, group=NONE)
    comm_func.create_group("0-1", [0, 1])
    same(comm_func.all_reduce(r.x, group="0-1")[0], r.x + r.other)
    comm_func.create_group("alone", [r.rank])
    same(comm_func.all_reduce(r.x, group="alone")[0], r.x)
    comm_func.destroy_group("alone")
    comm_func.destroy_group("0-1")


def m31(r):
    assert comm_func.get_rank(WORLD) == comm_func.get_local_rank(WORLD) == comm_func.get_rank(group=WORLD) == r.rank
    assert comm_func.get_group_size(WORLD) == comm_func.get_local_rank_size(WORLD) == 2


def m32(r):
    takes(comm_func.get_world_rank_from_group_rank, group=NONE, group_rank_id=NONE)
    takes(comm_func.get_group_rank_from_world_rank, world_rank_id=NONE, group=NONE)
    assert comm_func.get_world_rank_from_group_rank(WORLD, 1) == 1
    assert comm_func.get_group_rank_from_world_rank(1, WORLD) == 1
    assert comm_func.get_process_group_ranks(WORLD) == [0, 1]
