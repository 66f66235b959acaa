"""Worlds for the tests of what stands on torch.distributed: the same program on gloo and on unisono, compared.

A program is a top-level function that runs on every rank inside a default process group and returns tensors, in
lists, tuples or dicts. It must not depend on chance but for `seed`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import debug as dtensor_debug

import unisono
from unisono.group import names as groups

_ended: list[dist.ProcessGroup] = []  # the groups of the world before
_turns = itertools.count()  # the same on all ranks, since all run the same programs


@contextlib.contextmanager
def world(group: unisono.Group, backend: str) -> Iterator[dist.ProcessGroup]:
    """A default process group of the pool's ranks, destroyed at the end."""
    store = dist.PrefixStore(f"world-{next(_turns)}", group._store)
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=timedelta(seconds=60))
    try:
        torch.manual_seed(0)
        yield dist.group.WORLD
    finally:
        # gloo's own threads may hold it last, and a gloo group that ends in one of them ends the process.
        _ended[:] = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        # DTensor remembers meshes whose groups are gone now.
        dtensor_debug._clear_python_sharding_prop_cache()
        dtensor_debug._clear_fast_path_sharding_prop_cache()


def on_unisono(group: unisono.Group, program: Callable[..., Any], *args: Any) -> Any:
    """Runs a program on unisono alone; it compares with a single process itself."""
    with world(group, "unisono"):
        return program(*args)


def on_both(group: unisono.Group, program: Callable[..., Any], *args: Any, tolerance: float = 0.0) -> list[str]:
    """Runs a program on gloo, then on unisono; returns where results differ, and fails if nothing was compared."""
    with world(group, "gloo"):
        want = detached(program(*args))
    with world(group, "unisono"):
        assert groups.native(dist.group.WORLD) is not None
        got = detached(program(*args))
    assert leaves(want), "the program returned no tensor to compare"
    return differences(got, want, tolerance)


def differences(got: Any, want: Any, tolerance: float = 0.0, path: str = "result") -> list[str]:
    """Where two results differ by more than `tolerance`, relative and absolute; 0 means: not a bit."""
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != want.dtype:
            return [f"{path}: {_described(got)} instead of {_described(want)}"]
        try:
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            return [f"{path}: {error}"]
        return []
    if isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(want):
            return [f"{path}: {got!r} instead of {want!r}"]
        return [
            line
            for i, pair in enumerate(zip(got, want, strict=True))
            for line in differences(*pair, tolerance, f"{path}[{i}]")
        ]
    if isinstance(want, dict):
        if not isinstance(got, dict) or got.keys() != want.keys():
            return [f"{path}: keys {list(got)} instead of {list(want)}"]
        return [line for key in want for line in differences(got[key], want[key], tolerance, f"{path}[{key!r}]")]
    return [] if got == want else [f"{path}: {got!r} instead of {want!r}"]


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, (list, tuple)) else []


def detached(tree: Any) -> Any:
    """A copy that no later step changes; a DTensor becomes its local part."""
    if isinstance(tree, DTensor):
        tree = tree.to_local()
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: detached(value) for key, value in tree.items()}
    return type(tree)(detached(part) for part in tree) if isinstance(tree, (list, tuple)) else tree


def _described(what: Any) -> str:
    return f"{what.dtype} {list(what.shape)}" if isinstance(what, Tensor) else repr(what)


def seed(*numbers: int) -> torch.Generator:
    """A source of random numbers that depends on these numbers only, such as the rank and the step."""
    generator = torch.Generator()
    generator.manual_seed(sum((n + 1) * 1009**i for i, n in enumerate(numbers)))
    return generator


def randn(*shape: int, by: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=seed(*by)).to(dtype)
