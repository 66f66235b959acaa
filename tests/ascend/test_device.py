"""npu tensors and torch.npu behave as scripts expect."""

import pytest

from . import on_npu


def _run(group, name):
    getattr(on_npu, name)()


@pytest.mark.parametrize("name", [probe.__name__ for probe in on_npu.PROBES])
def test_device(name, npu_rank):
    npu_rank.run(_run, name)
