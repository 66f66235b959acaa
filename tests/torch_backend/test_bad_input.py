"""Bad input: gloo's classes and words where gloo checks; MismatchError with a line per rank where ranks disagree."""

import os
import re
import warnings

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.torch_backend import world

R = dist.ReduceOp


def _x(count=12, dtype=torch.float32):
    return torch.ones(count, dtype=dtype)


def _quiet(make, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch finds some of these old
        return make(*args, **options)


def _sparse(dtype=torch.float32):
    return torch.ones(3, dtype=dtype).to_sparse()


def _managed(group, functions):
    with dist._coalescing_manager(group):
        for fn in functions:
            fn()


# What is wrong -> the call, made by all ranks with a group of gloo and one of unisono; s is the group's size.
BAD = {
    # torch's own checks of arguments, before any group sees them
    "all_reduce: a list": lambda g, s: dist.all_reduce([_x()], group=g),
    "all_reduce: None": lambda g, s: dist.all_reduce(None, group=g),
    "all_reduce_coalesced: not a list": lambda g, s: _quiet(dist.all_reduce_coalesced, 3, group=g),
    "all_reduce_coalesced: dtypes": lambda g, s: _quiet(dist.all_reduce_coalesced, [_x(), _x(3, torch.int32)], group=g),
    "all_reduce: complex max": lambda g, s: dist.all_reduce(_x(3, torch.complex64), R.MAX, group=g),
    "all_gather: not a list": lambda g, s: dist.all_gather(_x(), _x(), group=g),
    "all_gather: list with a number": lambda g, s: dist.all_gather([_x(), 3], _x(), group=g),
    "all_gather: dtypes": lambda g, s: dist.all_gather([_x(4, torch.int32) for _ in range(s)], _x(4), group=g),
    "reduce_scatter: dtypes": lambda g, s: dist.reduce_scatter(_x(4), [_x(4, torch.int32)] * s, group=g),
    "reduce_scatter: not a list": lambda g, s: dist.reduce_scatter(_x(4), _x(4 * s), group=g),
    "all_to_all: not a list": lambda g, s: dist.all_to_all(_x(4), _x(4), group=g),
    "all_to_all_single: dtypes": lambda g, s: dist.all_to_all_single(_x(2 * s), _x(2 * s, torch.int32), group=g),
    "gather: no list at the root": lambda g, s: dist.gather(_x(4), None, dst=dist.get_rank(), group=g),
    "gather: a list elsewhere": lambda g, s: dist.gather(_x(4), [_x(4)] * s, dst=(dist.get_rank() + 1) % s, group=g),
    "scatter: no list at the root": lambda g, s: dist.scatter(_x(4), None, src=dist.get_rank(), group=g),
    "scatter: a list elsewhere": lambda g, s: dist.scatter(_x(4), [_x(4)] * s, src=(dist.get_rank() + 1) % s, group=g),
    "broadcast: no such global rank": lambda g, s: dist.broadcast(_x(4), s, group=g),
    "broadcast: two roots": lambda g, s: dist.broadcast(_x(4), 0, group=g, group_src=0),
    "broadcast: no root": lambda g, s: dist.broadcast(_x(4), group=g),
    "send: to itself": lambda g, s: dist.send(_x(4), dist.get_rank(), group=g),
    "batch_isend_irecv: not a list": lambda g, s: dist.batch_isend_irecv(3),
    "P2POp: not an op": lambda g, s: dist.P2POp(dist.broadcast, _x(4), 0, group=g),
    "managed: mixed": lambda g, s: _managed(
        g, [lambda: dist.all_reduce(_x(), group=g), lambda: dist.all_gather_single(_x(s), _x(1), group=g)]
    ),
    # the group's own checks
    "broadcast: root too large": lambda g, s: dist.broadcast(_x(4), group=g, group_src=s),
    "broadcast: root negative": lambda g, s: dist.broadcast(_x(4), group=g, group_src=-1),
    "reduce: root too large": lambda g, s: dist.reduce(_x(4), group=g, group_dst=s),
    "reduce: root negative": lambda g, s: dist.reduce(_x(4), group=g, group_dst=-1),
    "gather: root too large": lambda g, s: dist.gather(_x(4), None, group=g, group_dst=s),
    "scatter: root too large": lambda g, s: dist.scatter(_x(4), None, group=g, group_src=s),
    "send: negative tag": lambda g, s: dist.isend(_x(4), (dist.get_rank() + 1) % s, group=g, tag=-1),
    "all_gather: too few outputs": lambda g, s: dist.all_gather([_x(4) for _ in range(s - 1)], _x(4), group=g),
    "all_gather: too many outputs": lambda g, s: dist.all_gather([_x(4) for _ in range(s + 1)], _x(4), group=g),
    "all_gather: no outputs": lambda g, s: dist.all_gather([], _x(4), group=g),
    "all_gather_single: dtypes": lambda g, s: dist.all_gather_single(_x(4 * s, torch.int32), _x(4), group=g),
    "reduce_scatter: too few inputs": lambda g, s: dist.reduce_scatter(_x(4), [_x(4)] * (s - 1), group=g),
    "reduce_scatter: too many inputs": lambda g, s: dist.reduce_scatter(_x(4), [_x(4)] * (s + 1), group=g),
    "gather: too few outputs": lambda g, s: dist.gather(_x(4), [_x(4)] * (s - 1), dst=dist.get_rank(), group=g),
    "gather: too many outputs": lambda g, s: dist.gather(_x(4), [_x(4)] * (s + 1), dst=dist.get_rank(), group=g),
    "gather: sizes": lambda g, s: dist.gather(_x(4), [_x(5) for _ in range(s)], dst=dist.get_rank(), group=g),
    "scatter: too few inputs": lambda g, s: dist.scatter(_x(4), [_x(4)] * (s - 1), src=dist.get_rank(), group=g),
    "scatter: too many inputs": lambda g, s: dist.scatter(_x(4), [_x(4)] * (s + 1), src=dist.get_rank(), group=g),
    "scatter: sizes": lambda g, s: dist.scatter(_x(4), [_x(5) for _ in range(s)], src=dist.get_rank(), group=g),
    "all_to_all_single: too few splits": lambda g, s: dist.all_to_all_single(
        _x(2 * s), _x(2 * s), [2] * (s - 1), [2] * (s - 1), group=g
    ),
    "all_to_all_single: wrong sum": lambda g, s: dist.all_to_all_single(
        _x(2 * s), _x(2 * s), [3] * s, [3] * s, group=g
    ),
    "send: strided": lambda g, s: dist.isend(_x(8)[::2], (dist.get_rank() + 1) % s, group=g),
    "recv: strided": lambda g, s: dist.irecv(_x(8)[::2], (dist.get_rank() + 1) % s, group=g),
    "all_reduce: band of floats": lambda g, s: dist.all_reduce(_x(4), R.BAND, group=g),
    "all_reduce: float8": lambda g, s: dist.all_reduce(_x(4).to(torch.float8_e4m3fn), group=g),
    "all_reduce: sparse max": lambda g, s: dist.all_reduce(_sparse(), R.MAX, group=g),
    "all_reduce: csr": lambda g, s: dist.all_reduce(_quiet(torch.eye(3).to_sparse_csr), group=g),
    "broadcast: sparse": lambda g, s: dist.broadcast(_sparse(), 0, group=g),
    "reduce: sparse": lambda g, s: dist.reduce(_sparse(), 0, group=g),
    # methods of the group
    "pg.allreduce: no tensors": lambda g, s: g.allreduce([]),
    "pg.broadcast: no tensors": lambda g, s: g.broadcast([], dist.BroadcastOptions()),
    "pg.reduce: no tensors": lambda g, s: g.reduce([], dist.ReduceOptions()),
    "pg.allgather: no inputs": lambda g, s: g.allgather([[_x()]], []),
    "pg.allreduce_coalesced: no tensors": lambda g, s: g.allreduce_coalesced([], dist.AllreduceCoalescedOptions()),
    "pg.send: no tensors": lambda g, s: g.send([], (dist.get_rank() + 1) % s, 0),
    "pg.send: two tensors": lambda g, s: g.send([_x(), _x()], (dist.get_rank() + 1) % s, 0),
}

# Where gloo waits for its time-out, does nothing, or tells of its own source files: words that must be in our error.
BAD_FOR_US = {
    "send: no such rank": ("invalid dst rank: {s}", lambda g, s: dist.send(_x(4), group=g, group_dst=s)),
    "recv: no such rank": ("invalid src rank: {s}", lambda g, s: dist.recv(_x(4), group=g, group_src=s)),
    "reduce_scatter_single: not divisible": (
        "input tensor must be the same size as output size times world size",
        lambda g, s: dist.reduce_scatter_single(_x(4), _x(4 * s + 1), group=g),
    ),
    "reduce_scatter_single: dtypes": (
        "invalid tensor type",
        lambda g, s: dist.reduce_scatter_single(_x(4), _x(4 * s, torch.int32), group=g),
    ),
    "all_gather_single: too short": (
        "output tensor size must be equal to world_size times input tensor size",
        lambda g, s: dist.all_gather_single(_x(4 * s - 1), _x(4), group=g),
    ),
    "all_to_all_single: not divisible": (
        "Tensor's dim 0 does not divide equally across group size",
        lambda g, s: dist.all_to_all_single(_x(2 * s + 1), _x(2 * s + 1), group=g),
    ),
    "all_reduce: meta": (
        "No backend type associated with device type meta",
        lambda g, s: dist.all_reduce(torch.ones(3, device="meta"), group=g),
    ),
    "broadcast: meta": (
        "No backend type associated with device type meta",
        lambda g, s: dist.broadcast(torch.ones(3, device="meta"), 0, group=g),
    ),
    "pg.allgather: no lists": (
        "requires input/output tensor lists to have the same length",
        lambda g, s: g.allgather([], [_x()]),
    ),
    "pg.reduce_scatter: no inputs": (
        "requires input/output tensor lists to have the same length",
        lambda g, s: g.reduce_scatter([_x()], []),
    ),
    "pg.allreduce: two sizes": ("invalid tensor size at index 1", lambda g, s: g.allreduce([_x(), _x(3)])),
    "pg.broadcast: two sizes": (
        "invalid tensor size at index 1",
        lambda g, s: g.broadcast([_x(), _x(3)], dist.BroadcastOptions()),
    ),
}


def _error_of(call, group):
    """The error of a call that every rank makes; None if it made none."""
    try:
        work = call(group, dist.get_world_size())
        if work is not None:
            work.wait()
    except Exception as error:
        return error
    return None


def _plain(error):
    """The words: without the names of classes and objects, without what torch adds for those who build torch."""
    text = re.sub(r"ProcessGroup(Gloo|Unisono)(::\w+)?:? ?|<.*?>|\{.*?\}", "", str(error))
    text = re.split(r" \(expected TensorOptions|, but no fallback|\. This could be|\n", text)[0]
    return text.replace("'c10d::allreduce_'", "'c10d::all_reduce_'").strip(" ()")


def _works(group):
    t = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(t, group=group)
    size = dist.get_world_size()
    return t.tolist() == [size * (size - 1) / 2] * 3


def _as_gloo_does():
    complaints = []
    mine = world.groups["reversed"].group  # not the default group, about whose ranks torch asks less
    for name, call in BAD.items():
        theirs, ours = _error_of(call, world.gloo), _error_of(call, mine)
        if theirs is None:
            complaints.append(f"{name}: gloo has no error, ours is {ours!r}")
        elif not isinstance(ours, type(theirs)):
            complaints.append(f"{name}: {ours!r} is no {type(theirs).__name__}: {theirs}")
        elif _plain(theirs) not in _plain(ours):
            complaints.append(f"{name}: {_plain(ours)!r} lacks {_plain(theirs)!r}")
        if not _works(mine):
            complaints.append(f"{name}: the group gives wrong numbers afterwards")
    if not _works(world.gloo):
        complaints.append("gloo gives wrong numbers afterwards")
    return complaints


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_refuses_it_in_the_same_class_and_words(ranks, size):
    ranks.check(_as_gloo_does)


def _in_words_of_torch():
    complaints = []
    for name, (words, call) in BAD_FOR_US.items():
        error = _error_of(call, dist.group.WORLD)
        if not isinstance(error, RuntimeError) or words.format(s=dist.get_world_size()) not in str(error):
            complaints.append(f"{name}: {error!r} lacks {words!r}")
        if not _works(None):
            complaints.append(f"{name}: the group gives wrong numbers afterwards")
    return complaints


@pytest.mark.parametrize("size", [2, 3])
def test_where_gloo_is_silent_the_words_are_torchs(ranks, size):
    ranks.check(_in_words_of_torch)


# Ranks that disagree: name -> call(group, odd, n, async_op); `odd` is 1 on the group's last rank, else 0.
def _t(n, dtype=torch.float32):
    return torch.full((n,), 7, dtype=dtype)


def _dtype(odd):
    return torch.int32 if odd else torch.float32


def _root(g):
    return g.rank() == 0


ACROSS = {
    "all_reduce: dtype": lambda g, s, odd, n, a: dist.all_reduce(_t(n, _dtype(odd)), group=g, async_op=a),
    "all_reduce: shape": lambda g, s, odd, n, a: dist.all_reduce(_t(n + odd), group=g, async_op=a),
    "all_reduce: op": lambda g, s, odd, n, a: dist.all_reduce(_t(n), R.MAX if odd else R.SUM, group=g, async_op=a),
    "all_reduce: avg": lambda g, s, odd, n, a: dist.all_reduce(_t(n), R.AVG if odd else R.SUM, group=g, async_op=a),
    "reduce: root": lambda g, s, odd, n, a: dist.reduce(_t(n), group_dst=odd, group=g, async_op=a),
    "reduce: op": lambda g, s, odd, n, a: dist.reduce(
        _t(n), op=R.MIN if odd else R.SUM, group_dst=0, group=g, async_op=a
    ),
    "broadcast: root": lambda g, s, odd, n, a: dist.broadcast(_t(n), group_src=odd, group=g, async_op=a),
    "broadcast: shape": lambda g, s, odd, n, a: dist.broadcast(_t(n + odd), group_src=0, group=g, async_op=a),
    "broadcast: dtype": lambda g, s, odd, n, a: dist.broadcast(_t(n, _dtype(odd)), group_src=0, group=g, async_op=a),
    "all_gather: shape": lambda g, s, odd, n, a: dist.all_gather(
        [_t(n + odd) for _ in range(s)], _t(n + odd), group=g, async_op=a
    ),
    "all_gather_single: dtype": lambda g, s, odd, n, a: dist.all_gather_single(
        _t(n * s, _dtype(odd)), _t(n, _dtype(odd)), group=g, async_op=a
    ),
    "all_gather_single: shape": lambda g, s, odd, n, a: dist.all_gather_single(
        _t((n + odd) * s), _t(n + odd), group=g, async_op=a
    ),
    "reduce_scatter: shape": lambda g, s, odd, n, a: dist.reduce_scatter(
        _t(n + odd), [_t(n + odd) for _ in range(s)], group=g, async_op=a
    ),
    "reduce_scatter_single: op": lambda g, s, odd, n, a: dist.reduce_scatter_single(
        _t(n), _t(n * s), R.PRODUCT if odd else R.SUM, group=g, async_op=a
    ),
    "gather: shape": lambda g, s, odd, n, a: dist.gather(
        _t(n + odd), [_t(n) for _ in range(s)] if _root(g) else None, group_dst=0, group=g, async_op=a
    ),
    "scatter: shape": lambda g, s, odd, n, a: dist.scatter(
        _t(n + odd), [_t(n) for _ in range(s)] if _root(g) else None, group_src=0, group=g, async_op=a
    ),
    "all_to_all_single: splits": lambda g, s, odd, n, a: dist.all_to_all_single(
        _t(n * s + odd), _t(n * s), [n + odd] + [n] * (s - 1), [n] * s, group=g, async_op=a
    ),
    "all_to_all: dtype": lambda g, s, odd, n, a: dist.all_to_all(
        [_t(n, _dtype(odd)) for _ in range(s)], [_t(n, _dtype(odd)) for _ in range(s)], group=g, async_op=a
    ),
    "another function": lambda g, s, odd, n, a: (
        dist.broadcast(_t(n), group_src=0, group=g, async_op=a) if odd else dist.all_reduce(_t(n), group=g, async_op=a)
    ),
    "barrier against all_reduce": lambda g, s, odd, n, a: (
        dist.barrier(group=g, async_op=a) if odd else dist.all_reduce(_t(n), group=g, async_op=a)
    ),
}


def _disagree(group_name):
    members = world.groups[group_name]
    if members.group is None:
        return []
    group, size = members.group, len(members.ranks)
    odd = int(group.rank() == size - 1)
    complaints = []
    for index, (name, call) in enumerate(ACROSS.items()):
        for n in (1, 500, 70_000):
            case = f"{name}, {n} elements in {group_name}"
            is_async = bool((index + n) % 2)
            try:
                work = call(group, size, odd, n, is_async)
                if work is not None:
                    work.wait()
            except unisono.MismatchError as error:
                lines = re.findall(r"rank (\d+) .*test_bad_input.py:\d+", str(error))
                if sorted(map(int, lines)) != list(range(size)):
                    complaints.append(f"{case}: lines for ranks {lines} only in {error}")
                if (error.rank, error.group) != (group.rank(), group.unisono_group.name) or not error.op:
                    complaints.append(f"{case}: fields {error.op} {error.seq} {error.group} {error.rank}")
                if is_async and not (work.is_completed() and not work.is_success() and work.exception() is not None):
                    complaints.append(f"{case}: {work} is not completed without success")
            except Exception as error:
                complaints.append(f"{case}: {error!r}")
            else:
                complaints.append(f"{case}: no error")
    t = torch.ones(2)
    dist.all_reduce(t, group=group)
    if t.tolist() != [size, size]:
        complaints.append(f"{group_name} gives wrong numbers afterwards")
    return complaints


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("group_name", ["world", "reversed"])
def test_ranks_that_disagree_get_a_line_for_each(ranks, size, group_name):
    assert os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF") == "OFF"
    ranks.check(_disagree, group_name)


def _sparse_shapes():
    odd = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(unisono.MismatchError) as caught:
        dist.all_reduce(torch.eye(4 + odd).to_sparse())
    for rank in range(dist.get_world_size()):
        assert f"rank {rank} " in str(caught.value), caught.value
    assert _works(None)


@pytest.mark.parametrize("size", [3])
def test_sparse_tensors_of_different_shapes(ranks, size):
    ranks.run(_sparse_shapes)
