"""Tensors in the heap: making, recognising views, modules, lifetime, short memory, fork, SharedGather."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import unisono
from unisono.testing import run_ranks


def _making(group):
    a = unisono.empty(3, 4, dtype=torch.bfloat16)
    assert (a.shape, a.dtype, a.device.type) == ((3, 4), torch.bfloat16, "cpu")
    assert a.is_contiguous() and unisono.is_shared(a)
    b = unisono.zeros(5, dtype=torch.int64)
    assert b.tolist() == [0] * 5 and unisono.is_shared(b)
    assert unisono.zeros(2).dtype == torch.get_default_dtype()
    c = unisono.empty_like(torch.ones(2, 3, dtype=torch.float16))
    assert (c.shape, c.dtype) == ((2, 3), torch.float16) and unisono.is_shared(c)
    for other in (
        torch.ones(4, 3).t(),
        torch.ones(6)[::2],
        torch.ones(()),
        torch.ones(3, 0, 2),
        torch.ones(1).expand(5),
    ):
        made = unisono.empty_like(other)
        assert made.shape == other.shape and made.is_contiguous()
        assert unisono.is_shared(made) or not made.numel()
    for dtype in (torch.float8_e5m2, torch.complex64, torch.bool, torch.uint32):
        assert unisono.empty_like(torch.zeros(2, 2, dtype=dtype)).dtype == dtype
    assert unisono.empty(0).numel() == 0
    assert unisono.empty(()).shape == () or unisono.empty().shape == ()
    for dtype in (torch.bool, torch.uint16, torch.complex128, torch.float8_e4m3fn):
        assert unisono.zeros(7, dtype=dtype).dtype == dtype
    assert a.data_ptr() % 64 == 0, "a heap tensor starts on a cache line"


def _small_blocks(group):
    """Small blocks come back at once and never twice; what lives keeps its bytes."""
    sizes = [1, 100, 128, 129, 1000, 4096, 4097, 5000]
    alive = {}
    for turn in range(2000):
        size = sizes[turn * 7 % len(sizes)]
        t = unisono.empty(size, dtype=torch.uint8).fill_(turn % 251)
        for start, other in alive.items():
            assert t.data_ptr() + size <= start or start + other[0].numel() <= t.data_ptr(), "two own one byte"
        alive[t.data_ptr()] = t, turn % 251
        if len(alive) > 20:
            start = list(alive)[turn * 13 % len(alive)]
            old, value = alive.pop(start)
            assert old.unique().tolist() == [value]
            del old
    del t
    before = unisono._core.heap_usage()["in_use"]
    alive.clear()
    assert unisono._core.heap_usage()["in_use"] < before


def _recognising(group):
    t = unisono.zeros(100, 10)
    for label, view in (
        ("row", t[3]),
        ("rows", t[5:9]),
        ("flat", t.view(-1)[7:]),
        ("bytes", t.view(torch.uint8)),
    ):
        assert unisono.is_shared(view), label
    assert unisono.is_shared(t.detach()) and unisono.is_shared(t.view(10, 100))
    for label, other in (
        ("clone", t.clone()),
        ("sum", t + 1),
        ("plain", torch.zeros(4)),
        ("moved", t.t().contiguous()),
    ):
        assert not unisono.is_shared(other), label
    assert not unisono.is_shared(torch.empty(4, device="meta"))


def _moving(group):
    plain = torch.arange(12.0).view(3, 4)
    assert unisono.to_shared_(plain) is plain
    assert unisono.is_shared(plain) and plain.tolist() == torch.arange(12.0).view(3, 4).tolist()

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    before = [p.detach().clone() for p in module.parameters()]
    identities = [id(p) for p in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert unisono.to_shared_(module) is module
    assert [id(p) for p in module.parameters()] == identities, "parameters keep their identity"
    for p, old in zip(module.parameters(), before, strict=True):
        assert unisono.is_shared(p) and torch.equal(p, old) and p.requires_grad and p.is_leaf
    assert all(unisono.is_shared(b) for b in module.buffers())
    module(torch.randn(5, 4)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    optimizer.step()
    assert any(not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))
    assert all(unisono.is_shared(p) for p in module.parameters()), "a step leaves them where they are"
    for p in module.parameters():
        group.broadcast(p.data, 0)


def _reusing(group):
    """Making and dropping 64 MiB 200 times does not need 12.5 GiB."""
    for turn in range(200):
        t = unisono.empty(16 << 20, dtype=torch.float32)
        t[turn] = turn
        del t
    status = Path("/proc/self/status").read_text()
    shared_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssShmem"))
    assert shared_kib < 1 << 20, f"{shared_kib >> 10} MiB of shared memory are resident after dropping all"
    # Odd sizes in odd order: nothing handed out twice.
    kept = [unisono.empty(n, dtype=torch.uint8).fill_(i) for i, n in enumerate([1, 63, 64, 65, 4095, 4097, 70_000] * 9)]
    del kept[::2]
    gc.collect()
    kept += [unisono.empty(n, dtype=torch.uint8).fill_(100 + n % 50) for n in (2, 60, 70, 5000, 65_537)]
    for index, t in enumerate(kept[:31]):
        assert bool((t == 2 * index + 1).all()), f"allocation {2 * index + 1} was overwritten"


def _too_much(group):
    kept = unisono.zeros(1000)
    for attempt in ((10 << 40,), (1 << 20, 10 << 20)):
        with pytest.raises(unisono.HeapMemoryError) as caught:
            unisono.empty(*attempt, dtype=torch.uint8)
        assert isinstance(caught.value, MemoryError) and str(10 << 40) in str(caught.value).replace(",", "").replace(
            "_", ""
        )
    with pytest.raises(unisono.HeapMemoryError):
        unisono.empty(1 << 45, dtype=torch.float64)
    after = unisono.zeros(1000)
    after += 1
    group.all_reduce(after)
    assert after.tolist() == [float(group.size)] * 1000 and not kept.any()


def _bad_arguments(group):
    for wrong in (
        lambda: unisono.empty(-1),
        lambda: unisono.empty(2, -3),
        lambda: unisono.to_shared_(torch.ones(2, device="meta")),
    ):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            wrong()
    with pytest.raises(TypeError):
        unisono.to_shared_([1, 2])


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("what", [_making, _recognising, _moving, _reusing, _small_blocks, _too_much, _bad_arguments])
def test_tensors(pool, size, what):
    pool.run(what)


def _outliving(group):
    """A result and a tensor that peers have mapped stay whole after the group is closed."""
    part = group.split(range(group.size))
    t = unisono.zeros(300_000) + 0
    t = unisono.to_shared_(t)
    t += part.rank
    gathered = unisono.empty(300_000 * part.size)
    part.all_gather(gathered, t)
    part.close()
    del part
    gc.collect()
    want = torch.arange(float(group.size)).repeat_interleave(300_000)
    assert torch.equal(gathered, want)
    gathered += 1
    assert torch.equal(gathered, want + 1) and unisono.is_shared(gathered)
    group.all_reduce(gathered)
    assert torch.equal(gathered, (want + 1) * group.size)


@pytest.mark.parametrize("size", [2, 3])
def test_a_result_outlives_its_group(pool, size):
    pool.run(_outliving)


def _shared_gather(group, counts, dtype):
    gather = unisono.SharedGather(group, counts, 3, dtype=dtype)
    assert gather.input.shape == (counts[group.rank], 3) and gather.input.dtype == dtype
    assert unisono.is_shared(gather.input) or gather.input.numel() == 0
    staged = group.staged_bytes
    for turn in range(5):
        gather.input.fill_(10 * turn + group.rank)
        output = gather.gather()
        assert output.shape == (sum(counts), 3)
        rows = [10 * turn + r for r, n in enumerate(counts) for _ in range(n)]
        assert output[:, 2].tolist() == rows, f"turn {turn}: {output[:, 2].tolist()}, want {rows}"
        group.barrier()  # nobody writes the next turn while another still reads
    assert group.staged_bytes == staged
    gather.close()
    gather.close()
    group.barrier()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shared_gather(pool, size):
    for counts in ([4] * size, list(range(size)), [0] * size, [5000 + r for r in range(size)]):
        pool.run(_shared_gather, counts, torch.float32)
    pool.run(_shared_gather, [2] * size, torch.int16)


def _in_child(work):
    """Run `work()` in a forked child; what it returned or raised."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is what this is about
        pid = os.fork()
    if pid == 0:
        try:
            answer = pickle.dumps(("ok", work()))
        except BaseException as error:
            answer = pickle.dumps((type(error).__name__, str(error)))
        os.write(write, answer)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}"
    return pickle.loads(data)


