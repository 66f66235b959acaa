"""What the uneven collectives refuse: every text, the order of the checks, and that the group goes on afterwards."""

import warnings

import numpy
import pytest
import torch
import torch.distributed as dist

import unisono
from tests.uneven.cases import KINDS, world
from tests.uneven.refused import FIRST, REFUSED, SUM, exchange, gather, reduce, strided, tensor
from unisono.base.errors import ArgumentError


def refuse_all(group, kind, path):
    complaints = []
    with world(group, "unisono" if kind == "group" else kind, path):
        of = group if kind == "group" else None
        for name, error, first, second, call in REFUSED:
            try:
                call(of, group.rank)
                complaints.append(f"{name}: nothing was raised")
            except Exception as e:
                lines = str(e).splitlines()
                right = isinstance(e, error) and (type(e) is error or isinstance(e, ArgumentError))
                if not right or not (lines[0] == first or (first in lines[0] and error is not RuntimeError)):
                    complaints.append(f"{name}: {type(e).__name__}: {e}")
                if error is RuntimeError and len(lines) != 2:
                    complaints.append(f"{name}: {len(lines)} lines: {e}")
                if second not in str(e):
                    complaints.append(f"{name}: {second!r} is not in: {e}")
        for first, call in FIRST:
            try:
                call(of)
            except RuntimeError as e:
                if str(e).splitlines()[0] != first:
                    complaints.append(f"expected {first}, got {e}")
        # Nothing was sent: the next call is right.
        whole, mine = tensor(3), torch.full((1 + group.rank,), 1.0 + group.rank)
        gather(of, whole, mine, [1, 2])
        if whole.tolist() != [1.0, 2.0, 2.0]:
            complaints.append(f"afterwards: {whole}")
    return complaints


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2])
def test_refused(pool, size, kind, tmp_path):
    assert pool.run(refuse_all, kind, str(tmp_path / "store")) == [[], []]


def list_likes(group, kind, path):
    with world(group, kind, path) as of:
        found = []
        for splits in (
            [1, 2],
            (1, 2),
            torch.Size([1, 2]),
            torch.tensor([1, 2]),
            torch.tensor([1, 2], dtype=torch.int32),
            numpy.array([1, 2]),
            numpy.array([1, 2], dtype=numpy.uint8),
            [numpy.int64(1), torch.tensor(2)],
            range(1, 3),
        ):
            whole, mine = tensor(3), torch.full((1 + group.rank,), 1.0 + group.rank)
            unisono.all_gather_into_tensor_uneven(whole, mine, splits, of)
            unisono.reduce_scatter_tensor_uneven(mine, whole, splits, group=of)
            found.append(mine.tolist())
        for matrix in (
            [[1, 2], [0, 1]],
            [1, 2, 0, 1],
            ((1, 2), (0, 1)),
            torch.tensor([[1, 2], [0, 1]]),
            numpy.array([[1, 2], [0, 1]]),
            numpy.array([1, 2, 0, 1]),
            [torch.tensor([1, 2]), [0, 1]],
        ):
            source = torch.tensor([1.0, 2.0, 3.0]) if group.rank == 0 else torch.tensor([4.0])
            output = tensor(1 if group.rank == 0 else 3)
            unisono.all_to_all_vc(output, source, matrix, of)
            found.append(output.tolist())
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2])
def test_list_likes(pool, size, kind, tmp_path):
    first, second = pool.run(list_likes, kind, str(tmp_path / "store"))
    assert first == [[2.0]] * 9 + [[1.0]] * 7
    assert second == [[4.0, 4.0]] * 9 + [[2.0, 3.0, 4.0]] * 7


