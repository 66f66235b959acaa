"""Dtypes that are moved and never reduced: ranks cannot mix them up, so no value changes its meaning on the way."""

import contextlib
import itertools

import pytest
import torch

import unisono
from tests.reference import MOVED, dtype_of

SUB_BYTE = ("int1", "int4", "int7", "uint1", "uint4", "uint7")


def _bytes(count, name, heap):
    """An allocation of `count` elements whose bytes are all 0x5A."""
    make = unisono.empty if heap else torch.empty
    return make(count, dtype=torch.uint8).fill_(0x5A).view(dtype_of(name))


def _collectives(group, one, other):
    """Rank 0 has another dtype of the same size than the others."""
    name = one if group.rank == 0 else other
    complaints = []
    for heap, count in itertools.product((False, True), (1, 300, 400_000)):
        many = count * group.size
        small, large, output = (_bytes(n, name, heap) for n in (count, many, many))
        calls = {
            "broadcast": (group.broadcast, output, 0),
            "all_gather": (group.all_gather, output, small),
            "all_to_all": (group.all_to_all, output, large),
        }
        for verb, (call, *arguments) in calls.items():
            try:
                call(*arguments)
            except unisono.MismatchError as error:
                if not all(dtype in str(error).split() for dtype in (one, other)):
                    complaints.append(f"{verb}: a dtype is not named in {error}")
            else:
                complaints.append(f"{verb}, {count} elements, heap {heap}: {one} against {other} is no error")
            if not bool((output.view(torch.uint8) == 0x5A).all()):
                complaints.append(f"{verb}: something was written")
    return complaints


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize(("one", "other"), [*itertools.pairwise(MOVED), (MOVED[0], "uint8"), ("int8", MOVED[-1])])
def test_two_dtypes_of_one_byte_in_a_collective(pool, size, one, other):
    assert pool.run(_collectives, one, other) == [[], []]


def _message(group, one, other):
    if group.rank == 0:
        with contextlib.suppress(unisono.MismatchError):  # the sender of a large message is told too
            group.send(_bytes(300_000, one, True), 1)
        group.send(_bytes(8, one, False), 1)
        return []
    words = []
    for count in (300_000, 8):
        with pytest.raises(unisono.MismatchError) as caught:
            group.recv(_bytes(count, other, False), 0)
        words.append(str(caught.value))
    return [w for w in words if f"of {one}" not in w or f"of {other}" not in w]


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize(("one", "other"), [*itertools.pairwise(MOVED), (MOVED[0], "uint8"), ("int8", MOVED[-1])])
def test_two_dtypes_of_one_byte_in_a_message(pool, size, one, other):
    assert pool.run(_message, one, other) == [[], []]


def _making(group):
    for name in MOVED:
        dtype = dtype_of(name)
        for made in (unisono.empty(3, 5, dtype=dtype), unisono.empty_like(torch.empty(3, 5, dtype=dtype))):
            assert (made.dtype, made.shape) == (dtype, (3, 5)) and unisono.is_shared(made)


def _refused(group):
    """torch hands these out as whole bytes of int8 or uint8: no word for what is in them."""
    for name in SUB_BYTE:
        t = torch.empty(4, dtype=dtype_of(name))
        for call, *more in ((group.all_reduce,), (group.broadcast, 0), (group.send, 1 - group.rank)):
            with pytest.raises(TypeError, match=f"'tensor' has dtype torch.{name}"):
                call(t, *more)
        with pytest.raises(TypeError, match=f"torch.{name}"):
            unisono.empty_like(t)
    for name in MOVED:
        with pytest.raises(TypeError, match=name):
            group.all_reduce(_bytes(4, name, False))


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("what", [_making, _refused])
def test_making_and_refusing(pool, size, what):
    pool.run(what)
