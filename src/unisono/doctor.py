"""`unisono doctor`: does unisono work on this machine, how fast, and what to do if not.

Each check is a function that returns one :class:`Finding`; :data:`CHECKS` lists them in the order they are shown. The
self-test starts two real ranks. Exit code 0 if nothing failed (warnings included), 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import unisono
from unisono import _core
from unisono.testing import RankFailure, run_ranks

if TYPE_CHECKING:
    from unisono.group.group import Group

RANKS = 2
#: Microseconds that an 8-byte all_reduce takes on two free cores; machines seen so far need 0.6 to 1.1.
EXPECTED_US = (0.2, 5.0)
_FEW_FDS = 256  # a rank needs a handful for each group, torch and a DataLoader take the rest
_LITTLE_MEMORY = 1 << 30
_SELF_TEST_S = 180.0  # a self-test takes a second, on a very busy machine half a minute
_TIMING_S = 2.0  # beside busy programs a call waits for its turn: no longer than that in all
_REPORT = "please report this with the output of `unisono doctor --json`"

COLORS = {"ok": "32", "warn": "33", "fail": "31", "info": "36"}


@dataclass
class Finding:
    """What a check found. ``status``: ok, info, warn (works, but slower or soon not), fail (does not work)."""

    name: str
    status: str
    found: str
    cure: str = ""


# What the machine is ---------------------------------------------------------------------------------------


def check_versions() -> Finding:
    """unisono, torch, Python, kernel and C library."""
    found = (
        f"unisono {unisono.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}"
    )
    if not dist.is_available():
        return Finding("versions", "fail", found, "this torch was built without torch.distributed: install another one")
    return Finding("versions", "ok", found)


def check_cpu() -> Finding:
    """The processor, and the instruction set that the kernels use."""
    model = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    found = f"{model}, kernels: {_core.isa()}"
    if _core.isa() == "scalar" and platform.machine() in ("x86_64", "AMD64"):
        return Finding("cpu", "warn", found, "no AVX2: reductions use plain code; on a virtual machine, pass AVX2 on")
    return Finding("cpu", "ok", found)


def check_cores() -> Finding:
    """Cores this process may use against the usual number of ranks."""
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} of {os.cpu_count()} cores may be used"
    quota = _core.processors_allowed()  # infinity without one
    if quota < cores:
        found += f", a quota of {quota:g}"
    if min(cores, quota) < RANKS:
        cure = "ranks take turns on one core: calls still work, small ones take tens of microseconds; allow more cores"
        return Finding("cores", "warn", found, cure)
    return Finding("cores", "ok", found)


def check_cache() -> Finding:
    """The last-level cache, and how many of the cores share it."""
    best = (0, "", "")
    for folder in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, size, shared = (_lines(folder / name) for name in ("level", "size", "shared_cpu_list"))
        if level and size and shared:
            best = max(best, (int(level[0]), size[0], shared[0]))
    if not best[0]:
        return Finding("cache", "info", "the system does not say")
    level_name, size_name, cores = f"L{best[0]}", best[1], best[2]
    everyone = _numbers(cores) >= os.sched_getaffinity(0)
    found = f"{level_name} {size_name}, shared by cores {cores}"
    if everyone:
        return Finding("cache", "ok", found)
    return Finding(
        "cache",
        "info",
        found + ", not by all",
        f"ranks that share one {level_name} are faster together: pin the ranks of a group with taskset or numactl",
    )


def check_memory() -> Finding:
    """Memory this process may still take, by the machine and by its cgroups."""
    heap = _core.heap_usage()
    available = _core.memory_available()
    found = f"{_size(available)} free for this process, its shared memory may grow to {_size(heap['capacity'])}"
    if available < _LITTLE_MEMORY:
        return Finding("memory", "warn", found, "raise the memory limit of the container or the cgroup")
    return Finding("memory", "ok", found)


def check_shm() -> Finding:
    """/dev/shm, which is not needed."""
    try:
        size = _size(shutil.disk_usage("/dev/shm").total)
    except OSError:
        size = "missing"
    return Finding("/dev/shm", "ok", f"{size}; not used: no --shm-size is needed in a container")


def check_files() -> Finding:
    """How many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"at most {soft} open files"
    if 0 <= soft < _FEW_FDS:
        return Finding("files", "warn", found, f"raise it: ulimit -n {hard if hard > soft else 1024}")
    return Finding("files", "ok", found)


