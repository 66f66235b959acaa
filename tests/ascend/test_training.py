"""A training loop gives the same numbers on the emulated device with hccl as on the CPU with gloo."""

import pytest
import torch

from unisono.testing import run_ranks

from . import on_hccl, training


def _train(group, how, backend, device, folder):
    with on_hccl.default_group(group, backend, folder):
        device = torch.device(device, group.rank) if device == "npu" else torch.device(device)
        if how == "replicated":
            return training.train_replicated(group.rank, device)
        if device.type == "npu":
            from torch_npu import distributed as uneven
        else:
            import unisono as uneven
        return training.train_sharded(group.rank, device, uneven)


@pytest.mark.parametrize("how", ["replicated", "sharded"])
def test_training(how, npu_ranks, tmp_path):
    for folder in ("npu", "cpu"):
        (tmp_path / folder).mkdir()
    on_npu = npu_ranks.run(_train, how, "hccl", "npu", str(tmp_path / "npu"))
    # In ranks of their own: gloo's threads stay for a while after DDP.
    on_cpu = run_ranks(2, _train, how, "gloo", "cpu", str(tmp_path / "cpu"))
    for (losses, parameters), (same_losses, same_parameters) in zip(on_npu, on_cpu, strict=True):
        assert losses == pytest.approx(same_losses, rel=1e-5)
        assert losses[-1] < losses[0]
        for a, b in zip(parameters, same_parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(on_npu[0][1], on_npu[1][1], strict=True):
        assert torch.equal(a, b)  # both ranks have the same model
