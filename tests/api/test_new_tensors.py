"""Tensors made in shared memory take torch's arguments; and the package shows only its public names."""

import subprocess
import sys

import pytest
import torch

import unisono

MAKERS = {
    "empty": lambda m, **k: m.empty(2, 3, **k),
    "zeros": lambda m, **k: m.zeros((2, 3), **k),
    "ones": lambda m, **k: m.ones(2, 3, **k),
    "full": lambda m, **k: m.full((2, 3), 2.5, **k),
    "tensor": lambda m, **k: m.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], **k),
}


@pytest.mark.parametrize("options", [{}, {"device": "cpu", "requires_grad": True}, {"dtype": torch.bfloat16}])
@pytest.mark.parametrize("name", MAKERS)
def test_as_torch(name, options):
    ours, theirs = MAKERS[name](unisono, **options), MAKERS[name](torch, **options)
    assert unisono.is_shared(ours)
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    assert ours.requires_grad == theirs.requires_grad and ours.is_leaf
    if name != "empty":
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("value", [1, 2.0, True, 1j])
def test_full_takes_the_dtype_of_its_value(value):
    assert torch.equal(unisono.full((2,), value), torch.full((2,), value))


@pytest.mark.parametrize("name", MAKERS)
def test_other_devices_are_refused(name):
    with pytest.raises(ValueError, match="shared memory is on the CPU, got device 'meta'"):
        MAKERS[name](unisono, device="meta")


def test_only_public_names_are_listed():
    code = "import unisono; print(*dir(unisono)); print(unisono.testing.run_ranks.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    names, function = done.stdout.splitlines()
    assert sorted([*unisono.__all__, "__version__"]) == names.split()
    assert function == "run_ranks"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = unisono.nothing
