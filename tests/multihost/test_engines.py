"""What carries bytes between hosts: another backend by a setting; which address is chosen, and said."""

import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

import unisono
from tests.multihost.pretended import LAYOUTS, over_hosts
from unisono.base import addresses, settings
from unisono.testing import run_ranks
from unisono.transport.hosts import engine

# Beside this Python, as the wheels of MPI libraries have it, or on the path.
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")

made = []


def _make(store, rank, size, timeout):
    made.append(size)
    return ProcessGroupGloo(store, rank, size, timeout)


def with_engine(group, name):
    if "OTHER" not in dist.Backend._plugins:
        dist.Backend.register_backend("other", _make, devices=["cpu"])
    settings.hosts_engine = name
    try:
        with over_hosts(group, LAYOUTS["2+2"]) as over:
            tensor = torch.ones(100_000)
            over.all_reduce(tensor)
            return tensor[-1].item(), len(made)
    except ValueError as error:
        return str(error), 0
    finally:
        settings.hosts_engine = "gloo"


@pytest.mark.parametrize("size", [4])
def test_another_backend(pool, size):
    assert pool.run(with_engine, "other") == [(4.0, 1)] * size


def no_engine(group):
    settings.hosts_engine = "nobody"
    try:
        with over_hosts(group, LAYOUTS["2+2"]):
            return ""
    except ValueError as error:
        return str(error)
    finally:
        settings.hosts_engine = "gloo"


@pytest.mark.parametrize("size", [4])
def test_an_unknown_engine_is_refused(pool, size):
    assert all("got 'nobody'" in text for text in pool.run(no_engine))


def log_of(group):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("unisono")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    chosen = os.environ.pop("GLOO_SOCKET_IFNAME", None)  # set in the ranks of the pool by other tests
    try:
        with over_hosts(group, LAYOUTS["2+2"]):
            return lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        if chosen is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = chosen


@pytest.mark.parametrize("size", [4])
def test_the_address_is_said(pool, size):
    for lines in pool.run(log_of):
        assert any("gloo on " in line for line in lines), lines


def test_addresses(monkeypatch):
    assert "127.0.0.1" in addresses.addresses()
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.choose_address(["192.0.2.9"], ["127.0.0.1"]) == "127.0.0.1"
    monkeypatch.setattr(addresses, "address_towards", {"127.0.0.1": "127.0.0.1", "10.1.1.1": "10.1.1.2"}.get)
    # A host whose name resolves to loopback is still reached by its other address.
    assert addresses.choose_address([], ["127.0.1.1", "10.1.1.1"]) == "10.1.1.2"


def test_mpi_says_what_it_needs():
    pytest.importorskip("mpi4py", reason="mpi4py is an optional extra")
    program = """
import torch.distributed as dist
from unisono.transport.hosts import engine
engine.open_engine("mpi", dist.HashStore(), 0, 99, "127.0.0.1", 5.0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "RuntimeError" in done.stderr and "mpiexec" in done.stderr


def test_gloo_is_asked_for_tls():
    """Its settings reach it: the same answer as without unisono, whether this torch has TLS or not."""
    program = """
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from unisono.transport.hosts import engine
for make in (
    lambda: ProcessGroupGloo.create_device(hostname="127.0.0.1"),
    lambda: engine.open_engine("gloo", dist.HashStore(), 0, 1, "127.0.0.1", 5.0),
):
    try:
        make()
        print("made")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""
    env = {**os.environ, "GLOO_DEVICE_TRANSPORT": "TCP_TLS"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    plain, ours = done.stdout.splitlines()
    assert plain == ours and plain != "made", done.stdout  # no key was given


@pytest.mark.skipif(MPIEXEC is None, reason="there is no mpiexec")
def test_over_mpi():
    pytest.importorskip("mpi4py", reason="mpi4py is an optional extra")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {  # of Open MPI; others do not know them
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    command = [MPIEXEC, "-n", "4", sys.executable, "-m", "tests.multihost.mpi_program", str(port)]
    done = subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("is fine") == 4, done.stdout + done.stderr


def test_without_mpi4py(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    with pytest.raises(ImportError, match="needs mpi4py"):
        engine.open_engine("mpi", dist.HashStore(), 0, 2, "127.0.0.1", 5.0)
    assert unisono.base.settings.hosts_engine == "gloo"


def profiled(group):
    """Receives are posted while the profiler runs, and end when it is long gone: torch's events of them crashed."""
    names = set()
    with over_hosts(group, LAYOUTS["2+2"]) as over:
        for _ in range(5):
            with torch.profiler.profile(record_shapes=True) as profile:
                over.all_reduce(torch.ones(4))
                over.all_reduce(torch.ones(100_000))
            names |= {event.name for event in profile.events()}
    return sorted(name for name in names if "gloo" in name)


def test_messages_are_hidden_from_the_profiler():
    assert run_ranks(4, profiled) == [[]] * 4  # processes of their own: the profiler leaves a thread
