"""Groups by name, in any rank order, and MindSpore's questions about ranks; the default group looked up at the call."""

import os

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.functional.worlds import default_group, world
from unisono import comm_func
from unisono.testing import run_ranks

WORLD = comm_func.GlobalComm.WORLD_COMM_GROUP


def _named(group, backend, folder):
    with default_group(group, backend, folder):
        rank = comm_func.get_rank()
        assert (rank, comm_func.get_group_size()) == (group.rank, 3) == (comm_func.get_rank(WORLD), 3)
        assert comm_func.get_process_group_ranks() == [0, 1, 2]
        # only the members call
        if rank != 1:
            comm_func.create_group("ends", [2, 0])
            assert comm_func.get_rank("ends") == [1, None, 0][rank] and comm_func.get_group_size("ends") == 2
            assert comm_func.get_process_group_ranks("ends") == [2, 0]
            assert comm_func.get_world_rank_from_group_rank("ends", 0) == 2
            assert comm_func.get_group_rank_from_world_rank(0, "ends") == 1
            assert comm_func.get_local_rank("ends") == comm_func.get_rank("ends")
            assert comm_func.get_local_rank_size("ends") == 2
            total, _ = comm_func.all_reduce(torch.tensor([rank]), group="ends")
            assert total.item() == 2
            # in the order of the group, roots by global rank
            gathered, _ = comm_func.all_gather_into_tensor(torch.tensor([rank]), "ends")
            assert gathered.tolist() == [2, 0]
            assert comm_func.broadcast(torch.tensor([rank]), 2, "ends").item() == 2
            with pytest.raises(ValueError, match="one of the group's ranks"):
                comm_func.broadcast(torch.tensor([rank]), 1, "ends")
            got = comm_func.reduce(torch.tensor([rank + 1]), 2, "sum", "ends")
            assert got.item() == (4 if rank == 2 else 0)
            if rank == 0:
                comm_func.send(torch.tensor([7]), 2, "ends")
            else:
                assert comm_func.recv(torch.tensor([0]), 0, "ends").item() == 7
            comm_func.destroy_group("ends")
        # everybody calls; who is not in it is told so
        for name, ranks in (("pair", [0, 1]), ("again", [0, 1]), ("one", [2])):
            comm_func.create_group(name, ranks)
            if rank in ranks:
                total, _ = comm_func.all_reduce(torch.ones(2), group=name)
                assert total.tolist() == [float(len(ranks))] * 2
            else:
                with pytest.raises(ValueError, match=f"must be in the group '{name}', and it is not"):
                    comm_func.all_reduce(torch.ones(2), group=name)
        for name in ("pair", "again", "one"):
            comm_func.destroy_group(name)
            with pytest.raises(ValueError, match="no group is named"):
                comm_func.all_reduce(torch.ones(2), group=name)
        comm_func.barrier()
        assert comm_func.barrier(WORLD) is None


@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_named_groups(pool, size, backend, tmp_path):
    pool.run(_named, backend, str(tmp_path))


def _wrong(group, folder):
    with default_group(group, "unisono", folder):
        for expected, words, call in (
            (TypeError, "'group' must be type of string", lambda: comm_func.create_group(3, [0])),
            (TypeError, "'rank_ids' must be a list of ranks", lambda: comm_func.create_group("g", "01")),
            (ValueError, "different ranks", lambda: comm_func.create_group("g", [0, 0])),
            (ValueError, "at least one rank", lambda: comm_func.create_group("g", [])),
            (ValueError, "from 0 to 1", lambda: comm_func.create_group("g", [0, 5])),
            (ValueError, "exists already", lambda: comm_func.create_group(WORLD, [0])),
            (ValueError, "is the default group", lambda: comm_func.destroy_group(WORLD)),
            (TypeError, "'group' must be type of string", lambda: comm_func.destroy_group(None)),
            (ValueError, "no group is named", lambda: comm_func.destroy_group("g")),
        ):
            with pytest.raises(expected, match=words):
                call()
        comm_func.create_group("g", [group.rank])
        with pytest.raises(ValueError, match="exists already"):
            comm_func.create_group("g", [group.rank])
        comm_func.destroy_group("g")


@pytest.mark.parametrize("size", [2])
def test_wrong_names_and_ranks(pool, size, tmp_path):
    pool.run(_wrong, str(tmp_path))


