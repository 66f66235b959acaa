"""Gathers and reduce-scatters as vLLM and SGLang call them, on unisono's groups and on gloo's."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.serving import rows, sglang
from unisono.testing import run_ranks

SIZES = [[500, 1, 256], [0, 3, 0], [0, 0, 0], [4, 4, 4]]


def _values(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(size * 6).reshape(size, 6) + 1000 * rank).to(dtype)


def _on(group: Any, backend: str, path: str, body: Any) -> None:
    dist.init_process_group(backend, store=dist.FileStore(path, group.size), rank=group.rank, world_size=group.size)
    try:
        body(dist.group.WORLD, group.rank, group.size)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def _gather(group: Any, rank: int, size: int) -> None:
    for sizes in SIZES:
        whole = torch.cat([_values(r, sizes[r]) for r in range(size)])
        mine = _values(rank, sizes[rank])
        assert torch.equal(rows.all_gatherv(group, mine, 0, sizes), whole)
        for dim in (1, -1):
            found = rows.all_gatherv(group, mine.t(), dim, sizes)
            assert torch.equal(found, whole.t()) and found.is_contiguous()
        mixed = [mine, mine.to(torch.int64), mine.bfloat16()[:, :1], mine > 3]
        expected = [whole, whole.to(torch.int64), whole.bfloat16()[:, :1], whole > 3]
        found = rows.all_gatherv(group, mixed, 0, sizes)
        assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(found, expected, strict=True))
    assert rows.all_gatherv(group, _values(rank, 2)).shape == (2 * size, 6)


def _reduce_scatter(group: Any, rank: int, size: int) -> None:
    for sizes in SIZES:
        mine = _values(rank, sum(sizes))
        total = sum(_values(r, sum(sizes)) for r in range(size)).split(sizes)[rank]
        assert torch.equal(rows.reduce_scatterv(group, mine, 0, sizes), total)
        found = rows.reduce_scatterv(group, mine.t(), -1, sizes)
        assert torch.equal(found, total.t()) and found.is_contiguous()
    assert rows.reduce_scatterv(group, torch.ones(2, 3 * size)).shape == (2, 3)
    with pytest.raises((RuntimeError, ValueError)):
        rows.reduce_scatterv(group, torch.ones(5, 2), 0, [1] * size)


def _in_sglang(group: Any, rank: int, size: int) -> None:
    coordinator = SimpleNamespace(cpu_group=group)
    sizes = SIZES[0]
    whole = torch.cat([_values(r, sizes[r]) for r in range(size)])
    output = torch.empty(sum(sizes), 6)
    found = sglang.all_gatherv(_never, coordinator, _values(rank, sizes[rank]), sizes=sizes, output=output)
    assert found is output and torch.equal(output, whole)
    part = torch.empty(sizes[rank], 6)
    assert sglang.reduce_scatterv(_never, coordinator, whole, output=part, sizes=sizes) is part
    assert torch.equal(part, size * _values(rank, sizes[rank]))
    with pytest.raises(ValueError, match="output"):
        sglang.all_gatherv(_never, coordinator, [part], sizes=sizes, output=output)


def _never(*args: Any) -> None:
    raise AssertionError("CPU tensors go unisono's way")


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
@pytest.mark.parametrize("body", [_gather, _reduce_scatter, _in_sglang])
def test_three_ranks(body: Any, backend: str, tmp_path: Any) -> None:
    run_ranks(3, _on, backend, str(tmp_path / "store"), body)


def test_other_devices_go_their_own_way() -> None:
    tensor = torch.empty(2, device="meta")
    assert sglang.all_gatherv(lambda *given: given, "self", tensor, [2]) == ("self", tensor, [2], None)
    assert sglang.reduce_scatterv(lambda *given: given, "self", [tensor], None, [2]) == ("self", [tensor], None, [2])


def test_signatures_are_sglangs() -> None:
    """Those of ``GroupCoordinator`` in SGLang 0.5.23, behind the function that a hook stands around."""
    names = [list(inspect.signature(hook).parameters)[2:] for hook in (sglang.all_gatherv, sglang.reduce_scatterv)]
    assert names == [["input_", "sizes", "output"], ["input_", "output", "sizes"]]
