"""Groups: how they begin (stores, torchrun, split), what they say, several at once, how they end."""

import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch.distributed import FileStore, PrefixStore, TCPStore

import unisono
from unisono import _core
from unisono.testing import run_ranks


def _sum_of_ranks(group):
    t = torch.tensor([float(group.rank), 1.0])
    group.all_reduce(t)
    return t.tolist() == [group.size * (group.size - 1) / 2, group.size]


def _facts(group):
    return group.rank, group.size, group.ranks, group.name, group.timeout_s


@pytest.mark.parametrize("size", [1, 2, 3])
def test_facts(pool, size):
    for rank, (its_rank, its_size, ranks, name, timeout_s) in enumerate(pool.run(_facts)):
        assert (its_rank, its_size, list(ranks), name) == (rank, size, list(range(size)), "world")
        assert timeout_s > 0


def _own_store(group, kind, path):
    if kind == "file":
        store = FileStore(path, group.size)
    elif kind == "prefix":
        store = PrefixStore("job/7", PrefixStore("b", FileStore(path, group.size)))
    else:
        port = torch.zeros(1, dtype=torch.int64)
        if group.rank == 0:
            store = TCPStore("127.0.0.1", 0, group.size, is_master=True, wait_for_workers=False)
            port[0] = store.port
        group.broadcast(port, 0)
        if group.rank:
            store = TCPStore("127.0.0.1", int(port), group.size, is_master=False)
    own = unisono.Group.from_store(store, group.rank, group.size, name="own", timeout_s=30.0)
    second = unisono.Group.from_store(store, group.rank, group.size, name="second", timeout_s=30.0)
    assert (own.name, own.timeout_s, own.rank, own.size) == ("own", 30.0, group.rank, group.size)
    assert _sum_of_ranks(own) and _sum_of_ranks(second) and _sum_of_ranks(group) and _sum_of_ranks(own)
    own.close()
    assert _sum_of_ranks(second)
    second.close()
    group.barrier()  # the store's host stays until all have closed