def _looked_up(group, folder):
    """None and the world's names mean the default group of this moment; a torch group's own name works too."""
    for backend in ("gloo", "unisono", "gloo"):
        with default_group(group, backend, folder) as made:
            for where in (None, WORLD, "nccl_world_group", "world", made, dist.group.WORLD, made.group_name):
                total, _ = comm_func.all_reduce(torch.ones(2), group=where)
                assert total.tolist() == [2.0] * 2
                assert unisono.is_shared(total) == (backend == "unisono")
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        comm_func.all_reduce(torch.ones(2))


@pytest.mark.parametrize("size", [2])
def test_default_group_is_looked_up_at_the_call(pool, size, tmp_path):
    pool.run(_looked_up, str(tmp_path))


def _native_names(group):
    """A unisono.Group and parts of it: ranks are those of the first group, and its key is a name."""
    total, _ = comm_func.all_reduce(torch.ones(1), group=group.key)
    assert total.item() == 3
    part = group.split([2, 0] if group.rank != 1 else None)
    if part is not None:
        assert comm_func.get_process_group_ranks(part) == [2, 0]
        assert comm_func.broadcast(torch.tensor([group.rank]), 2, part).item() == 2
        assert comm_func.get_local_rank(part) == part.rank
        key = part.key
        part.close()
        del part
        with pytest.raises(ValueError, match="no group is named"):
            comm_func.all_reduce(torch.ones(1), group=key)


@pytest.mark.parametrize("size", [3])
def test_unisono_groups(pool, size):
    pool.run(_native_names)


def _start(group, backend, folder):
    """init makes the default group from torchrun's variables; twice is fine."""
    os.environ.update(RANK=str(group.rank), WORLD_SIZE=str(group.size), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    port = torch.zeros(1, dtype=torch.int64)
    if group.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, group.size, True, wait_for_workers=False)
        port[0] = store.port
    group.broadcast(port, 0)
    os.environ.update(MASTER_PORT=str(port.item()), TORCHELASTIC_USE_AGENT_STORE="True")
    comm_func.init(backend)
    comm_func.init()
    total, _ = comm_func.all_reduce(torch.ones(3))
    assert unisono.is_shared(total) == (backend != "gloo")
    answer = total.tolist(), comm_func.get_rank(), comm_func.get_local_rank(), comm_func.get_local_rank_size()
    group.barrier()
    dist.destroy_process_group()
    group.barrier()
    return answer


@pytest.mark.parametrize("backend", [None, "mccl", "gloo"])
def test_init(backend, tmp_path):
    results = run_ranks(2, _start, backend, str(tmp_path))
    assert results == [([2.0] * 3, rank, rank, 2) for rank in range(2)]


def _other_hosts(group, folder):
    """On a backend that spans hosts, torchrun's LOCAL_WORLD_SIZE says who shares one."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        with default_group(group, "gloo", folder):
            comm_func.create_group("odd", [1, 2, 3])
            found = [comm_func.get_local_rank(), comm_func.get_local_rank_size()]
            if group.rank:
                found += [comm_func.get_local_rank("odd"), comm_func.get_local_rank_size("odd")]
            group.barrier()  # gloo's ranks may still be connecting to one another
            comm_func.destroy_group("odd")
            return found
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.parametrize("size", [4])
def test_local_ranks_of_several_hosts(pool, size, tmp_path):
    assert pool.run(_other_hosts, str(tmp_path)) == [[0, 2], [1, 2, 0, 1], [0, 2, 0, 2], [1, 2, 1, 2]]


def _world_is_a_name(group, folder):
    with world(group, "unisono", folder):
        assert comm_func.GlobalComm.BACKEND == "unisono"
        assert comm_func.get_group_size(comm_func.GlobalComm.WORLD_COMM_GROUP) == group.size


@pytest.mark.parametrize("size", [2])
def test_global_comm(pool, size, tmp_path):
    pool.run(_world_is_a_name, str(tmp_path))


def _names(group, folder):
    """A name of an earlier world is free in the next one, also on ranks that were not in its group."""
    for turn, ranks in enumerate(([0, 1], [0, 1, 2])):
        with world(group, "unisono", f"{folder}/{turn}"):
            comm_func.create_group("some", ranks)
            if group.rank in ranks:
                assert comm_func.get_group_size("some") == len(ranks)
            with pytest.raises(ValueError, match="exists already"):
                comm_func.create_group("some", ranks)
            dist.barrier()


@pytest.mark.parametrize("size", [3])
def test_names_end_with_their_world(pool, size, tmp_path):
    for turn in range(2):
        (tmp_path / str(turn)).mkdir()
    pool.run(_names, str(tmp_path))
