"""How "unisono" becomes known to torch: by import, by torch's plug-ins, and that neither can break `import torch`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono
import unisono_autoload
from tests.torch_stack.worlds import world
from unisono.group import names as groups

ROOT = Path(__file__).resolve().parents[2]

USE = """
import sys
import torch
import torch.distributed as dist
assert ("unisono" in sys.modules) == {imported}, "unisono was imported with torch"
{before}
dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
x = torch.tensor([3.0])
dist.all_reduce(x)
assert x.item() == 3.0 and dist.get_backend() == "unisono"
dist.destroy_process_group()
print("used")
"""


def run(folder: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new Python that finds unisono installed, with the entry point that pyproject.toml has."""
    entry = re.search(
        r'^\[project.entry-points."torch.backends"\]\n(.*?)\n\n', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert entry, "no entry point in pyproject.toml"
    name, target = re.fullmatch(r'(\w+) = "(.*)"', entry[1]).groups()
    info = folder / "unisono-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unisono\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {target}\n")
    source = Path(unisono_autoload.__file__).parents[1]
    paths = [str(folder), str(source), str(Path(unisono.__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100, cwd=folder
    )


def test_without_an_import(tmp_path):
    done = run(tmp_path, USE.format(imported=False, before="") + USE.format(imported=True, before="import unisono"))
    assert done.stdout.split() == ["used", "used"], done.stderr


def test_auto_loading_switched_off(tmp_path):
    program = """
import torch.distributed as dist
assert "unisono" not in dist.Backend.backend_list
import unisono
""" + USE.format(imported=True, before="")
    done = run(tmp_path, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.split() == ["used"], done.stderr


def test_a_broken_unisono_does_not_break_torch(tmp_path):
    (tmp_path / "unisono").mkdir()
    (tmp_path / "unisono" / "__init__.py").write_text("raise ImportError('this unisono is broken')\n")
    done = run(tmp_path, 'import torch\nprint("torch is there")\n' + USE.format(imported=False, before=""))
    assert done.stdout.strip() == "torch is there"
    assert "ImportError: this unisono is broken" in done.stderr.splitlines()[-1]


def test_register_never_raises(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no more backends")

    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    monkeypatch.delitem(dist.Backend._plugins, "UNISONO")
    unisono_autoload.register()


def test_registering_again_keeps_what_is_there():
    before = dist.Backend._plugins["UNISONO"]
    unisono_autoload.register()
    assert dist.Backend._plugins["UNISONO"] is before
    assert dist.Backend.backend_capability["unisono"] == ["cpu"]
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


# What the operators do that unisono has kernels of its own for, on a group of another backend.
OTHERS_KERNELS = """
import torch
import torch.distributed as dist
{before}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ops = torch.ops._c10d_functional
for group in (dist.group.WORLD.group_name, dist.group.WORLD):
    gathered, scattered = torch.zeros(2), torch.zeros(2)
    print(ops.wait_tensor(ops.all_gather_into_tensor_out(torch.ones(2), 1, group, out=gathered)), gathered)
    print(ops.wait_tensor(ops.reduce_scatter_tensor_out(torch.ones(2), "sum", 1, group, out=scattered)), scattered)
for call in (
    lambda: ops.reduce_scatter_tensor_out(torch.ones(2), "median", 1, group, out=scattered),
    lambda: ops.reduce_scatter_tensor_out(torch.ones(3), "avg", 1, group, out=scattered),
    lambda: ops.all_gather_into_tensor_out(torch.ones(3), 1, group, out=gathered),
    lambda: ops.all_gather_into_tensor_out(torch.ones(2).long(), 1, group, out=gathered),
    lambda: ops.batch_p2p_ops(["isend"], [0], [0], [torch.ones(2)], dist.group.WORLD.group_name),
):
    try:
        print(call())
    except Exception as error:
        print(type(error).__name__, str(error).split("(")[0].split("] ")[-1])  # without the time and the port
dist.destroy_process_group()
"""


def test_groups_of_other_backends_get_what_torchs_kernels_give(tmp_path):
    with_us, without = (run(tmp_path, OTHERS_KERNELS.format(before=line)) for line in ("import unisono", ""))
    assert len(without.stdout.splitlines()) == 9, without.stderr
    assert with_us.stdout == without.stdout, with_us.stderr


MANY_ON_GLOO = """
import torch
import torch.distributed as dist
import unisono

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
for _ in range(1000):
    gathered, scattered = torch.zeros(2), torch.zeros(2)
    ops.wait_tensor(ops.all_gather_into_tensor_out(torch.ones(2), 1, group, out=gathered))
    ops.wait_tensor(ops.reduce_scatter_tensor_out(torch.ones(2), "sum", 1, group, out=scattered))
dist.destroy_process_group()
print("all came back")
"""


def test_gloos_threads_get_the_interpreters_lock(tmp_path):
    """Which they need to let go of tensors, while they hold the lock that the next call takes."""
    done = run(tmp_path, MANY_ON_GLOO)
    assert done.stdout == "all came back\n", done.stderr


def beside_each_other(group) -> list:
    """A default group named with its device, gloo groups beside it, and the other way round."""
    found = []
    for default, other in (("cpu:unisono", "gloo"), ("cpu:gloo", "unisono"), ("unisono", "cpu:unisono")):
        with world(group, default):
            second = dist.new_group(backend=other)
            for process_group in (None, second):
                x = torch.ones(3) * (group.rank + 1)
                dist.all_reduce(x, group=process_group)
                found.append(x.tolist() == [10.0] * 3)
            natives = [groups.native(g) is not None for g in (dist.group.WORLD, second)]
            found.append(natives == ["unisono" in default, "unisono" in other])
    return found


def test_beside_gloo(stack_pool, stack):
    assert stack_pool.run(beside_each_other) == [[True] * 9] * 4


def mixed(group, backend: str) -> str:
    try:
        with world(group, backend):
            return "made"
    except (RuntimeError, AssertionError) as error:
        return str(error)


@pytest.mark.skipif(groups.PYTHON_BACKENDS, reason="this torch can combine them")
@pytest.mark.parametrize("backend", ["cpu:unisono,cuda:nccl", "cuda:gloo,cpu:unisono"])
def test_two_backends_in_one_group_are_refused(stack_pool, stack, backend):
    other = '"cuda:nccl"' if "nccl" in backend else '"cuda:gloo"'
    for text in stack_pool.run(mixed, backend):
        assert "cannot combine unisono with" in text and other in text and "Make two groups" in text
