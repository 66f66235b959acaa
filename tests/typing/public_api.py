"""What type checkers see of the public API. `make lint` has mypy check this file; it is never run."""

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import unisono
from unisono import comm_func
from unisono.testing import RankFailure, RankPool, run_ranks


def verbs(group: unisono.Group, t: Tensor) -> None:
    assert_type(group.rank, int)
    assert_type(group.ranks, list[int])
    assert_type(group.all_reduce(t, "max", out=t), unisono.Handle | None)
    assert_type(group.all_gather([t, t], t, counts=(1, 2)), unisono.Handle | None)
    assert_type(group.reduce_scatter(t, t, [1, 2], async_op=True), unisono.Handle | None)
    assert_type(group.recv(t, 0), unisono.Handle | int)
    assert_type(group.split([0, 1]), unisono.Group | None)
    assert_type(group.shrink(), tuple[unisono.Group, list[int]])
    with group as same:
        assert_type(same, unisono.Group)
    group.all_reduce("no tensor")  # type: ignore[arg-type]
    group.all_gather(t, t, counts=2)  # type: ignore[arg-type]


def tensors(module: nn.Module) -> None:
    assert_type(unisono.empty(2, 3, dtype=torch.bfloat16), Tensor)
    assert_type(unisono.full((2,), 1.0), Tensor)
    assert_type(unisono.tensor([1, 2]), Tensor)
    assert_type(unisono.is_shared(unisono.zeros(2)), bool)


def functional(t: Tensor, group: unisono.Group) -> None:
    result, handle = comm_func.all_reduce(t, "sum", group)
    assert_type(result, Tensor)
    del handle


def fused(t: Tensor, model: nn.Linear) -> None:
    assert_type(unisono.matmul_all_reduce(t, unisono.PreparedWeight(t)), Tensor)
    assert_type(unisono.tensor_parallel(model), nn.Module)


def add(group: unisono.Group, x: float) -> float:
    return x + group.rank


def ranks() -> None:
    assert_type(run_ranks(2, add, 1.0), list[float])
    assert_type(run_ranks(2, add, 1.0, check=False), list[float | RankFailure])
    with RankPool(2) as pool:
        assert_type(pool.run(add, 1.0), list[float])


def errors(error: unisono.PeerLostError) -> None:
    assert_type(error.peers, tuple[int, ...])
    assert_type(error.op, str)
    caught: unisono.UnisonoError | TimeoutError = unisono.CollectiveTimeoutError()
    del caught
