"""Bad input: gloo's classes and words where gloo checks; MismatchError with a line per rank where ranks disagree."""

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
    "all_reduce_coalesced: dtypes": lambda g, s: _quiet(
        dist.all_reduce_coalesced, [_x(), _x(3, torch.int32)], group=g
    ),
    "all_reduce: complex max": lambda g, s: dist.all_reduce(_x(3, torch.complex64), R.MAX, group=g),
    "all_gather: not a list": lambda g, s: dist.all_gather(_x(), _x(), group=g),
    "all_gather: list with a number": lambda g, s: dist.all_gather([_x(), 3], _x(), group=g),
    "all_gather: dtypes": lambda g, s: dist.all_gather([_x(4, torch.int32) for _ in range(s)], _x(4), group=g),
    "reduce_scatter: dtypes": lambda g, s: dist.reduce_scatter(_x(4), [_x(4, torch.int32)] * s, group=g),
    "reduce_scatter: not a list": lambda g, s: dist.reduce_scatter(_x(4), _x(4 * s), group=g),
    "all_to_all: not a list": lambda g, s: dist.all_to_all(_x(4), _x(4), group=g),
    "all_to_all_single: dtypes": lambda g, s: dist.all_to_all_single(_x(2 * s), _x(2 * s, torch.int32), group=g),
    "gather: no list at the root": lambda g, s: dist.gather(_x(4), None, dst=dist.get_rank(), group=g),
    "gather: a list elsewhere": lambda g, s: dist.gather(
        _x(4), [_x(4)] * s, dst=(dist.get_rank() + 1) % s, group=g
    ),
    "scatter: no list at the root": lambda g, s: dist.scatter(_x(4), None, src=dist.get_rank(), group=g),
    "scatter: a list elsewhere": lambda g, s: dist.scatter(
        _x(4), [_x(4)] * s, src=(dist.get_rank() + 1) % s, group=g
    ),
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
    "send: no such rank": lambda g, s: dist.send(_x(4), group=g, group_dst=s),
    "recv: no such rank": lambda g, s: dist.recv(_x(4), group=g, group_src=s),
    "send: negative tag": lambda g, s: dist.isend(_x(4), (dist.get_rank() + 1) % s, group=g, tag=-1),
    "all_gather: too few outputs": lambda g, s: dist.all_gather([_x(4) for _ in range(s - 1)], _x(4), group=g),
    "all_gather: too many outputs": lambda g, s: dist.all_gather([_x(4) for _ in range(s + 1)], _x(4), group=g),
    "all_gather: no outputs": lambda g, s: dist.all_gather([], _x(4), group=g),
    "all_gather_single: too short": lambda g, s: dist.all_gather_single(_x(4 * s - 1), _x(4), group=g),
    "all_gather_single: dtypes": lambda g, s: dist.all_gather_single(_x(4 * s, torch.int32), _x(4), group=g),
    "reduce_scatter: too few inputs": lambda g, s: dist.reduce_scatter(_x(4), [_x(4)] * (s - 1), group=g),
    "reduce_scatter: too many inputs": lambda g, s: dist.reduce_scatter(_x(4), [_x(4)] * (s + 1), group=g),
    "reduce_scatter_single: not divisible": lambda g, s: dist.reduce_scatter_single(_x(4), _x(4 * s + 1), group=g),
    "reduce_scatter_single: dtypes": lambda g, s: dist.reduce_scatter_single(_x(4), _x(4 * s, torch.int32), group=g),
    "gather: too few outputs": lambda g, s: dist.gather(_x(4), [_x(4)] * (s - 1), dst=dist.get_rank(), group=g),
    "gather: too many outputs": lambda g, s: dist.gather(_x(4), [_x(4)] * (s + 1), dst=dist.get_rank(), group=g),
    "gather: sizes": lambda g, s: dist.gather(_x(4), [_x(5) for _ in range(s)], dst=dist.get_rank(), group=g),
    "scatter: too few inputs": lambda g, s: dist.scatter(_x(4), [_x(4)] * (s - 1), src=dist.get_rank(), group=g),
    "scatter: too many inputs": lambda g, s: dist.scatter(_x(4), [_x(4)] * (s + 1), src=dist.get_rank(), group=g),
    "scatter: sizes": lambda g, s: dist.scatter(_x(4), [_x(5) for _ in range(s)], src=dist.get_rank(), group=g),
    "all_to_all_single: not divisible": lambda g, s: dist.all_to_all_single(_x(2 * s + 1), _x(2 * s + 1), group=g),
    "all_to_all_single: too few splits": lambda g, s: dist.all_to_all_single(
        _x(2 * s), _x(2 * s), [2] * (s - 1), [2] * (s - 1), group=g
    ),
    "all_to_all_single: wrong sum": lambda g, s: dist.all_to_all_single(
        _x(2 * s), _x(2 * s), [3] * s, [3] * s, group=g
    ),
    "all_reduce: strided": lambda g, s: dist.all_reduce(_x(24)[::2], group=g),
    "all_reduce: transposed": lambda g, s: dist.all_reduce(_x(24).view(4, 6).t(), group=g),
    "broadcast: strided": lambda g, s: dist.broadcast(_x(24)[::2], 0, group=g),
    "reduce: strided": lambda g, s: dist.reduce(_x(24)[::2], 0, group=g),
    "all_gather: strided input": lambda g, s: dist.all_gather([_x(12) for _ in range(s)], _x(24)[::2], group=g),
    "all_gather_single: strided output": lambda g, s: dist.all_gather_single(_x(8 * s)[::2], _x(4), group=g),
    "all_gather_single: strided input": lambda g, s: dist.all_gather_single(_x(4 * s), _x(8)[::2], group=g),
    "reduce_scatter_single: strided": lambda g, s: dist.reduce_scatter_single(_x(4), _x(8 * s)[::2], group=g),
    "gather: strided": lambda g, s: dist.gather(
        _x(8)[::2], [_x(4) for _ in range(s)] if dist.get_rank() == 0 else None, dst=0, group=g
    ),
    "scatter: strided output": lambda g, s: dist.scatter(
        _x(8)[::2], [_x(4) for _ in range(s)] if dist.get_rank() == 0 else None, src=0, group=g
    ),
    "all_to_all_single: strided": lambda g, s: dist.all_to_all_single(_x(4 * s)[::2], _x(2 * s), group=g),
    "send: strided": lambda g, s: dist.isend(_x(8)[::2], (dist.get_rank() + 1) % s, group=g),
    "recv: strided": lambda g, s: dist.irecv(_x(8)[::2], (dist.get_rank() + 1) % s, group=g),
    "all_reduce: band of floats": lambda g, s: dist.all_reduce(_x(4), R.BAND, group=g),
    "all_reduce: float8": lambda g, s: dist.all_reduce(_x(4).to(torch.float8_e4m3fn), group=g),
    "all_reduce: meta": lambda g, s: dist.all_reduce(torch.ones(3, device="meta"), group=g),
    "broadcast: meta": lambda g, s: dist.broadcast(torch.ones(3, device="meta"), 0, group=g),
    "all_reduce: sparse max": lambda g, s: dist.all_reduce(_sparse(), R.MAX, group=g),
    "all_reduce: csr": lambda g, s: dist.all_reduce(_quiet(torch.eye(3).to_sparse_csr), group=g),
    "broadcast: sparse": lambda g, s: dist.broadcast(_sparse(), 0, group=g),
    "reduce: sparse": lambda g, s: dist.reduce(_sparse(), 0, group=g),
    # methods of the group
    "pg.allreduce: two tensors": lambda g, s: g.allreduce([_x(), _x(3)]),
    "pg.allreduce: no tensors": lambda g, s: g.allreduce([]),
    "pg.broadcast: no tensors": lambda g, s: g.broadcast([], dist.BroadcastOptions()),
    "pg.broadcast: two tensors": lambda g, s: g.broadcast([_x(), _x(3)], dist.BroadcastOptions()),
    "pg.reduce: no tensors": lambda g, s: g.reduce([], dist.ReduceOptions()),
    "pg.allgather: no inputs": lambda g, s: g.allgather([[_x()]], []),
    "pg.allgather: no lists": lambda g, s: g.allgather([], [_x()]),
    "pg.reduce_scatter: no inputs": lambda g, s: g.reduce_scatter([_x()], []),
    "pg.allreduce_coalesced: no tensors": lambda g, s: g.allreduce_coalesced([], dist.AllreduceCoalescedOptions()),
    "pg.send: no tensors": lambda g, s: g.send([], (dist.get_rank() + 1) % s, 0),
    "pg.send: two tensors": lambda g, s: g.send([_x(), _x()], (dist.get_rank() + 1) % s, 0),
}
