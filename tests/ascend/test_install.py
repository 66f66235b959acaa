"""What install() puts in place, and what it leaves alone. Every test has a process of its own."""

import os
import sys

import pytest

import unisono.ascend
from unisono.testing import run_ranks


def write_package(folder, name):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("REAL = True\n")


def _install_and_import(group, folder, force):
    import importlib

    sys.path.append(folder)
    names = unisono.ascend.install(force=force)
    assert unisono.ascend.install(force=force) == names  # twice is fine
    real = []
    for name in ("torch_npu", "mindspeed", "mindspore"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "REAL"):
            real.append(name)
        else:
            assert module.__unisono__
    return names, real, [entry.rpartition(os.sep)[2] for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)]


ALL = ["torch_npu", "mindspeed", "mindspore"]


@pytest.mark.parametrize(
    "installed, force, names, real",
    [
        ([], False, ALL, []),
        (["mindspore"], False, ["torch_npu", "mindspeed"], ["mindspore"]),
        (["mindspeed"], False, ["torch_npu", "mindspore"], ["mindspeed"]),
        # The stand-in for mindspeed takes emulated tensors, so a real torch_npu keeps it out.
        (["torch_npu"], False, ["mindspore"], ["torch_npu"]),
        (["torch_npu", "mindspeed", "mindspore"], False, [], ["torch_npu", "mindspeed", "mindspore"]),
        (["torch_npu", "mindspeed", "mindspore"], True, ALL, []),
    ],
)
def test_real_packages_are_left_alone(installed, force, names, real, tmp_path):
    for name in installed:
        write_package(tmp_path, name)
    ((got_names, got_real, path),) = run_ranks(1, _install_and_import, str(tmp_path), force)
    assert got_names == names
    assert got_real == real
    assert set(path) & set(ALL) == set(names)


def _plain_folder(group, folder):
    os.makedirs(f"{folder}/mindspore/data")
    sys.path.insert(0, folder)
    assert "mindspore" in unisono.ascend.install()
    import mindspore

    assert mindspore.__unisono__


def test_a_folder_of_that_name_is_no_package(tmp_path):
    run_ranks(1, _plain_folder, str(tmp_path))


def _other_device(group):
    import torch

    torch.utils.rename_privateuse1_backend("other")
    try:
        unisono.ascend.install()
    except RuntimeError as error:
        return str(error)


def test_another_device_in_the_way():
    (text,) = run_ranks(1, _other_device)
    assert "another package has named it 'other'" in text


def _as_torch_does(group, names):
    """What happens in a child of a process with stand-ins when it imports torch."""
    import torch

    import unisono_autoload as _autoload

    os.environ.pop("UNISONO_ASCEND", None)
    _autoload.register()
    assert not hasattr(torch, "npu")
    os.environ["UNISONO_ASCEND"] = names
    _autoload.register()
    return unisono.ascend.installed(), hasattr(torch, "npu")


def test_children_get_the_same():
    assert run_ranks(1, _as_torch_does, "torch_npu,mindspore") == [(["torch_npu", "mindspore"], True)]
    assert run_ranks(1, _as_torch_does, "mindspore") == [(["mindspore"], False)]


def test_unknown_names():
    with pytest.raises(ValueError, match="must be of torch_npu, mindspeed, mindspore, got torch_xla"):
        unisono.ascend.install(["torch_xla"])
    assert unisono.ascend.installed() == []


def _devices(group, environment):
    import torch

    os.environ.update(environment)
    unisono.ascend.install()
    return torch.npu.device_count()


@pytest.mark.parametrize(
    "environment, count",
    [
        ({}, 8),
        ({"LOCAL_WORLD_SIZE": "12"}, 12),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1"}, 2),
        ({"ASCEND_RT_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_number_of_devices(environment, count):
    assert run_ranks(1, _devices, environment) == [count]
