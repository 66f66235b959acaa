"""A chain of calls on results copies nothing through the stage: the group counts the bytes."""

import pytest
import torch

import unisono
from tests.functional.worlds import world
from unisono import comm_func

ROWS, COLUMNS = 60_000, 8  # 2 MB: far more than what goes through a slot


def _chain(group, kind, folder):
    with world(group, kind, folder) as where:
        own = where if isinstance(where, unisono.Group) else (torch.distributed.group.WORLD).unisono_group
        first = torch.ones(ROWS, COLUMNS)  # in ordinary memory: the first call stages it
        before = own.staged_bytes
        x, _ = comm_func.all_reduce(first, "sum", where)
        staged = own.staged_bytes - before
        before = own.staged_bytes
        for _ in range(2):
            x, _ = comm_func.all_reduce(x, "avg", where)
            x, _ = comm_func.reduce_scatter_tensor(x, "max", where)
            x, _ = comm_func.all_gather_into_tensor(x, where)
            splits = [ROWS // 4, ROWS - ROWS // 4]
            x, _ = comm_func.reduce_scatter_tensor_uneven(x, splits, "avg", where)
            x, _ = comm_func.all_gather_into_tensor_uneven(x, splits, where)
            x, handle = comm_func.all_to_all_single_with_output_shape(x.shape, x, group=where, async_op=True)
            handle.wait()
            x = comm_func.broadcast(x, 1, where)
            parts, _ = comm_func.all_to_all_with_output_shape([x[: ROWS // 2]] * 2, list(x.chunk(2)), where)
            comm_func.reduce(parts[0], 0, "sum", where)
            x = comm_func.scatter_tensor(x, 1, where)
            x, _ = comm_func.all_gather_into_tensor(x, where)
            comm_func.gather_into_tensor(x, 0, where)
            request = comm_func.isend(x, 1 - group.rank, where)
            x = comm_func.recv(x, 1 - group.rank, where)
            request.wait()
        assert x.shape == (ROWS, COLUMNS) and x.unique().tolist() == [2.0] and unisono.is_shared(x)
        return staged, own.staged_bytes - before


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("kind", ["Group", "unisono"])
def test_a_chain_of_calls_copies_nothing(pool, size, kind, tmp_path):
    for staged, in_chain in pool.run(_chain, kind, str(tmp_path)):
        assert staged >= ROWS * COLUMNS * 4 // 2, "the figure counts"
        assert in_chain == 0


def _backward(group):
    """The gradients of a chain lie in shared memory as well."""
    x = unisono.to_shared_(torch.ones(ROWS, COLUMNS)).requires_grad_()
    before = group.staged_bytes
    y, _ = comm_func.all_reduce(x, "sum", group)
    z, _ = comm_func.all_gather_into_tensor(y, group)
    w, _ = comm_func.reduce_scatter_tensor(z, "sum", group)
    w.backward(unisono.to_shared_(torch.ones(ROWS, COLUMNS)))
    assert x.grad.unique().tolist() == [float(group.size) ** 2]
    return group.staged_bytes - before


@pytest.mark.parametrize("size", [2])
def test_a_backward_copies_nothing(pool, size):
    assert pool.run(_backward) == [0, 0]


def _fresh_results(group):
    """Results are new memory every time, in groups of one too: writing to one changes nothing else."""
    x = unisono.to_shared_(torch.ones(4))
    seen = [x]
    for function in (
        lambda: comm_func.all_reduce(x, "sum", group)[0],
        lambda: comm_func.broadcast(x, 0, group),
        lambda: comm_func.all_gather_into_tensor(x, group)[0],
        lambda: (
            comm_func.reduce(x, group.rank, "sum", group) if group.size == 1 else comm_func.reduce(x, 0, "sum", group)
        ),
    ):
        out = function()
        out.fill_(-1)
        seen.append(out)
    assert x.tolist() == [1.0] * 4
    assert len({t.data_ptr() for t in seen}) == len(seen)


@pytest.mark.parametrize("size", [1, 2])
def test_results_are_new_memory(pool, size):
    pool.run(_fresh_results)