def _fork(group):
    """A forked child may read what was there, its writes stay its own, and it cannot use the group."""
    t = unisono.zeros(100_000)
    t += 7
    group.all_reduce(t)
    want = 7.0 * group.size
    ran = group.all_reduce(torch.ones(3), async_op=True)  # a progress thread exists, the child has none
    ran.wait()

    def read():
        return float(t.sum()), float(t[99_999])

    def write():
        t.fill_(-1.0)
        return float(t[5])

    assert _in_child(read) == ("ok", (want * 100_000, want))
    assert _in_child(write) == ("ok", -1.0)
    assert t.unique().tolist() == [want], "the child's write is seen by the parent"
    for label, use in (
        ("all_reduce", lambda: group.all_reduce(torch.ones(2))),
        ("async", lambda: group.all_reduce(torch.ones(2), async_op=True).wait(5)),
        ("barrier", lambda: group.barrier(timeout_s=5)),
        ("send", lambda: group.send(torch.ones(2), (group.rank + 1) % group.size)),
    ):
        kind, text = _in_child(use)
        assert kind == "ForkedError", f"{label} in a forked child: {kind} {text}"
    assert _in_child(lambda: group.close())[0] in ("ok", "ForkedError")
    # The parent and its peers notice nothing.
    for count in (2, 30_000, 400_000):
        x = unisono.zeros(count)
        x += 1
        group.all_reduce(x)
        assert x.unique().tolist() == [float(group.size)]


