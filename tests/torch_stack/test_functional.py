"""Functional and autograd collectives on unisono against gloo.

Values are whole numbers, so that sums have the same bits in any order.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as dnn
from torch.distributed.device_mesh import init_device_mesh


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 7 + dist.get_rank() * 3) % 11 - 5).reshape(shape).to(dtype)


def waited(value):
    if isinstance(value, (list, tuple)):
        return [waited(part) for part in value]
    return fc.wait_tensor(value) if isinstance(value, torch.Tensor) else value


def functional(dtype: torch.dtype) -> dict:
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    x, tall = mine(3, 2, dtype=dtype), mine(8, 3, dtype=dtype)
    mesh = init_device_mesh("cpu", (2, 2))
    results = {f"all_reduce {op}": fc.all_reduce(x, op, group) for op in ("sum", "min", "max", "product")}
    results |= {
        "broadcast": fc.broadcast(x, 2, group),
        "by ranks": fc.all_reduce(x, "sum", list(range(size))),
        "by mesh": fc.all_reduce(x, "sum", (mesh, 1)),
        "by name": fc.all_reduce(x, "sum", group.group_name),
        "all_gather": fc.all_gather_single(x, 0, group),
        "all_gather dim 1": fc.all_gather_single(x, 1, group),
        "reduce_scatter": fc.reduce_scatter_single(tall, "sum", 0, group),
        "reduce_scatter dim 1": fc.reduce_scatter_single(mine(3, 8, dtype=dtype), "sum", 1, group),
        "all_to_all": fc.all_to_all_single(tall, None, None, group),
        "all_to_all splits": fc.all_to_all_single(
            mine(sum(rank + j for j in range(size)), 2, dtype=dtype),
            [rank + j for j in range(size)],
            [rank + j for j in range(size)],
            group,
        ),
        "permute": fc.permute_tensor(mine(6, dtype=dtype), [1, 2, 3, 0], group),
        "all_reduce_coalesced": fc.all_reduce_coalesced([x, tall], "sum", group),
        "all_gather_coalesced": fc.all_gather_single_coalesced([x, tall], group),
        "reduce_scatter_coalesced": fc.reduce_scatter_single_coalesced(
            [tall, mine(4, dtype=dtype)], "sum", [0, 0], group
        ),
    }
    in_place = x.clone()
    fc.all_reduce_inplace(in_place, "sum", group)
    gathered = torch.empty(4 * 3, 2, dtype=dtype)
    fc.all_gather_tensor_inplace(gathered, x, group)
    scattered = torch.empty(2, 3, dtype=dtype)
    fc.reduce_scatter_tensor_inplace(scattered, tall, "sum", group)
    exchanged = torch.empty(8, 3, dtype=dtype)
    fc.all_to_all_inplace(exchanged, tall, group=group)
    listed = [torch.empty(3, 2, dtype=dtype) for _ in range(size)]
    fc.all_gather_inplace(listed, x, group)
    results |= {"in place": in_place, "gathered": gathered, "scattered": scattered, "exchanged": exchanged}
    results["listed"] = listed
    return {name: waited(value) for name, value in results.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_functional_collectives(stack, dtype):
    stack.compare(functional, dtype)


def messages() -> dict:
    """What torch.compile makes of isend, irecv and batch_isend_irecv."""
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(3, 2)
    sent = ops.isend(mine(3, 2), after, 0, name)
    received = ops.wait_tensor(ops.irecv(got, before, 0, name))
    ops.wait_tensor(sent)
    buffers = [mine(3, 2), torch.zeros(3, 2), mine(5) * 2, torch.zeros(5)]
    batch = ops.batch_p2p_ops(["isend", "irecv"] * 2, [after, before, before, after], [0] * 4, buffers, name)
    for tensor in batch:
        ops.wait_tensor(tensor)
    return {"received": received, "buffer": got, "batch": buffers}


def test_functional_messages(stack):
    stack.compare(messages)


def with_gradients() -> dict:
    group = dist.group.WORLD
    results = {}
    for name, call in {
        "all_gather": lambda x: fc.all_gather_single_autograd(x, 0, group),
        "reduce_scatter": lambda x: fc.reduce_scatter_single_autograd(x, "sum", 0, group),
        "all_to_all": lambda x: fc.all_to_all_single_autograd(x, [2] * 4, [2] * 4, group),
        "all_reduce": lambda x: fc.all_reduce(x, "sum", group),
    }.items():
        x = mine(8, 3).requires_grad_()
        y = fc.wait_tensor(call(x))
        (y * mine(*y.shape)).sum().backward()
        results[name] = [y, x.grad]
    return results


def test_functional_gradients(stack):
    stack.compare(with_gradients)


def autograd() -> dict:
    """torch.distributed.nn.functional: collectives with gradients, eager."""
    size, rank = dist.get_world_size(), dist.get_rank()
    results = {}
    for name, call in {
        "broadcast": lambda x: dnn.broadcast(x, 1),
        "all_reduce": lambda x: dnn.all_reduce(x),
        "reduce": lambda x: dnn.reduce(x, 2),
        "all_gather": lambda x: torch.stack(dnn.all_gather(x)),
        "gather": lambda x: torch.stack(dnn.gather(x, 1)),
        "scatter": lambda x: dnn.scatter(list(x.unbind(0)[:size]), 3),
        "reduce_scatter": lambda x: dnn.reduce_scatter(torch.empty(3), list(x.unbind(0)[:size])),
        "all_to_all": lambda x: torch.stack(
            dnn.all_to_all([torch.empty(3) for _ in range(size)], list(x.unbind(0)[:size]))
        ),
        "all_to_all_single": lambda x: dnn.all_to_all_single(torch.empty(8, 3), x),
    }.items():
        x = mine(8, 3).requires_grad_()
        y = call(x)
        (y * mine(*y.shape)).sum().backward()
        # torch's reduce and gather leave parts of their results unset on ranks other than the root.
        unset = (name == "reduce" and rank != 2) or (name == "gather" and rank != 1)
        results[name] = [x.grad] if unset else [y, x.grad]
    return results


def test_autograd_collectives(stack):
    stack.compare(autograd)


def into_out() -> dict:
    """The forms that write into a tensor given, which torch 2.13 sends past a process group written in Python."""
    group, x, tall = dist.group.WORLD, mine(3, 2), mine(8, 3)
    gathered, scattered = torch.full((12, 2), -1.0), torch.full((2, 3), -1.0)
    ops = torch.ops._c10d_functional
    first = ops.wait_tensor(ops.all_gather_into_tensor_out(x, 4, group.group_name, out=gathered))
    results = {"returned": first, "gathered": gathered}
    if hasattr(ops, "reduce_scatter_tensor_out"):
        second = ops.wait_tensor(ops.reduce_scatter_tensor_out(tall, "sum", 4, group.group_name, out=scattered))
        results |= {"returned too": second, "scattered": scattered}
    for name, value in {"returned": gathered, "returned too": scattered}.items():
        assert name not in results or results[name].data_ptr() == value.data_ptr()
    return results


def test_into_out(stack):
    stack.compare(into_out)


def unused_results() -> list:
    """A functional collective's result handed on to torch.distributed before anybody has waited for it."""
    group = dist.group.WORLD
    x = fc.all_reduce(mine(4, 3), "sum", group)
    assert isinstance(x, fc.AsyncCollectiveTensor)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    gathered = torch.empty(16, 3)
    dist.all_gather_into_tensor(gathered, fc.all_reduce(mine(4, 3), "sum", group))
    listed = [torch.empty(4, 3) for _ in range(4)]
    dist.all_gather(listed, fc.all_reduce(mine(4, 3), "min", group))
    got, rank = torch.empty(4, 3), dist.get_rank()
    sending = dist.isend(fc.all_reduce(mine(4, 3), "min", group), (rank + 1) % 4)
    dist.recv(got, (rank - 1) % 4)
    sending.wait()
    return [x + 0, gathered, listed, got]


def test_results_nobody_waited_for(stack):
    stack.compare(unused_results)


def failing() -> list[str]:
    """Errors come out of wait_tensor."""
    texts = []
    for call in (
        lambda: fc.all_reduce(mine(2 + dist.get_rank()), "sum", dist.group.WORLD),
        lambda: torch.ops._c10d_functional.all_gather_into_tensor_out(
            mine(2), 4, dist.group.WORLD.group_name, out=torch.empty(7)
        ),
    ):
        try:
            fc.wait_tensor(call())
            texts.append("no error")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_errors(stack):
    for texts in stack.run(failing):
        assert texts[0].startswith("MismatchError"), texts
        assert "no error" not in texts[1], texts
