"""npu tensors, models on them and torch.npu behave as scripts expect."""

import pytest

from . import npu_models, npu_module, on_npu

PROBES = {probe.__name__: probe for module in (on_npu, npu_models, npu_module) for probe in module.PROBES}


def _run(group, name):
    PROBES[name]()


@pytest.mark.parametrize("name", PROBES)
def test_device(name, npu_rank):
    npu_rank.run(_run, name)
