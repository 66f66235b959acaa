"""Groups asked for as "gloo" on unisono against gloo itself: checks, and the switch."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.torch_backend.test_as_gloo import BAD, _options, _words, _x
from unisono.group.names import PYTHON_BACKENDS
from unisono.testing import run_ranks

# What gloo refuses and a group named "unisono" takes, or finds out together with the others.
STRICT = {
    "allgather: one size": lambda pg, r, s: pg.allgather([[*[_x()] * (s - 1), _x(2)]], [_x()]),
    "allgather: one type": lambda pg, r, s: pg.allgather([[*[_x()] * (s - 1), _x(1, torch.float64)]], [_x()]),
    "allgather: length": lambda pg, r, s: pg.allgather([[_x()] * (s + 1)], [_x()]),
    "gather: one size": lambda pg, r, s: pg.gather(
        [[*[_x()] * (s - 1), _x(2)]] if r == 0 else [], [_x(1 if r == 0 else 2)], _options("GatherOptions", r)
    ),
    "scatter: one size": lambda pg, r, s: pg.scatter(
        [_x()], [[*[_x()] * (s - 1), _x(2)]], _options("ScatterOptions", r)
    ),
    "alltoall: inputs": lambda pg, r, s: pg.alltoall([_x()] * s, [_x()] * (s - 1)),
    "alltoall: outputs": lambda pg, r, s: pg.alltoall([_x()] * (s - 1), [_x()] * s),
    "alltoall: one size": lambda pg, r, s: pg.alltoall([_x()] * s, [*[_x()] * (s - 1), _x(2)]),
    "alltoall: one type": lambda pg, r, s: pg.alltoall([*[_x()] * (s - 1), _x(1, torch.int32)], [_x()] * s),
    "alltoall: types": lambda pg, r, s: pg.alltoall([_x(1, torch.int32)] * s, [_x()] * s),
    "alltoall: sizes": lambda pg, r, s: pg.alltoall([_x(2)] * s, [_x()] * s),
    "allreduce_coalesced: types": lambda pg, r, s: pg.allreduce_coalesced([_x(), _x(1, torch.int32)]),
    "allreduce_coalesced: sparse": lambda pg, r, s: pg.allreduce_coalesced([_x().to_sparse(), _x().to_sparse()]),
    "allreduce_coalesced: layouts": lambda pg, r, s: pg.allreduce_coalesced([_x(), _x().to_sparse()]),
    "allgather_coalesced: lists": lambda pg, r, s: pg.allgather_coalesced([[_x()]] * (s + 1), [_x()]),
    "allgather_coalesced: size": lambda pg, r, s: pg.allgather_coalesced([[_x(2)], *[[_x()]] * (s - 1)], [_x()]),
    "allgather_coalesced: type": lambda pg, r, s: pg.allgather_coalesced([[_x(1, torch.int32)]] * s, [_x()]),
    "allgather_coalesced: length": lambda pg, r, s: pg.allgather_coalesced([[_x(), _x()]] * s, [_x()]),
    "alltoall_base: gaps": lambda pg, r, s: pg.alltoall_base(_x(s), _x(2 * s)[::2], [], []),
}


def _served(group, path):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(path, group.size)
    real = dist.ProcessGroupGloo(dist.PrefixStore("real", store), group.rank, group.size)
    unisono.serve_gloo()
    unisono.serve_gloo()  # twice is once
    ours = dist.ProcessGroupGloo(dist.PrefixStore("ours", store), group.rank, group.size)
    assert type(ours).__name__ == "ServedGroup" and isinstance(real, dist.ProcessGroupGloo)
    complaints = []
    for name, call in (STRICT | BAD).items():
        errors = []
        for pg in (real, ours):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                call(pg, group.rank, group.size).wait()
            errors.append(caught.value)
        if _words(errors[0]) not in str(errors[1]) or not isinstance(errors[1], type(errors[0])):
            complaints.append(f"{name}: {errors[1]!r} lacks {errors[0]!r}")
    total = torch.ones(1)
    ours.allreduce([total]).wait()
    assert total.item() == group.size, "the group is out of step"
    unisono.serve_gloo(False)
    again = dist.ProcessGroupGloo(dist.PrefixStore("again", store), group.rank, group.size)
    assert type(again) is type(real) is dist.ProcessGroupGloo and type(ours) is not type(real)
    real.barrier().wait()
    return complaints


@pytest.mark.parametrize("size", [2, 3])
def test_refused_as_gloo_does(tmp_path, size):
    found = run_ranks(size, _served, str(tmp_path / "store"))
    assert not any(found), "\n".join(line for lines in found for line in lines)


def _alone(group, path):
    """One rank gives what neither takes: an error at once, not a wait for a group of gloo."""
    unisono.serve_gloo()
    store = dist.FileStore(path, group.size)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    if group.rank == 1:
        for wrong in (torch.ones(3, device="meta"), torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8)):
            with pytest.raises(RuntimeError):
                dist.all_reduce(wrong)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == group.size
    with pytest.raises(unisono.MismatchError):
        dist.all_reduce(torch.ones(3 + group.rank))
    dist.destroy_process_group()


def test_a_mistake_of_one_rank(tmp_path):
    run_ranks(2, _alone, str(tmp_path / "store"), timeout_s=60)


DEFAULT = """
import torch, torch.distributed as dist
dist.Backend.default_device_backend_map["cpu"] = "unisono"
{more}
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
group = dist.init_device_mesh("cpu", (1,)).get_group()
print(type(dist.group.WORLD).__name__, type(group).__name__, dist.get_backend_config())
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(type(dist.group.WORLD).__name__, dist.get_backend_config())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("more", ["", "import unisono; unisono.serve_gloo(); unisono.serve_gloo(False)"])
def test_the_default_for_cpu_without_any_of_that(more):
    done = subprocess.run([sys.executable, "-c", DEFAULT.format(more=more)], capture_output=True, text=True, timeout=90)
    assert done.stdout.split() == [
        *("ProcessGroupUnisono", "ProcessGroupUnisono", "cpu:unisono"),
        *("ProcessGroup", "cpu:gloo,cuda:gloo"),
    ], done.stderr