def disagree(group, kind, path):
    """Each pair of calls differs between rank 0 and the others."""
    rank, size, errors = group.rank, group.size, []
    even = [100] * size
    odd = [101, *[100] * (size - 2), 99]
    large, larger = [n * 1000 for n in even], [n * 1000 for n in odd]
    huge, huger = [n * 12_000 for n in even], [n * 12_000 for n in odd]
    pairs = [(even, odd), (large, larger), (huge, huger), (even, large), (large, huge), (huge, [0] * size)]
    with world(group, kind, path) as of:
        for first, others in (*pairs, *((b, a) for a, b in pairs)):
            splits = first if rank == 0 else others
            for verb in ("gather", "reduce"):
                whole, part = tensor(sum(splits)), tensor(splits[rank])
                try:
                    if verb == "gather":
                        gather(of, whole, part, splits)
                    else:
                        reduce(of, part, whole, splits)
                    errors.append(f"nothing was raised for {verb} {splits}")
                except unisono.MismatchError as error:
                    if "<- differs" not in str(error) or not error.peers or "refused.py" not in str(error):
                        errors.append(str(error))
        for call in (
            lambda: gather(of, tensor(size), tensor(1)) if rank == 0 else reduce(of, tensor(1), tensor(size)),
            lambda: (
                gather(of, tensor(sum(large)), tensor(large[rank]), large)
                if rank == 0
                else reduce(of, tensor(large[rank]), tensor(sum(large)), large)
            ),
            lambda: reduce(of, tensor(1), tensor(size), None, "sum" if rank == 0 else "max"),
            lambda: gather(of, tensor(size, dtype=(d := torch.int32 if rank else torch.float32)), tensor(1, dtype=d)),
            lambda: (
                exchange(of, tensor(size), tensor(size), [[1] * size] * size)
                if rank
                else exchange(of, tensor(size + 1), tensor(size), [[1] * size] * (size - 1) + [[2] + [1] * (size - 1)])
            ),
        ):
            try:
                call()
                errors.append("nothing was raised")
            except unisono.MismatchError:
                pass
        whole, part = tensor(size), torch.full((1,), float(rank))
        gather(of, whole, part)
        reduce(of, part, whole)
        if part.tolist() != [rank * size]:
            errors.append(f"afterwards: {part}")
    return errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_disagree(pool, size, kind, tmp_path):
    """On every rank an error that shows all ranks' requests, and the group goes on."""
    assert pool.run(disagree, kind, str(tmp_path / "store")) == [[]] * size


def outside(group, kind, path):
    with world(group, kind, path):
        some = dist.new_group([0])
        texts = []
        if group.rank == 1:
            for call in (gather, reduce, exchange):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    # Everything is wrong with these arguments; who is not in the group is not told.
                    assert call(some, None, strided(3), SUM) is None
                texts.append([str(w.message) for w in caught])
        return texts


@pytest.mark.parametrize("kind", ["unisono", "gloo"])
@pytest.mark.parametrize("size", [2])
def test_outside_of_the_group(pool, size, kind, tmp_path):
    _, texts = pool.run(outside, kind, str(tmp_path / "store"))
    names = ("all_gather_into_tensor_uneven", "reduce_scatter_tensor_uneven", "all_to_all_vc")
    assert texts == [[f"Running {n} on global rank 1 which does not belong to the given group."] for n in names]


def with_grad(group, kind, path):
    with world(group, kind, path) as of:
        splits = [1, 2]
        mine = torch.full((1 + group.rank,), 2.0, requires_grad=True)
        texts = []
        for quiet in (False, True):
            with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(not quiet):
                warnings.simplefilter("always")
                whole = tensor(3)
                gather(of, whole, mine, splits)
                part = tensor(1 + group.rank)
                reduce(of, part, torch.ones(3, requires_grad=True), splits)
            texts.append([str(w.message) for w in caught])
            if whole.tolist() != [2.0] * 3 or whole.requires_grad or part.tolist() != [2.0] * (1 + group.rank):
                texts.append([str(whole), str(part)])
        return texts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2])
def test_inputs_that_require_grad(pool, size, kind, tmp_path):
    for noisy, quiet in pool.run(with_grad, kind, str(tmp_path / "store")):
        assert len(noisy) == 2 and all("does not take part in autograd" in text for text in noisy)
        assert quiet == []
