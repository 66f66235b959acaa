"""Groups of backend hccl, and what stands on them, behave as scripts expect."""

import pytest

from . import on_hccl


def _run(group, name, backend, folder):
    with on_hccl.default_group(group, backend, folder):
        getattr(on_hccl, name)(group.rank)


@pytest.mark.parametrize("name", [probe.__name__ for probe in on_hccl.PROBES])
def test_hccl(name, npu_ranks, tmp_path):
    npu_ranks.run(_run, name, "hccl", str(tmp_path))


@pytest.mark.parametrize("backend", ["cpu:gloo,npu:hccl", "npu:hccl,cpu:gloo"])
def test_both_kinds_of_tensors(backend, npu_ranks, tmp_path):
    npu_ranks.run(_run, "both_kinds_of_tensors", backend, str(tmp_path))