@pytest.mark.parametrize("kind", ["file", "prefix"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_from_store(pool, size, kind, tmp_path):
    pool.run(_own_store, kind, str(tmp_path / "store"))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_from_tcp_store(number):
    """On ranks of their own: torch's TCPStore keeps two fds after its end."""
    run_ranks(number, _own_store, "tcp", "")


def _same_name_again(group, path):
    store = FileStore(path, group.size)
    for turn in range(5):
        own = unisono.Group.from_store(PrefixStore(str(turn), store), group.rank, group.size, timeout_s=30.0)
        assert _sum_of_ranks(own)
        own.close()


@pytest.mark.parametrize("size", [2])
def test_one_after_another(pool, size, tmp_path):
    pool.run(_same_name_again, str(tmp_path / "store"))


def test_bad_rank_or_size(tmp_path):
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=str(rank) if size else "0"):
            unisono.Group.from_store(FileStore(str(tmp_path / "s"), 1), rank, size)


def test_a_rank_that_never_joins(tmp_path):
    started = time.monotonic()
    with pytest.raises(Exception, match="1") as caught:  # the text names the missing rank
        unisono.Group.from_store(FileStore(str(tmp_path / "s"), 2), 0, 2, timeout_s=1.0)
    assert isinstance(caught.value, (unisono.UnisonoError, RuntimeError)), caught.value
    assert time.monotonic() - started < 20


def test_from_env_under_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
        import torch, unisono
        group = unisono.Group.from_env(timeout_s=60)
        t = torch.full((5,), group.rank + 1.0)
        group.all_reduce(t)
        assert t.tolist() == [3.0] * 5, t
        print(f"rank {group.rank} of {group.size} fine", flush=True)
        group.close()
        """)
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert done.stdout.count(f"rank {rank} of 2 fine") == 1, done.stdout


def test_from_env_without_the_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((RuntimeError, ValueError, KeyError), match="RANK"):
        unisono.Group.from_env()


def _splits(group):
    """Everybody calls split with its own part; None stays out."""
    size = group.size
    reverse = group.split(list(range(size))[::-1], name="reverse")
    assert (reverse.rank, reverse.size, reverse.name) == (size - 1 - group.rank, size, "reverse")
    assert list(reverse.ranks) == list(range(size))[::-1]
    t = torch.full((1,), 10.0 + group.rank)
    reverse.broadcast(t, 0)
    assert t.item() == 10.0 + size - 1, "rank 0 of the reversed group is the last of its parent"

    mine = [r for r in range(size) if r % 2 == group.rank % 2]
    parity = group.split(mine)
    assert (parity.size, parity.rank) == (len(mine), mine.index(group.rank)) and list(parity.ranks) == mine
    t = torch.full((1000,), float(group.rank))
    parity.all_reduce(t)
    assert t.unique().tolist() == [float(sum(mine))]

    some = group.split([0, size - 1] if group.rank in (0, size - 1) and size > 1 else None)
    if group.rank in (0, size - 1) and size > 1:
        assert some.size == 2 and _sum_of_ranks(some)
        nested = some.split([1, 0])
        assert nested.rank == 1 - some.rank and _sum_of_ranks(nested)
        nested.close()
        some.close()
    else:
        assert some is None
    alone = group.split([group.rank])
    assert alone.size == 1 and _sum_of_ranks(alone)
    assert _sum_of_ranks(reverse) and _sum_of_ranks(group)
    for made in (alone, parity, reverse):
        made.close()
    assert _sum_of_ranks(group)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_split(pool, size):
    pool.run(_splits)


def _bad_splits(group):
    """Wrong lists are errors on every rank, and the group goes on."""
    for wrong in ([0, 0], [0, 99], [-1], [(group.rank + 1) % group.size]):
        with pytest.raises((ValueError, unisono.UnisonoError)):
            group.split(wrong)
    for wrong in ("01", [0.5], 3):
        with pytest.raises(TypeError, match="argument 'ranks' must be a list of ranks, got"):
            group.split(wrong)
    assert _sum_of_ranks(group)


@pytest.mark.parametrize("size", [2, 3])
def test_bad_splits(pool, size):
    pool.run(_bad_splits)


def _several_at_once(group):
    """Calls on four groups interleave differently every turn; then a thread per group runs them at once."""
    groups = [group.split(range(group.size), name=f"g{i}") for i in range(4)]
    for turn in range(8):
        handles = []
        for i in range(4):
            own = groups[(i + turn) % 4]
            t = torch.full((50_000,), float(i + 1))
            handles.append((own.all_reduce(t, async_op=True), t, i))
        for handle, t, i in reversed(handles):
            handle.wait()
            assert t.unique().tolist() == [(i + 1.0) * group.size]

    complaints = []

    def work(own, number):
        for turn in range(40):
            t = torch.full((1 + 997 * (turn % 7),), float(number + turn))
            own.all_reduce(t)
            if t.unique().tolist() != [float(number + turn) * own.size]:
                complaints.append(f"group {number} turn {turn}: {t.unique().tolist()}")

    threads = [threading.Thread(target=work, args=(own, i)) for i, own in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in groups:
        own.close()
    return complaints


@pytest.mark.parametrize("size", [2, 3])
def test_several_groups_at_once(pool, size):
    assert pool.run(_several_at_once) == [[]] * size


def _closing(group):
    part = group.split(range(group.size), name="short")
    part.all_reduce(torch.ones(3))
    handle = part.all_reduce(torch.ones(100_000), async_op=True)
    handle.wait()
    part.close()
    part.close()
    for use in (
        lambda: part.all_reduce(torch.ones(1)),
        lambda: part.barrier(),
        lambda: part.all_reduce(torch.ones(1), async_op=True).wait(),
        lambda: part.split(range(group.size)),
    ):
        with pytest.raises((unisono.UnisonoError, RuntimeError), match="closed"):
            use()
    assert handle.is_completed() and handle.exception() is None
    assert _sum_of_ranks(group)


@pytest.mark.parametrize("size", [1, 2])
def test_close_twice_and_use_after_close(pool, size):
    pool.run(_closing)


def _abort(group):
    """One rank aborts; everybody's next call says so, with the reason; the parent group goes on."""
    part = group.split(range(group.size), name="doomed")
    if group.rank == 0:
        part.abort("disk full")
    with pytest.raises(unisono.AbortedError) as caught:
        for _ in range(2):
            part.all_reduce(torch.ones(10), timeout_s=20)
    with pytest.raises(unisono.UnisonoError):
        part.barrier(timeout_s=20)
    part.close()
    assert _sum_of_ranks(group)
    return str(caught.value)


@pytest.mark.parametrize("size", [2, 3])
def test_abort_tells_everybody_why(pool, size):
    texts = pool.run(_abort)
    assert all("disk full" in text for text in texts), texts


def _joins_among_strangers(group, path):
    """Another group, whose doors strangers know; they knock before and while the ranks join."""
    rank, size = group.rank, group.size
    store = FileStore(path, size)
    listener = _core.Listener()
    strangers = []
    for noise in (b"", b"x", b"unisono" * 100, bytes(4096)):
        knock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        knock.connect("\0" + listener.name)
        if noise:
            knock.send(noise)
        strangers.append(knock)
    store.set(str(rank), listener.name)
    names = [store.get(str(r)).decode() for r in range(size)]
    comm = listener.join(rank, size, "strangers", b"n" * 16, 77, 20.0, names)
    t = torch.ones(10)
    comm.all_reduce(t, None, "sum", None, None, False)
    comm.close("done", 0.2)
    for knock in strangers:
        knock.close()
    return t.tolist()


def test_strangers_are_turned_away(tmp_path):
    """Whoever connects without the nonce, silent or with garbage, neither joins nor disturbs."""
    assert run_ranks(3, _joins_among_strangers, str(tmp_path / "store")) == [[3.0] * 10] * 3
