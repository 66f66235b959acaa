"""The all-to-all family and messages, on every kind of group, against what each rank must receive."""

import numpy as np
import pytest
import torch

import unisono
from tests.functional.worlds import OTHERS, WORLDS, world
from unisono import comm_func


def _rows(sender, receiver, count, tail=(2,)):
    """What a rank sends to another: rows that nobody else sends."""
    start = 1000.0 * sender + 100.0 * receiver
    return (start + torch.arange(float(count * torch.Size(tail).numel()))).reshape(count, *tail)


def _counts(size, pattern):
    """counts[i][j]: rows from rank i to rank j."""
    makers = {
        "equal": lambda i, j: 3,
        "uneven": lambda i, j: (2 * i + 3 * j) % 4,
        "nothing": lambda i, j: 0,
        "one sends": lambda i, j: 2 + j if i == 0 else 0,
        "diagonal": lambda i, j: 4 if i == j else 0,
    }
    return [[makers[pattern](i, j) for j in range(size)] for i in range(size)]


PATTERNS = ("equal", "uneven", "nothing", "one sends", "diagonal")


def _single(group, kind, folder):
    size, rank = group.size, group.rank
    with world(group, kind, folder) as where:
        for pattern in PATTERNS:
            counts = _counts(size, pattern)
            mine = torch.cat([_rows(rank, j, counts[rank][j]) for j in range(size)])
            want = torch.cat([_rows(i, rank, counts[i][rank]) for i in range(size)])
            sent, got = counts[rank], [counts[i][rank] for i in range(size)]
            for shape in (want.shape, torch.empty(want.shape)):
                for async_op in (False, True):
                    function = comm_func.all_to_all_single_with_output_shape
                    out, handle = function(shape, mine, got, sent, where, async_op)
                    assert (handle is not None) == async_op
                    if handle is not None:
                        handle.wait()
                        assert torch.equal(handle.result(), want)
                    assert torch.equal(out, want) and out.shape == want.shape, (kind, pattern)
                    assert kind in OTHERS or not out.numel() or unisono.is_shared(out)
            # rows of another shape on the way out: counts in rows of each side
            flat, _ = function((want.numel(),), mine, [n * 2 for n in got], sent, where)
            assert torch.equal(flat, want.reshape(-1))
            # the matrix form writes into the output
            output = torch.full(want.shape, -1.0)
            matrix = [n for row in counts for n in row]
            assert comm_func.all_to_all_v_c(output, mine, matrix, where) is None
            assert torch.equal(output, want), (kind, pattern)
            output.fill_(-1.0)
            comm_func.all_to_all_v_c(output, mine, matrix, where, async_op=True).wait()
            assert torch.equal(output, want), (kind, pattern)
        for empty in (None, [], ()):
            out, _ = function((size,), torch.arange(float(size)) + 10 * rank, empty, empty, where)
            assert out.tolist() == [10.0 * i + rank for i in range(size)]


def _lists(group, kind, folder):
    size, rank = group.size, group.rank
    with world(group, kind, folder) as where:
        for pattern in PATTERNS:
            counts = _counts(size, pattern)
            tails = [(), (3,), (2, 2)]
            mine = [_rows(rank, j, counts[rank][j], tails[(rank + j) % 3]) for j in range(size)]
            want = [_rows(i, rank, counts[i][rank], tails[(i + rank) % 3]) for i in range(size)]
            for shapes in (
                [t.shape for t in want],
                [list(t.shape) for t in want],
                [torch.empty(t.shape) for t in want],
            ):
                for async_op in (False, True):
                    out, handle = comm_func.all_to_all_with_output_shape(shapes, mine, where, async_op)
                    if handle is not None:
                        handle.wait()
                        assert all(a is b for a, b in zip(handle.result(), out, strict=True))
                    assert isinstance(out, tuple) and (handle is not None) == async_op
                    assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True)), (kind, pattern)
        # MindSpore's example: scalars and matrices in one exchange
        if size == 2:
            send = [[torch.tensor(1.0), torch.tensor([[2, 3], [4, 5.0]])], [torch.tensor([2, 2.0]), torch.arange(4.0)]]
            shapes = [[(), (2,)], [(2, 2), (4,)]][rank]
            out, _ = comm_func.all_to_all_with_output_shape(shapes, send[rank], where)
            assert all(torch.equal(out[i], send[i][rank]) for i in range(2))


