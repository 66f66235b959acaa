"""Ordinary tensors: through the ring or read where they are, whatever was measured, the results have the same bits."""

import ctypes
import json
import subprocess
import sys

import pytest
import torch

import unisono
from tests.calls import check, matrices, sampled_calls, splits
from unisono import _core
from unisono.testing import run_ranks

KIB = 1 << 10
NEVER = ((0, 0), (0, 0), 256 * KIB, 4096 * KIB)
ALWAYS = ((8 * KIB, 0), (8 * KIB, 0), 64 * KIB, 512 * KIB)
BETWEEN = ((8 * KIB, 64 * KIB), (8 * KIB, 128 * KIB), 64 * KIB, 512 * KIB)
COUNTS = (3_001, 40_003, 300_007)  # float32: a slot, a ring's slot, pieces


def _choose(group, tunings):
    _core.choose_tuning(*tunings[group.rank % len(tunings)])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("tunings", [[NEVER], [ALWAYS], [ALWAYS, NEVER], [NEVER, ALWAYS], [BETWEEN]])
def test_every_verb(pool, size, tunings):
    kinds = [("oo",) * size, ("oh",) * size, ("oo", "hh", "ho")[:size], ("ho",) * size]
    calls = []
    for verb in ("all_reduce", "reduce"):
        forms = ("plain", "in_place") if verb == "all_reduce" else ("plain",)
        calls += sampled_calls(verb, 12, counts=COUNTS, kinds=kinds, form=forms, root=range(size), shift=(0, 1))
    calls += sampled_calls("broadcast", 8, counts=COUNTS, kinds=kinds, root=range(size), shift=(0, 1))
    chunks = [split for count in COUNTS for split in splits(count, size)]
    for verb in ("all_gather", "reduce_scatter", "gather", "scatter"):
        calls += sampled_calls(verb, 12, counts=chunks, kinds=kinds, root=range(size), async_op=(False, True))
    calls += sampled_calls("all_to_all", 12, counts=[m for n in COUNTS for m in matrices(n, size)], kinds=kinds)
    for verb, lists in (("reduce_scatter", ("mh", "mo")), ("all_gather", ("hm", "om"))):  # parts in both memories
        mixed = [(both,) * size for both in lists]
        calls += sampled_calls(verb, 8, counts=splits(90_000, size), kinds=mixed, form=("list",))
    pool.run(_choose, tunings)
    check(pool, calls)


def _count(group, tuning):
    _core.choose_tuning(*tuning)
    tensor = torch.ones(500_000)
    group.barrier()
    before = group.transport.single_copy_bytes
    group.all_reduce(tensor)
    assert tensor.unique().tolist() == [float(group.size)]
    return group.transport.single_copy_bytes - before


@pytest.mark.parametrize("size", [2])
def test_which_way_was_taken(pool, size):
    assert all(pool.run(_count, ALWAYS)), "the kernel reads here"
    assert not any(pool.run(_count, NEVER))
    assert not any(pool.run(_count, BETWEEN)), "a rank's share is longer than that"


@pytest.mark.parametrize(
    "copies, piece, ring",
    [((32, 0), 64 * KIB, 512 * KIB), ((64 * KIB, 32 * KIB), 64 * KIB, 512 * KIB),
     ((0, 0), 8192 * KIB, 512 * KIB), ((0, 0), 64 * KIB, 8192 * KIB), ((0, 0), 256 * KIB, 512 * KIB)],
)  # fmt: skip
def test_a_tuning_that_cannot_be(copies, piece, ring):
    with pytest.raises(ValueError, match="no such tuning"):
        _core.choose_tuning(copies, (0, 0), piece, ring)


def _messages(group, tuning):
    _core.choose_tuning(*tuning)
    peer = 1 - group.rank
    for count in (20_000, 100_000, 1_000_000):
        mine, other = torch.full((count,), float(group.rank)), torch.empty(count)
        if group.rank == 0:
            group.send(mine, peer)
            group.recv(other, peer)
        else:
            group.recv(other, peer)
            group.send(mine, peer)
        assert other.unique().tolist() == [float(peer)]
        handles = [group.recv(other, peer, async_op=True), group.send(mine, peer, async_op=True)]
        for handle in handles:
            handle.wait()
        assert other.unique().tolist() == [float(peer)]


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("tuning", [NEVER, ALWAYS])
def test_messages(pool, size, tuning):
    pool.run(_messages, tuning)


def _forbid() -> None:
    """Nobody may read a process that is not dumpable, unless it has a capability that these ranks give up."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # _LINUX_CAPABILITY_VERSION_3
    assert libc.capset(header, none) == 0


def _forbid_then_make(group):
    _forbid()
    group.barrier()
    return _count(group.split([0, 1]), ALWAYS)


def test_rings_where_the_kernel_does_not_allow_it():
    assert run_ranks(2, _forbid_then_make) == [0, 0]


def _forbid_too_late(group):
    group.barrier()
    _forbid()
    group.barrier()
    try:
        _count(group, ALWAYS)
    except unisono.UnisonoError as error:
        return str(error)


def test_an_error_where_it_is_forbidden_later():
    """Never a wrong result: ranks that could read each other when they met say so."""
    words = run_ranks(2, _forbid_too_late)
    assert any("cannot be read: Operation not permitted" in said for said in words), words


def test_measured_once_and_kept(tmp_path):
    """The first process measures and writes; another reads; a folder that cannot be written is no error."""
    program = (
        "import json\nfrom unisono import _core\n"
        "before = _core.tuning()\nnow = _core.tuning(measure=not before['known'])\n"
        "print(json.dumps([before['known'], now.get('complete', True), now['single_copy_from'], now['file']]))"
    )

    def run(folder):
        environment = {"XDG_CACHE_HOME": str(folder), "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first, second = json.loads(run(tmp_path)), json.loads(run(tmp_path))
    if not first[1]:
        pytest.skip("one processor, or a machine too busy to measure")
    assert first[0] is False and second[0] is True and first[2:] == second[2:]
    with open(first[3], "w") as file:
        file.write("unisono tuning 3\nanother machine\n4294967295\n")
    assert json.loads(run(tmp_path))[0] is False, "a file of another machine, or a broken one, is measured again"
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert json.loads(run(blocked))[0] is False
