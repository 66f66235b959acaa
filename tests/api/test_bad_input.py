"""Bad input: one rank's wrong arguments are an error on that rank before anything moves; ranks that disagree
get MismatchError on all of them. Nothing is written, and the group goes on."""

import contextlib
import pickle
import re
import warnings

import pytest
import torch

import unisono
from tests.reference import raw_bytes
from unisono import _core
from unisono.base import errors

PATTERN = 0x5A


class Outputs:
    """Tensors that a bad call must not write."""

    def __init__(self):
        self.made = []

    def __call__(self, count, dtype=torch.float32, heap=False):
        make = unisono.empty if heap else torch.empty
        t = make(count * dtype.itemsize, dtype=torch.uint8).fill_(PATTERN).view(dtype)
        self.made.append(t)
        return t

    def untouched(self):
        return all(bool((raw_bytes(t) == PATTERN).all()) for t in self.made)


def _x(count=12):
    return torch.ones(count)


# What is wrong -> (words that the error's type and text must hold, the call)
LOCAL = {
    "meta tensor": ("tensor meta", lambda g, new: g.all_reduce(torch.ones(3, device="meta"))),
    "meta out": ("out meta", lambda g, new: g.all_reduce(new(3), out=torch.ones(3, device="meta"))),
    "meta output": (
        "output meta",
        lambda g, new: g.all_gather(torch.empty(4 * g.size, device="meta"), new(4)),
    ),
    "complex32": (
        "tensor complex32",
        lambda g, new: g.broadcast(_quiet(torch.zeros, 3, dtype=torch.complex32), 0),
    ),
    "quantized": ("tensor qint8", lambda g, new: g.all_reduce(_quiet(_quantized))),
    "sparse": ("tensor", lambda g, new: g.all_reduce(torch.ones(3).to_sparse())),
    "not a tensor": ("TypeError tensor list", lambda g, new: g.all_reduce([1.0, 2.0])),
    "None": ("TypeError tensor None", lambda g, new: g.all_reduce(None)),
    "input is a number": ("TypeError input int", lambda g, new: g.all_gather(new(4 * g.size), 5)),
    "list with a number": (
        "TypeError output int",
        lambda g, new: g.all_gather([new(4), *[3] * (g.size - 1)], _x(4)),
    ),
    "strided tensor": ("ValueError tensor contiguous", lambda g, new: g.all_reduce(new(24)[::2])),
    "transposed tensor": ("tensor contiguous", lambda g, new: g.broadcast(new(24).view(4, 6).t(), 0)),
    "expanded output": ("output contiguous", lambda g, new: g.all_gather(new(1).expand(4 * g.size), _x(4))),
    "strided out": ("out contiguous", lambda g, new: g.all_reduce(_x(12), out=new(24)[::2])),
    "strided input": ("input contiguous", lambda g, new: g.all_gather(new(4 * g.size), _x(8)[::2])),
    "out of another size": ("ValueError out 12 13", lambda g, new: g.all_reduce(_x(12), out=new(13))),
    "out of another dtype": (
        "out float32 float64",
        lambda g, new: g.all_reduce(_x(12), out=new(12, torch.float64)),
    ),
    "reduce's out": ("ValueError out 12 11", lambda g, new: g.reduce(_x(12), g.rank, out=new(11))),
    "output too short": ("ValueError 7 8", lambda g, new: g.all_gather(new(7 * g.size), _x(8))),
    "output not divisible": ("ValueError output", lambda g, new: g.all_gather(new(8 * g.size + 1), _x(8))),
    "dtypes differ": ("int32 float32", lambda g, new: g.all_gather(new(8 * g.size, torch.int32), _x(8))),
    "input against counts": ("input 4 5", lambda g, new: g.all_gather(new(5 * g.size), _x(4), [5] * g.size)),
    "wrong sum": ("ValueError output", lambda g, new: g.all_gather(new(4 * g.size + 3), _x(4), [4] * g.size)),
    "negative count": (
        "counts -4",
        lambda g, new: g.all_gather(new(4 * g.size), _x(4), [4] * (g.size - 1) + [-4]),
    ),
    "too few counts": (
        "ValueError counts",
        lambda g, new: g.all_gather(new(4 * g.size), _x(4), [4] * (g.size - 1)),
    ),
    "too many counts": (
        "counts",
        lambda g, new: g.reduce_scatter(new(4), _x(4 * g.size), [4] * g.size + [0]),
    ),
    "counts of strings": ("counts", lambda g, new: g.all_gather(new(4 * g.size), _x(4), ["four"] * g.size)),
    "counts of fractions": ("counts", lambda g, new: g.all_gather(new(4 * g.size), _x(4), [3.5] * g.size)),
    "too many outputs": (
        "ValueError output {size}",
        lambda g, new: g.all_gather([new(4)] * (g.size + 1), _x(4)),
    ),
    "output too long": ("ValueError output 8 9", lambda g, new: g.reduce_scatter(new(9), _x(8 * g.size))),
    "wrong sum of input": (
        "input",
        lambda g, new: g.reduce_scatter(new(8), _x(8 * g.size + 5), [8] * g.size),
    ),
    "input not divisible": ("input", lambda g, new: g.reduce_scatter(new(8), _x(8 * g.size + 1))),
    "gather without output": ("output", lambda g, new: g.gather(None, _x(4), g.rank)),
    "scatter without input": ("input", lambda g, new: g.scatter(new(4), None, g.rank)),
    "scatter's output": ("ValueError output 4 5", lambda g, new: g.scatter(new(5), _x(4 * g.size), g.rank)),
    "all_to_all's sum": ("input", lambda g, new: _all_to_all(g, new, [5] * g.size)),
    "all_to_all negative": (
        "input_counts -4",
        lambda g, new: _all_to_all(g, new, [8 * g.size - 4, *[-4] * (g.size - 1)]),
    ),
    "all_to_all odd": ("ValueError", lambda g, new: g.all_to_all(new(4 * g.size + 1), _x(4 * g.size + 1))),
    "root too large": ("ValueError root {size}", lambda g, new: g.broadcast(new(4), g.size)),
    "root negative": ("ValueError root -1", lambda g, new: g.reduce(new(4), -1)),
    "root not a number": ("TypeError root", lambda g, new: g.broadcast(new(4), "0")),
    "unknown op": ("ValueError op median", lambda g, new: g.all_reduce(new(4), "median")),
    "op is a number": ("op", lambda g, new: g.all_reduce(new(4), 3)),
    "band of floats": ("band float32", lambda g, new: g.all_reduce(new(4), "band")),
    "avg of bool": ("avg bool", lambda g, new: g.all_reduce(new(4, torch.bool), "avg")),
    "max of complex": ("max complex64", lambda g, new: g.all_reduce(new(4, torch.complex64), "max")),
    "premul_sum of int": (
        "premul_sum int32",
        lambda g, new: g.all_reduce(new(4, torch.int32), "premul_sum", factor=2.0),
    ),
    "sum of float8": ("sum float8_e4m3fn", lambda g, new: g.all_reduce(new(4, torch.float8_e4m3fn))),
    "no factor": ("factor", lambda g, new: g.all_reduce(new(4), "premul_sum")),
    "factor of a sum": ("factor", lambda g, new: g.all_reduce(new(4), "sum", factor=2.0)),
    "overlapping out": ("ValueError overlap", lambda g, new: _overlap(g, new)),
    "overlapping all_gather": ("ValueError overlap", lambda g, new: _overlap_gather(g, new)),
    "overlapping reduce_scatter": ("ValueError overlap", lambda g, new: _overlap_scatter(g, new)),
    "send to itself": ("ValueError dst {rank}", lambda g, new: g.send(new(4), g.rank)),
    "send to nobody": ("ValueError dst {size}", lambda g, new: g.send(new(4), g.size)),
    "recv from nobody": ("ValueError src -1", lambda g, new: g.recv(new(4), -1)),
    "strided recv": ("tensor contiguous", lambda g, new: g.recv(new(8)[::2], (g.rank + 1) % g.size)),
    "negative timeout": ("ValueError timeout_s -1", lambda g, new: g.barrier(timeout_s=-1.0)),
}