def _messages(group, kind, folder):
    size, rank = group.size, group.rank
    with world(group, kind, folder) as where:
        right, left = (rank + 1) % size, (rank - 1) % size
        like = torch.zeros(2, 3, dtype=torch.int32)
        content = torch.arange(6, dtype=torch.int32).reshape(2, 3)
        # a ring, one after the other
        if rank % 2 == 0:
            assert comm_func.send(content + rank, right, where) is None
        got = comm_func.recv(like, left, where) if (rank % 2 or size % 2 == 0 or rank == 0) else None
        if rank % 2:
            comm_func.send(content + rank, right, where)
        if got is None:
            got = comm_func.recv(like, left, where)
        assert torch.equal(got, content + left) and got.dtype == torch.int32
        assert like.sum() == 0, "recv's tensor says shape and dtype only"
        # at once, tags in opposite orders
        sends = [comm_func.isend(content + 10 * rank + tag, right, where, tag) for tag in (1, 2)]
        receives = [comm_func.irecv(like, left, where, tag) for tag in (2, 1)]
        for tag, (tensor, handle) in zip((2, 1), receives, strict=True):
            handle.wait()
            assert torch.equal(tensor, content + 10 * left + tag) and torch.equal(handle.result(), tensor)
        for handle in sends:
            handle.wait()
        # a strided tensor
        handle = comm_func.isend((content + rank).t(), right, where, tag=5)
        assert torch.equal(comm_func.recv(like.t(), left, where, tag=5), (content + left).t())
        handle.wait()


def _batches(group, kind, folder):
    size, rank = group.size, group.rank
    with world(group, kind, folder) as where:
        right, left = (rank + 1) % size, (rank - 1) % size
        P2POp = comm_func.P2POp
        out = comm_func.batch_isend_irecv(
            [
                P2POp("isend", torch.tensor(rank + 1.0), right, where),
                P2POp("irecv", torch.tensor(0.0), left, where),
                P2POp(comm_func.isend, torch.full((2, 2), rank), right, where, tag=3),
                P2POp(comm_func.irecv, (2, 2), left, where, 3, recv_dtype=torch.int64),
            ]
        )
        assert isinstance(out, tuple) and [tuple(t.shape) for t in out] == [(), (), (), (2, 2)]
        assert out[0].item() == 0 and out[1].item() == left + 1
        assert out[3].tolist() == [[left] * 2] * 2 and out[3].dtype == torch.int64


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", WORLDS)
def test_single(pool, size, kind, tmp_path):
    pool.run(_single, kind, str(tmp_path))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", WORLDS)
def test_lists(pool, size, kind, tmp_path):
    pool.run(_lists, kind, str(tmp_path))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", WORLDS)
def test_messages(pool, size, kind, tmp_path):
    pool.run(_messages, kind, str(tmp_path))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", WORLDS)
def test_batches(pool, size, kind, tmp_path):
    pool.run(_batches, kind, str(tmp_path))


def _numpy_shapes(group):
    n, mine = group.size, torch.full((2,), float(group.rank))
    single, _ = comm_func.all_to_all_single_with_output_shape([np.int64(2 * n)], mine.repeat(n), group=group)
    listed, _ = comm_func.all_to_all_with_output_shape([(np.int32(2),)] * n, [mine] * n, group)
    return single.tolist(), [part.tolist() for part in listed]


@pytest.mark.parametrize("size", [2])
def test_shapes_of_numpy_numbers(pool, size):
    rows = [[float(rank)] * 2 for rank in range(size)]
    for single, listed in pool.run(_numpy_shapes):
        assert single == [n for row in rows for n in row] and listed == rows