MIXED = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("cpu:gloo,meta:fake", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
print(type(dist.group.WORLD).__name__, type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__)
dist.destroy_process_group()
dist.set_debug_level(dist.DebugLevel.DETAIL)
dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
print(type(dist.group.WORLD).__name__)
"""


def test_beside_other_backends_and_in_debug_mode():
    """torch 2.13 cannot combine a Python group with others: these get gloo, and are told so; later versions can."""
    env = {**os.environ, "UNISONO_GLOO": "1", "UNISONO_LOG": "info"}
    done = subprocess.run([sys.executable, "-c", MIXED], env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "ProcessGroup" and done.stdout.split()[-1] == "ServedGroup", done.stdout
    assert done.stdout.split()[1] == ("ServedBackend" if PYTHON_BACKENDS else "ProcessGroupGloo"), done.stdout
    assert ("cannot have a Python backend beside meta:fake" in done.stderr) == (not PYTHON_BACKENDS)


def test_a_broken_unisono_leaves_gloo(tmp_path):
    (tmp_path / "unisono").mkdir()
    (tmp_path / "unisono" / "__init__.py").write_text("raise ImportError('this unisono is broken')\n")
    env = {**os.environ, "UNISONO_GLOO": "1", "PYTHONPATH": str(tmp_path)}
    program = "import torch.distributed as d; print(d.ProcessGroupGloo.__mro__[1].__name__)"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "Backend", done.stderr
    assert 'UNISONO_GLOO: groups that ask for "gloo" get gloo: import unisono: this unisono is broken' in done.stderr
