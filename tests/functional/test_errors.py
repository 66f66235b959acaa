"""Wrong arguments: the documented types and texts, on the rank that gives them, before anything is sent."""

import pytest
import torch
import torch.distributed as dist

from tests.functional.worlds import world
from unisono import comm_func
from unisono.testing import run_ranks

T = torch.ones(4)
P2POp = comm_func.P2POp

# (type, first line of the text, call)
CASES = [
    (TypeError, "For all_reduce, the input tensor must be tensor", lambda g: comm_func.all_reduce([1.0], group=g)),
    (TypeError, "For all_reduce, the input tensor must be tensor", lambda g: comm_func.all_reduce(None, group=g)),
    (TypeError, "For all_reduce, the input op type must be str", lambda g: comm_func.all_reduce(T, 3, g)),
    (TypeError, "For all_reduce, the input op type must be str", lambda g: comm_func.all_reduce(T, None, g)),
    (
        TypeError,
        "For all_reduce, the input op value must be one of sum, prod, min, max, avg",
        lambda g: comm_func.all_reduce(T, "mean", g),
    ),
    (TypeError, "For all_reduce, the input op value must be one of", lambda g: comm_func.all_reduce(T, "SUM", g)),
    (
        TypeError,
        "For reduce_scatter_tensor, the input tensor must be tensor",
        lambda g: comm_func.reduce_scatter_tensor([T, T], group=g),
    ),
    (
        TypeError,
        "For reduce_scatter_tensor, the input op value must be one of",
        lambda g: comm_func.reduce_scatter_tensor(T, "mean", g),
    ),
    (
        TypeError,
        "For reduce_scatter_tensor, the input op type must be str",
        lambda g: comm_func.reduce_scatter_tensor(T, 7, g),
    ),
    (
        ValueError,
        "the first dimension for 'input_shape' must be divided by 'rank_size', but got input_shape[0]: 5, rank_size: 2",
        lambda g: comm_func.reduce_scatter_tensor(torch.ones(5, 2), group=g),
    ),
    (
        ValueError,
        "the first dimension for 'input_shape' must be divided by 'rank_size', but got input_shape[0]: 1, rank_size: 2",
        lambda g: comm_func.reduce_scatter_tensor(torch.tensor(1.0), group=g),
    ),
    (
        ValueError,
        "the first dimension for 'input_shape' must be divided by 'rank_size', but got input_shape[0]: 3, rank_size: 2",
        lambda g: comm_func.scatter_tensor(torch.ones(3), group=g),
    ),
    (
        TypeError,
        "For all_gather_into_tensor, the input tensor must be tensor",
        lambda g: comm_func.all_gather_into_tensor(1, g),
    ),
    (TypeError, "For reduce, the input tensor must be tensor", lambda g: comm_func.reduce(1, 0, group=g)),
    (TypeError, "For reduce, the dst must be int", lambda g: comm_func.reduce(T, "0", group=g)),
    (TypeError, "For reduce, the input op value must be one of", lambda g: comm_func.reduce(T, 0, "x", g)),
    (
        ValueError,
        "For reduce, the dst must be one of the group's ranks [0, 1], got 2",
        lambda g: comm_func.reduce(T, 2, group=g),
    ),
    (TypeError, "For broadcast, the input tensor must be tensor", lambda g: comm_func.broadcast(None, group=g)),
    (TypeError, "For broadcast, the src must be int", lambda g: comm_func.broadcast(T, 0.0, g)),
    (ValueError, "For broadcast, the src must be one of", lambda g: comm_func.broadcast(T, -1, g)),
    (
        TypeError,
        "For scatter_tensor, the input tensor must be tensor",
        lambda g: comm_func.scatter_tensor([T], group=g),
    ),
    (TypeError, "For scatter_tensor, the src must be int", lambda g: comm_func.scatter_tensor(T, None, g)),
    (
        TypeError,
        "For gather_into_tensor, the input tensor must be tensor",
        lambda g: comm_func.gather_into_tensor(0, group=g),
    ),
    (TypeError, "For gather_into_tensor, the dst must be int", lambda g: comm_func.gather_into_tensor(T, True, g)),
    (TypeError, "For send, the input tensor must be tensor", lambda g: comm_func.send(1, 1, g)),
    (TypeError, "For isend, the input tensor must be tensor", lambda g: comm_func.isend(1, 1, g)),
    (TypeError, "For isend, the dst must be int", lambda g: comm_func.isend(T, None, g)),
    (TypeError, "For recv, the input tensor must be tensor", lambda g: comm_func.recv((3,), 1, g)),
    (TypeError, "For recv, the src must be int", lambda g: comm_func.recv(T, "1", g)),
    (TypeError, "For irecv, the input tensor must be tensor", lambda g: comm_func.irecv((3,), 1, g)),
    (ValueError, "For send, the dst must be one of", lambda g: comm_func.send(T, 5, g)),
    (TypeError, "Expected list or tuple, but got", lambda g: comm_func.all_to_all_with_output_shape([(1,)] * 2, T, g)),
    (TypeError, "Expected tensor, but got", lambda g: comm_func.all_to_all_with_output_shape([(1,)] * 2, [T, 1], g)),
    (TypeError, "Expected list or tuple, but got", lambda g: comm_func.all_to_all_with_output_shape(3, [T, T], g)),
    (
        TypeError,
        "Expected tensor or tuple, but got",
        lambda g: comm_func.all_to_all_with_output_shape([3, 3], [T, T], g),
    ),
    (
        TypeError,
        "all_to_all input dtype must be the same, but got torch.float32 and torch.float64.",
        lambda g: comm_func.all_to_all_with_output_shape([(4,)] * 2, [T, T.double()], g),
    ),
    (
        ValueError,
        "For all_to_all_with_output_shape, 'input_tensor_list' must have one entry per rank: 2, got 1",
        lambda g: comm_func.all_to_all_with_output_shape([(4,)], [T], g),
    ),
    (
        TypeError,
        "Expected tensor, but got",
        lambda g: comm_func.all_to_all_single_with_output_shape((4,), [T], group=g),
    ),
    (
        TypeError,
        "Expected tensor or tuple, but got",
        lambda g: comm_func.all_to_all_single_with_output_shape(4, T, group=g),
    ),
    (
        ValueError,
        "input shape at dim 0 must be divided by world_size, but got 5 and 2.",
        lambda g: comm_func.all_to_all_single_with_output_shape((4,), torch.ones(5), group=g),
    ),
    (
        ValueError,
        "output shape at dim 0 must be divided by world_size, but got 3 and 2.",
        lambda g: comm_func.all_to_all_single_with_output_shape((3,), T, group=g),
    ),
    (
        ValueError,
        "For all_to_all_single_with_output_shape, 'input_split_sizes' must be 2 numbers that add up to the 4 rows",
        lambda g: comm_func.all_to_all_single_with_output_shape((4,), T, [2, 2], [1, 2], g),
    ),
    (
        ValueError,
        "For all_to_all_single_with_output_shape, 'input_split_sizes' must be 2 numbers that add up to the 4 rows",
        lambda g: comm_func.all_to_all_single_with_output_shape((4,), T, [2, 2], iter([1, 2]), g),
    ),
    (
        ValueError,
        "For all_to_all_single_with_output_shape, the output shape must not have negative sizes, got [-1]",
        lambda g: comm_func.all_to_all_single_with_output_shape((-1,), T, [2, 2], [2, 2], g),
    ),
    (TypeError, "send_count_matrix must be list, but got", lambda g: comm_func.all_to_all_v_c(T, T, (1,), g)),
    (TypeError, "send_count_matrix elements must be of type int", lambda g: comm_func.all_to_all_v_c(T, T, [1.0], g)),
    (
        TypeError,
        "send_count_matrix must be square matrix, but got 3.",
        lambda g: comm_func.all_to_all_v_c(T, T, [1] * 3, g),
    ),
    (
        ValueError,
        "The input and output dimensions except 0 must be of equal size, but got 2 and 1.",
        lambda g: comm_func.all_to_all_v_c(T, torch.ones(4, 2), [2] * 4, g),
    ),
    (
        ValueError,
        "For all_to_all_v_c, this rank's counts must add up to the 4 rows of 'input'",
        lambda g: comm_func.all_to_all_v_c(T, T, [1] * 4, g),
    ),
    (
        RuntimeError,
        "Number of tensor splits not equal to group size",
        lambda g: comm_func.reduce_scatter_tensor_uneven(T, [4], group=g),
    ),
    (
        RuntimeError,
        "Split sizes doesn't match total dim 0 size",
        lambda g: comm_func.reduce_scatter_tensor_uneven(T, [1, 2], group=g),
    ),
    (
        RuntimeError,
        "Tensor's dim 0 does not divide equally across group size",
        lambda g: comm_func.reduce_scatter_tensor_uneven(torch.ones(3), group=g),
    ),
    (
        ValueError,
        "split sizes must not be negative",
        lambda g: comm_func.reduce_scatter_tensor_uneven(T, [5, -1], group=g),
    ),
    (
        TypeError,
        "the split sizes come before 'op'",
        lambda g: comm_func.reduce_scatter_tensor_uneven(T, torch.distributed.ReduceOp.SUM, group=g),
    ),
    (
        TypeError,
        "the split sizes come before 'op'",
        lambda g: comm_func.reduce_scatter_tensor_uneven(T, "sum", group=g),
    ),
    (
        RuntimeError,
        "Number of tensor splits not equal to group size",
        lambda g: comm_func.all_gather_into_tensor_uneven(T, [4, 4, 4], g),
    ),
    (
        ValueError,
        "'tensor' must have as many rows as this rank's split",
        lambda g: comm_func.all_gather_into_tensor_uneven(T, [3, 3], g),
    ),
    (ValueError, "split sizes must not be negative", lambda g: comm_func.all_gather_into_tensor_uneven(T, [-4, 4], g)),
    (TypeError, "op must be type of string or function", lambda g: P2POp(3, T, 0)),
    (ValueError, "Expected ``op`` to be of type ``isend`` or ``irecv``, but got send", lambda g: P2POp("send", T, 0)),
    (ValueError, "Expected ``op`` to be of type", lambda g: P2POp(comm_func.send, T, 0)),
    (TypeError, "Expected ``tensor`` to be type of tuple or Tensor", lambda g: P2POp("irecv", [3], 0)),
    (TypeError, "peer must be type of int", lambda g: P2POp("isend", T, "0")),
    (TypeError, "recv_dtype must be type of torch.dtype", lambda g: P2POp("irecv", (3,), 0, recv_dtype="float32")),
    (ValueError, "'recv_dtype' of P2POp is None", lambda g: P2POp("irecv", (3,), 0)),
    (
        TypeError,
        "Expected ``tensor`` to be type of Tensor for isend",
        lambda g: P2POp("isend", (3,), 0, recv_dtype=torch.int8),
    ),
    (TypeError, "p2p_op_list must be type of list", lambda g: comm_func.batch_isend_irecv(P2POp("isend", T, 0))),
    (TypeError, "p2p_op_list can not be empty list.", lambda g: comm_func.batch_isend_irecv([])),
    (TypeError, "must be type of P2POp", lambda g: comm_func.batch_isend_irecv([3])),
    (TypeError, "argument 'group' must be None, a name", lambda g: comm_func.all_reduce(T, group=7)),
    (ValueError, "no group is named 'nobody'", lambda g: comm_func.all_reduce(T, group="nobody")),
    (
        ValueError,
        "argument 'group_rank_id' must be a rank from 0 to 1",
        lambda g: comm_func.get_world_rank_from_group_rank(g, 2),
    ),
]