@pytest.mark.parametrize("size", [2, 3])
def test_fork_does_not_disturb_the_parent(pool, size):
    pool.run(_fork)


def _fork_and_end(group):
    """A child that ends as Python does (dropping its copy of the group) ends, also when calls ran in the background."""
    t = torch.ones(4)
    group.all_reduce(t, async_op=True).wait()
    pid = os.fork()
    if pid == 0:
        try:
            unisono.group.group._leave_all()
        finally:
            os._exit(0)
    deadline = time.monotonic() + 20
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "the child hung"
        time.sleep(0.01)
    group.all_reduce(t)
    return status, t.tolist()


def test_a_forked_child_can_end():
    assert run_ranks(2, _fork_and_end) == [(0, [4.0] * 4)] * 2


CGROUP_SCRIPT = """
import os, sys, torch, unisono
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
kept = []
try:
    for _ in range(3000):  # small steps must not slip past the limit
        kept.append(unisono.empty(512 << 10, dtype=torch.uint8).fill_(1))
except unisono.HeapMemoryError as error:
    print(len(kept) // 2, "MiB, then:", error)
try:
    unisono.empty(1 << 30, dtype=torch.uint8)
except unisono.HeapMemoryError:
    print("large refused;", int(kept[7][3]), "alive")
"""


def _limited_cgroup(limit_bytes):
    """A memory cgroup of our own, or None where this user may not make one."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(root) / f"unisono-test-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / limit).write_text(str(limit_bytes))
            return folder
        except OSError:
            if folder.exists():
                folder.rmdir()
    return None


def test_a_cgroup_limit_is_an_exception_not_a_kill():
    folder = _limited_cgroup(700 << 20)
    if folder is None:
        pytest.skip("may not make a memory cgroup here")
    try:
        command = [sys.executable, "-c", CGROUP_SCRIPT, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "MiB, then: 1048576 bytes were asked for" in done.stdout and "large refused; 1 alive" in done.stdout
    finally:
        folder.rmdir()


FULL_SHM_SCRIPT = """
import os, torch, unisono
from unisono.testing import run_ranks

def sums(group):
    shared, ordinary = unisono.ones(8 << 20), torch.ones(1 << 20)
    group.all_reduce(shared)
    group.all_reduce(ordinary)
    return shared.unique().tolist() + ordinary.unique().tolist()

if __name__ == "__main__":
    assert os.statvfs("/dev/shm").f_bfree == 0
    print(run_ranks(2, sums))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a /dev/shm of its own")
def test_a_full_dev_shm_is_no_matter(tmp_path):
    """Containers often have 64 MB of it, and other programs leave things there: nothing of ours is in it."""
    (tmp_path / "job.py").write_text(FULL_SHM_SCRIPT)
    fill = "mount -t tmpfs -o size=64k none /dev/shm && { head -c 1M /dev/zero > /dev/shm/full 2> /dev/null; true; }"
    command = f"{fill} && exec {sys.executable} {tmp_path}/job.py"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=100)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"may not mount here: {done.stderr}")
    assert done.returncode == 0 and done.stdout == "[[2.0, 2.0], [2.0, 2.0]]\n", done.stdout + done.stderr


def _other_numbers(group):
    """Every rank writes where its own numbers say, so all must have the same."""
    for counts, tail, dtype in (([1, 2], 3, None), ([2, 1], 4, None), ([2, 1], 3, torch.float64)):
        if group.rank == 0:
            counts, tail, dtype = [2, 1], 3, None
        with pytest.raises(unisono.MismatchError, match="SharedGather"):
            unisono.SharedGather(group, counts, tail, dtype=dtype)
    shared = unisono.SharedGather(group, [2, 1], 3)
    shared.input.fill_(group.rank)
    assert shared.gather()[:, 0].tolist() == [0, 0, 1]
    shared.close()


@pytest.mark.parametrize("size", [2])
def test_a_shared_gather_of_other_numbers(pool, size):
    pool.run(_other_numbers)
