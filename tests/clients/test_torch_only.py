"""The programs that need nothing but torch; the others need packages, and run by `make clients`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients.compare import difference
from tests.clients.run import PROGRAMS, declared, rows_of
from unisono.testing import run_ranks


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "program", ["fsdp1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pipeline", "checkpoint"))]
)
def test_same_as_gloo(program: str) -> None:
    found = rows_of(program, [2])
    assert found and all(row.fine for row in found), [row.outcome for row in found]


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_programs_say_what_they_need(path: Any) -> None:
    assert isinstance(declared(path.read_text())["REQUIREMENTS"], list)


def test_a_difference_is_found() -> None:
    ours = {"losses": [1.0, 2.0], "model": torch.ones(3)}
    assert difference(ours, {"losses": [1.0, 2.0], "model": torch.ones(3)}) == 0.0
    assert difference(ours, {"losses": [1.0, 2.0], "model": torch.tensor([1.0, 1.0, 1.5])}) == pytest.approx(1 / 3)
    assert difference(float("nan"), 1.0) == float("inf")
    with pytest.raises(ValueError, match="losses"):
        difference(ours, {"losses": [1.0], "model": torch.ones(3)})
    with pytest.raises(ValueError, match="float64"):
        difference(torch.ones(3), torch.ones(3).double())


def _fail_in_backward(group: Any, path: str) -> Any:
    dist.init_process_group("unisono", store=dist.FileStore(path, 2), rank=group.rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    if group.rank == 1:
        dist.group.WORLD.abort()
        return None
    with pytest.raises(RuntimeError, match="AbortedError: all_reduce") as caught:
        model(torch.ones(2, 4)).sum().backward()
    return type(caught.value).__name__


def test_errors_of_a_ddp_backward_are_runtime_errors(tmp_path: Any) -> None:
    assert run_ranks(2, _fail_in_backward, str(tmp_path / "store")) == ["RuntimeError", None]
