"""Where ranks are measured: each on one CPU, or all under a CPU quota that leaves nothing behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.bench import quota, rows
from unisono.bench.plan import Place
from unisono.testing import RankPool

WHY = quota.why_no_quota()
needs_quota = pytest.mark.skipif(WHY is not None, reason=f"no quota here: {WHY}")


def cpus_of_threads(group):
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]


def own_control_groups(group):
    return Path("/proc/self/cgroup").read_text()


def left_over():
    return [folder for parent, _ in quota._parents() for folder in parent.glob(f"{quota.NAME}*")]


def test_ranks_are_pinned_round_robin():
    cpus = sorted(os.sched_getaffinity(0))
    with RankPool(3) as pool:
        pool.run(rows.settle, True, None, own_group=True)
        found = pool.run(cpus_of_threads)
    assert [set(map(frozenset, threads)) for threads in found] == [{frozenset({cpus[r % len(cpus)]})} for r in range(3)]


@needs_quota
def test_a_quota_holds_and_is_removed():
    with RankPool(2) as other, quota.cpu_quota(150) as tasks:
        folder = Path(tasks).parent
        with RankPool(2) as pool:
            pool.run(rows.settle, False, tasks, own_group=True)
            assert all(folder.name in text for text in pool.run(own_control_groups))
            assert not any(folder.name in text for text in other.run(own_control_groups))
        limit = folder / "cpu.cfs_quota_us"
        assert (limit.read_text() if limit.exists() else (folder / "cpu.max").read_text()).split()[0] == "150000"
    assert not folder.exists()


@needs_quota
def test_a_quota_is_removed_after_a_failure():
    with pytest.raises(ZeroDivisionError), quota.cpu_quota(50) as tasks:
        1 / 0  # noqa: B018
    assert not Path(tasks).parent.exists()


@needs_quota
def test_what_a_killed_run_left_is_removed():
    code = "import os, signal; from unisono.bench.quota import _make; _make(50); os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.Popen([sys.executable, "-c", code])
    killed.wait(60)
    assert f"{quota.NAME}{killed.pid}" in {folder.name for folder in left_over()}
    assert quota.why_no_quota() is None
    assert f"{quota.NAME}{killed.pid}" not in {folder.name for folder in left_over()}


def test_the_files_of_version_2(tmp_path, monkeypatch):
    monkeypatch.setattr(quota, "_parents", lambda: iter([(tmp_path, 2)]))
    monkeypatch.setattr(quota, "_remove", shutil.rmtree)
    with quota.cpu_quota(150) as tasks:
        assert (Path(tasks).parent / "cpu.max").read_text() == "150000 100000"
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"


@pytest.mark.parametrize("parents, text", [([], "is mounted"), ([(Path("/no/such"), 1)], "needs root")])
def test_no_quota(parents, text, monkeypatch):
    monkeypatch.setattr(quota, "_parents", lambda: iter(parents))
    assert text in quota.why_no_quota()
    with pytest.raises(quota.NoQuota, match=text), quota.cpu_quota(100):
        pass


def test_words():
    assert str(Place()) == "" and str(Place(100, True, 2)) == "2 busy neighbours, pinned, quota 100 %"
    assert Place.of({"busy": 2, "op": "ddp_step"}) == Place(busy=2)