def _quiet(make, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch finds these dtypes old or unripe
        return make(*args, **options)


def _quantized():
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def _all_to_all(g, new, input_counts):
    g.all_to_all(new(4 * g.size), _x(4 * g.size), [4] * g.size, input_counts)


def _overlap(g, new):
    t = new(20)
    g.all_reduce(t[:12], out=t[5:17])


def _overlap_gather(g, new):
    t = new(4 * g.size + 4)
    g.all_gather(t[: 4 * g.size], t[4 * g.rank + 1 : 4 * g.rank + 5])


def _overlap_scatter(g, new):
    t = new(4 * g.size + 4)
    g.reduce_scatter(t[4 * g.rank + 1 : 4 * g.rank + 5], t[: 4 * g.size])


def _works(group):
    t = torch.full((3,), float(group.rank))
    group.all_reduce(t, timeout_s=30)
    return t.tolist() == [group.size * (group.size - 1) / 2] * 3


def _local(group, names, who):
    """Rank `who` makes each bad call, the others nothing; then all make a good one."""
    complaints = []
    for name in names:
        words, call = LOCAL[name]
        if group.rank == who:
            new = Outputs()
            try:
                call(group, new)
            except (TypeError, ValueError) as error:
                text = f"{type(error).__name__}: {error}"
                lacking = [w for w in words.format(size=group.size, rank=group.rank).split() if w not in text]
                if lacking or isinstance(error, unisono.UnisonoError):
                    complaints.append(f"{name}: {text!r} lacks {lacking}")
            except Exception as error:
                complaints.append(f"{name}: {type(error).__name__}: {error}, not TypeError or ValueError")
            else:
                complaints.append(f"{name}: no error")
            if not new.untouched():
                complaints.append(f"{name}: something was written")
        try:
            works = _works(group)
        except unisono.UnisonoError as error:
            raise AssertionError(f"the first call after {name!r}: {error}") from error
        if not works:
            complaints.append(f"{name}: the group gives wrong numbers afterwards")
    return complaints


def _assert_none(results):
    lines = [f"rank {rank}: {line}" for rank, found in enumerate(results) for line in found]
    assert not lines, f"{len(lines)} complaints:\n" + "\n".join(lines)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("who", [0, 1])
def test_wrong_arguments_on_one_rank(pool, size, who):
    _assert_none(pool.run(_local, list(LOCAL), who))


# Ranks that disagree: name -> call(group, odd, new output, count); `odd` is true on the last rank.
ACROSS = {
    "dtype": lambda g, odd, new, n: g.all_reduce(new(n, torch.int32 if odd else torch.float32)),
    "count": lambda g, odd, new, n: g.all_reduce(new(n + odd)),
    "count of nothing": lambda g, odd, new, n: g.all_reduce(new(0 if odd else n)),
    "op": lambda g, odd, new, n: g.all_reduce(new(n), "max" if odd else "sum"),
    "root of broadcast": lambda g, odd, new, n: g.broadcast(new(n), int(odd)),
    "root of reduce": lambda g, odd, new, n: g.reduce(new(n), int(odd)),
    "verb": lambda g, odd, new, n: g.broadcast(new(n), 0) if odd else g.all_reduce(new(n)),
    "barrier against all_reduce": lambda g, odd, new, n: g.barrier() if odd else g.all_reduce(new(n)),
    "count of broadcast": lambda g, odd, new, n: g.broadcast(new(n + odd), 0),
    "counts": lambda g, odd, new, n: _counts_differ(g, odd, new, n),
    "counts of reduce_scatter": lambda g, odd, new, n: _counts_differ_scatter(g, odd, new, n),
    "dtype of all_gather": lambda g, odd, new, n: _dtype_of_all_gather(g, odd, new, n),
    "all_to_all": lambda g, odd, new, n: _all_to_all_differs(g, odd, new, n),
}


def _counts_differ(g, odd, new, n):
    """Each rank's own chunk has n elements in both lists; what the other ranks get differs."""
    counts = [n] * g.size
    counts[0] += bool(odd)
    g.all_gather(new(sum(counts)), torch.ones(counts[g.rank]), counts)


def _counts_differ_scatter(g, odd, new, n):
    counts = [n] * g.size
    counts[0] += bool(odd)
    g.reduce_scatter(new(counts[g.rank]), torch.ones(sum(counts)), counts)


def _dtype_of_all_gather(g, odd, new, n):
    dtype = torch.int32 if odd else torch.float32
    g.all_gather(new(n * g.size, dtype), torch.ones(n, dtype=dtype))


def _all_to_all_differs(g, odd, new, n):
    """The last rank expects one element more from rank 0 than rank 0 sends."""
    received = [n + (odd and r == 0) for r in range(g.size)]
    g.all_to_all(new(sum(received)), torch.ones(n * g.size), received, [n] * g.size)


def _across(group, heap):
    complaints = []
    odd = group.rank == group.size - 1
    for name, call in ACROSS.items():
        for count in (1, 2, 500, 20_000, 400_000):
            new = Outputs()
            case = f"{name}, {count} elements, {'heap' if heap else 'ordinary'}"
            try:
                call(group, odd, lambda *args, new=new: new(*args, heap=heap), count)
            except unisono.MismatchError as error:
                missing = [r for r in range(group.size) if f"rank {r}" not in str(error)]
                if missing:
                    complaints.append(f"{case}: no line for ranks {missing} in {error}")
                if error.rank != group.rank or error.group != group.name or not error.op or error.seq is None:
                    complaints.append(f"{case}: fields {error.op} {error.seq} {error.group} {error.rank}")
            except Exception as error:
                complaints.append(f"{case}: {type(error).__name__}: {error}")
            else:
                complaints.append(f"{case}: no error")
            if not new.untouched():
                complaints.append(f"{case}: something was written")
            if not _works(group):
                complaints.append(f"{case}: the group gives wrong numbers afterwards")
    return complaints


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("heap", [False, True], ids=["ordinary", "heap"])
def test_ranks_that_disagree(pool, size, heap):
    _assert_none(pool.run(_across, heap))


def _async_mismatch(group):
    odd = group.rank == group.size - 1
    good = torch.ones(10)
    before = group.all_reduce(good, async_op=True)
    bad = group.all_reduce(torch.ones(20 + odd), async_op=True)
    after_t = torch.ones(30)
    after = group.all_reduce(after_t, async_op=True)
    before.wait(30)
    with pytest.raises(unisono.MismatchError):
        bad.wait(30)
    assert bad.is_completed() and isinstance(bad.exception(), unisono.MismatchError)
    after.wait(30)
    assert good.tolist() == [float(group.size)] * 10 and after_t.tolist() == [float(group.size)] * 30


@pytest.mark.parametrize("size", [2, 3])
def test_an_async_mismatch_is_that_handles_own(pool, size):
    pool.run(_async_mismatch)


def _p2p_mismatch(group):
    """The receiver's tensor is too small: it says so with both numbers and is not written."""
    if group.rank == 0:
        sending = group.send(torch.ones(20), 1, tag=1, async_op=True)
        with contextlib.suppress(unisono.MismatchError):  # the sender may be told too
            sending.wait(30)
    elif group.rank == 1:
        new = Outputs()
        with pytest.raises(unisono.MismatchError) as caught:
            group.recv(new(15), 0, tag=1, timeout_s=30)
        numbers = set(re.findall(r"\d+", str(caught.value)))
        assert numbers >= {"20", "15"} or numbers >= {"80", "60"}, caught.value  # elements or bytes
        assert new.untouched()
    assert _works(group)


@pytest.mark.parametrize("size", [2])
def test_a_message_of_another_size(pool, size):
    pool.run(_p2p_mismatch)


def _different_counts(group):
    counts = [2, 6] if group.rank == 0 else [4, 4]
    try:
        group.all_gather(torch.zeros(8), torch.zeros(counts[group.rank]), counts)
    except unisono.MismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("size", [2])
def test_ranks_that_disagree_on_counts_see_both(pool, size):
    for text in pool.run(_different_counts):
        assert "out parts of [2, 6]" in text
        assert "out parts of [4, 4]" in text


def test_a_refusal_carries_its_facts():
    assert set(_core.RULES) <= set(errors._RULES), "a rule of the core without words"
    with pytest.raises(ValueError, match=r"argument 'op' must be one of avg, band, .* got 'median'") as caught:
        _core.read_op("median")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, errors.ArgumentValueError)
        assert (error.rule, error.argument, error.got) == ("op_name", "op", "median")
        assert "premul_sum" in error.expected