def _local(group, kind, folder):
    complaints = []
    with world(group, kind, folder) as where:
        if group.rank == 0:  # the other rank makes no call: nothing may wait for it
            for expected, text, call in CASES:
                try:
                    call(where)
                except Exception as error:
                    if not isinstance(error, expected) or not str(error).startswith(text):
                        complaints.append(f"{type(error).__name__}: {error}\n    expected {expected.__name__}: {text}")
                else:
                    complaints.append(f"no error; expected {expected.__name__}: {text}")
        group.barrier()
        total, _ = comm_func.all_reduce(torch.ones(2), group=where)
        assert total.tolist() == [2.0, 2.0], "the group goes on"
    return complaints


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", ["Group", "unisono", "gloo"])
def test_wrong_arguments(pool, size, kind, tmp_path):
    first, _ = pool.run(_local, kind, str(tmp_path))
    assert not first, "\n".join(first)


def _undefined_ops(group):
    for op in ("avg", "max"):
        for call in (comm_func.all_reduce, comm_func.reduce_scatter_tensor):
            kind = torch.bool if op == "avg" else torch.complex64
            with pytest.raises(TypeError, match=f"{op} is not defined for {kind}"):
                call(torch.ones(4, dtype=kind), op, group)
    with pytest.raises(ValueError, match="must be a dense CPU tensor"):
        comm_func.all_reduce(torch.ones(4).to_sparse(), "sum", group)


