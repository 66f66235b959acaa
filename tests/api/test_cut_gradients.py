"""Calls that autograd does not see say so once, where a gradient is lost, and point to comm_func."""

import warnings

import pytest
import torch
import torch.distributed as dist

from unisono import comm_func
from unisono.testing import run_ranks


def refused(call):
    """Makes a call that loses a gradient, in a program that made errors of warnings: nothing is sent, each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="autograd does not see this call"):
            call()


def silent(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


def losses(group, folder):
    leaf = torch.ones(2, requires_grad=True)
    followed = leaf * 3
    refused(lambda: group.all_reduce(followed))
    refused(lambda: group.all_reduce(leaf, out=torch.empty(2)))
    refused(lambda: group.all_gather(torch.empty(4), leaf, async_op=True))
    refused(lambda: group.reduce_scatter(torch.empty(2), [torch.ones(2), leaf]))
    refused(lambda: group.send(leaf, 1 - group.rank))
    store = dist.FileStore(f"{folder}/store", group.size)
    dist.init_process_group("unisono", store=store, rank=group.rank, world_size=group.size)
    refused(lambda: dist.all_reduce(followed))
    refused(lambda: dist.all_gather([torch.empty(2), torch.empty(2)], leaf))
    dist.destroy_process_group()


def harmless(group):
    parameter = torch.ones(2, requires_grad=True)
    followed = parameter * 2
    silent(lambda: group.broadcast(parameter, 0))  # a leaf, in place: its own gradient is what is wanted
    silent(lambda: group.all_reduce(followed.detach()))
    silent(lambda: group.recv(followed, 0) if group.rank else group.send(followed.detach(), 1))
    with torch.no_grad():
        silent(lambda: group.all_reduce(followed))
    total, _ = comm_func.all_reduce(followed, group=group)
    silent(lambda: total.sum().backward())
    assert parameter.grad is not None


def once(group):
    lost = torch.ones(2, requires_grad=True) * 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            group.all_reduce(lost)
    (told,) = caught
    assert "unisono.comm_func" in str(told.message)
    assert told.filename == "test_cut_gradients.py"  # the line of the user's call


def later(group):
    """Not every call is looked at, for speed; one that is made again and again is seen soon."""
    plain, lost = torch.ones(1), torch.ones(2, requires_grad=True) * 3
    alone = group.split([group.rank])  # ranks need not see it in the same call
    for _ in range(1000):
        alone.all_reduce(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="autograd does not see this call"):
            for _ in range(100):
                alone.all_reduce(lost)
    alone.close()


def body(group, folder):
    losses(group, folder)
    harmless(group)
    later(group)
    once(group)


def test_who_loses_a_gradient_is_told(tmp_path):
    run_ranks(2, body, str(tmp_path))