def check_namespaces() -> Finding:
    """Whether hosts can be tried out on this machine, as network namespaces, and whether users may make their own."""
    most = _lines("/proc/sys/user/max_user_namespaces")
    users = "users may make their own" if most and most[0] != "0" else "users may not make their own"
    if os.geteuid() == 0 and shutil.which("ip"):
        return Finding("namespaces", "ok", f"several hosts can be tried out here, in network namespaces; {users}")
    cure = "only for trying several hosts on one machine; nothing else needs namespaces"
    return Finding("namespaces", "info", f"no network namespaces (need root and `ip`); {users}", cure)


# Two ranks -------------------------------------------------------------------------------------------------


def check_paths() -> Finding:
    """Every way data takes in shared memory: in the request, in slots, in place, through the staging ring."""
    return _self_test("shared memory", _try_paths)


def check_single_copy() -> Finding:
    """Ordinary tensors that the other rank reads where they are, by process_vm_readv."""
    return _self_test("single copy", _try_single_copy, UNISONO_SINGLE_COPY="4K")


def check_hosts() -> Finding:
    """The ways between hosts, by gloo: each rank takes the other for one of another host."""
    return _self_test("several hosts", _try_paths, UNISONO_PRETEND_HOSTS="0,1")


def check_backend() -> Finding:
    """torch.distributed on the backend "unisono"."""
    with tempfile.TemporaryDirectory() as folder:
        return _self_test("torch backend", _try_torch, "unisono", os.path.join(folder, "store"))


def check_gloo() -> Finding:
    """The uneven functions on a group of gloo."""
    with tempfile.TemporaryDirectory() as folder:
        return _self_test("gloo groups", _try_torch, "gloo", os.path.join(folder, "store"))


def check_speed() -> Finding:
    """The time of a small call beside what it takes elsewhere."""
    took_us = run_ranks(RANKS, _time_small, timeout_s=_SELF_TEST_S)[0]
    found = f"8-byte all_reduce {took_us:.2f} µs, expected {EXPECTED_US[0]} to {EXPECTED_US[1]:g} on free cores"
    if took_us > EXPECTED_US[1]:
        cure = "are other programs busy on these cores (top), or is there a CPU quota? `unisono bench` shows more"
        return Finding("speed", "warn", found, cure)
    return Finding("speed", "ok", found)


def _self_test(name: str, function: Callable[..., str], *args: Any, **settings: str) -> Finding:
    start = time.perf_counter()
    env = {"GLOO_SOCKET_IFNAME": "lo", **settings}
    results = run_ranks(RANKS, function, *args, check=False, env=env, timeout_s=_SELF_TEST_S)
    failures = [str(result) for result in results if isinstance(result, RankFailure)]
    if failures:
        return Finding(name, "fail", failures[0], _REPORT)
    return Finding(name, "ok", f"{results[0]}; {RANKS} ranks, {time.perf_counter() - start:.1f} s")


def _try_paths(group: Group) -> str:
    done = 0
    for count in (2, 250, 8 << 10, 64 << 10, 4 << 20):
        for make in (unisono.empty, torch.empty):
            for async_op in (False, True):
                done += _try_sizes(group, count, make, async_op)
    group.barrier()
    if group.rank == 0:
        group.send(torch.arange(5.0), 1)
    else:
        got = torch.empty(5)
        group.recv(got, 0)
        _expect(got, torch.arange(5.0), "send and recv")
    return f"{done + 2} calls right"


def _try_single_copy(group: Group) -> str:
    done = _try_paths(group)
    copied = group.transport.single_copy_bytes
    if not copied:
        return f"{done}, but process_vm_readv is refused here: ordinary tensors go through a ring in shared memory"
    return f"{done}, {_size(copied)} of them read in one copy"