@pytest.mark.parametrize("size", [2])
def test_ops_and_tensors_that_do_not_exist(pool, size):
    pool.run(_undefined_ops)


def _no_default(group):
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        comm_func.all_reduce(torch.ones(3))
    with pytest.raises(ValueError, match="MASTER_PORT"):
        comm_func.init()


def test_no_default_group():
    run_ranks(1, _no_default)


def _batch(group, folder):
    """A list with a mistake at its end: nothing is sent, and what was to be received comes to the next call."""
    with world(group, "unisono", folder):
        other = 1 - group.rank
        first = [comm_func.P2POp("irecv", torch.zeros(2), other), comm_func.P2POp("isend", torch.ones(2), other)]
        with pytest.raises(ValueError):
            comm_func.batch_isend_irecv([*first, comm_func.P2POp("isend", torch.ones(2), 7)])
        with pytest.raises(ValueError):  # known when it is sent only
            comm_func.batch_isend_irecv([first[0], comm_func.P2POp("isend", torch.ones(2).to_sparse(), other)])
        dist.barrier()
        got = comm_func.batch_isend_irecv(
            [first[0], comm_func.P2POp("isend", torch.full((2,), float(group.rank)), other)]
        )
        assert got[0].tolist() == [float(other)] * 2
        dist.barrier()


@pytest.mark.parametrize("size", [2])
def test_a_batch_with_a_mistake(pool, size, tmp_path):
    pool.run(_batch, str(tmp_path))