def _try_sizes(group: Group, count: int, make: Callable[[int], torch.Tensor], async_op: bool) -> int:
    """All-reduce, uneven all-gather and uneven reduce-scatter of ``count`` elements."""
    counts = [count // 4, count - count // 4]
    whole, part = make(count), make(counts[group.rank])
    whole.fill_(group.rank + 1)
    _wait(group.all_reduce(whole, async_op=async_op))
    _expect(whole, torch.full((count,), 3.0), "all_reduce")
    part.fill_(group.rank)
    _wait(group.all_gather(whole, part, counts, async_op=async_op))
    gathered = torch.cat([torch.full((n,), float(r)) for r, n in enumerate(counts)])
    _expect(whole, gathered, "all_gather")
    _wait(group.reduce_scatter(part, whole, counts, async_op=async_op))
    _expect(part, torch.full((len(part),), 2.0 * group.rank), "reduce_scatter")
    return 3


def _try_torch(group: Group, backend: str, path: str) -> str:
    store = dist.FileStore(path, group.size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size)
    try:
        return _try_dist(group.rank)
    finally:
        dist.destroy_process_group()


def _try_dist(rank: int) -> str:
    total = torch.full((1000,), float(rank + 1))
    dist.all_reduce(total)
    _expect(total, torch.full((1000,), 3.0), "dist.all_reduce")
    splits = [2, 3]
    mine, output = torch.full((splits[rank], 4), float(rank)), torch.empty(5, 4)
    unisono.all_gather_into_tensor_uneven(output, mine, splits)
    _expect(output[:, 0], torch.tensor([0.0, 0, 1, 1, 1]), "all_gather_into_tensor_uneven")
    unisono.reduce_scatter_tensor_uneven(mine, output, splits)
    _expect(mine, torch.full((splits[rank], 4), 2.0 * rank), "reduce_scatter_tensor_uneven")
    result, _ = unisono.comm_func.all_reduce(torch.ones(3, requires_grad=True))
    torch.autograd.backward(result.sum())
    _expect(result.detach(), torch.full((3,), 2.0), "comm_func.all_reduce")
    product = unisono.matmul_all_reduce(torch.ones(4, 8), torch.ones(8, 2))
    _expect(product, torch.full((4, 2), 16.0), "matmul_all_reduce")
    return "5 calls right"


def _time_small(group: Group) -> float:
    """Microseconds of an 8-byte all_reduce: the median of 200 rounds, or of as many as there is time for."""
    tensor, longest = unisono.zeros(2), torch.zeros(1)
    rounds: list[float] = []
    began = time.perf_counter()
    while len(rounds) < 200 and longest.item() < _TIMING_S:
        group.barrier()
        start = time.perf_counter()
        for _ in range(50):
            group.all_reduce(tensor)
        rounds.append((time.perf_counter() - start) / 50 * 1e6)
        longest.fill_(time.perf_counter() - began)
        group.all_reduce(longest, "max")  # all ranks stop at the same round
    return statistics.median(rounds)


def _wait(handle: Any) -> None:
    if handle is not None:
        handle.wait()


def _expect(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(got, expected):
        wrong = int((got != expected).sum())
        raise AssertionError(f"{what}: {wrong} of {got.numel()} elements are wrong")


# What the system says --------------------------------------------------------------------------------------


def _lines(path: str | pathlib.Path) -> list[str]:
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []


def _numbers(text: str) -> set[int]:
    """The numbers in a list like 0-3,8."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024 or unit == "TiB":
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    raise AssertionError


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_versions,
    check_cpu,
    check_cores,
    check_cache,
    check_memory,
    check_shm,
    check_files,
    check_namespaces,
    check_paths,
    check_single_copy,
    check_backend,
    check_gloo,
    check_hosts,
    check_speed,
)


def run_check(check: Callable[[], Finding]) -> Finding:
    """The finding of a check; one that breaks down is a failure of its own."""
    try:
        return check()
    except Exception as error:
        name = check.__name__.removeprefix("check_")
        return Finding(name, "fail", f"{type(error).__name__}: {error}", _REPORT)


def show(finding: Finding, color: bool) -> None:
    """Prints one line, and the cure below it."""
    status = f"{finding.status:<4}"
    if color:
        status = f"\033[{COLORS[finding.status]}m{status}\033[0m"
    cure = f"\n{'':23}-> {finding.cure}" if finding.cure else ""
    print(f"  {status}  {finding.name:<13}  {finding.found}{cure}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks, print what they found, return 0 if nothing failed."""
    parser = argparse.ArgumentParser(
        prog="unisono doctor",
        description="Checks whether unisono works on this machine and how fast; starts two ranks. Takes some seconds.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    terminal = sys.stdout.isatty() and not options.json
    color = terminal and not os.environ.get("NO_COLOR")
    findings = []
    for check in CHECKS:
        if terminal:
            print(f"  …     {(check.__doc__ or '').splitlines()[0]}", end="\r", flush=True)
        finding = run_check(check)
        findings.append(finding)
        if terminal:
            print("\033[2K", end="")
        if not options.json:
            show(finding, color)
    failed = [f.name for f in findings if f.status == "fail"]
    warned = [f.name for f in findings if f.status == "warn"]
    if options.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        print(f"\n{len(findings)} checks: " + (_summary(failed, warned) or "all is well"))
    return 1 if failed else 0


def _summary(failed: list[str], warned: list[str]) -> str:
    words = [f"failed: {', '.join(failed)}"] if failed else []
    words += [f"to look at: {', '.join(warned)}"] if warned else []
    return "; ".join(words)


if __name__ == "__main__":
    sys.exit(main())
