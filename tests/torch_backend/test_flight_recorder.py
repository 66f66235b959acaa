"""torch's flight recorder: calls on unisono are in the dump, and torch's own tool reads and matches them."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from unisono.testing import run_ranks


def _record(group, folder, served, size_of_buffer, misfit=False):
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(size_of_buffer)
    store = dist.FileStore(f"{folder}/store", group.size)
    if served:
        import unisono

        unisono.serve_gloo()
    name = "gloo" if served else "unisono"
    dist.init_process_group(name, store=store, rank=group.rank, world_size=group.size)
    x = torch.full((3, 4), float(group.rank))
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.broadcast(x, 0)
    dist.all_gather([torch.empty(3, 4) for _ in range(group.size)], x)
    dist.reduce_scatter_tensor(torch.empty(1, 4), torch.ones(group.size, 4))
    dist.gather(x, [torch.empty(3, 4) for _ in range(group.size)] if group.rank == 0 else None)
    dist.all_to_all_single(torch.empty(group.size), torch.ones(group.size))
    with pytest.raises(RuntimeError):
        dist.broadcast(x, group=dist.group.WORLD, group_src=9)  # refused: never a call
    dist.barrier()
    if group.rank < 2:
        (dist.send if group.rank == 0 else dist.recv)(torch.ones(2), 1 - group.rank)
    if misfit and group.rank == 1:
        handle = dist.all_reduce(torch.ones(5), async_op=True)  # nobody else comes
        assert not handle.is_completed()
    found = c10d._dump_fr_trace()
    with open(f"{folder}/rank_{group.rank}", "wb") as file:
        file.write(found)
    short = c10d._dump_fr_trace(includeStackTraces=False, includeCollectives=False)
    store.add("dumped", 1)
    while store.add("dumped", 0) < group.size:
        pass
    return pickle.loads(found), json.loads(c10d._dump_fr_trace_json()), pickle.loads(short)


@pytest.mark.parametrize("served", [False, True])
def test_entries_in_the_dump(tmp_path, served):
    for rank, (found, as_json, short) in enumerate(run_ranks(2, _record, str(tmp_path), served, 100)):
        entries = found["entries"]
        assert found["version"] == as_json["version"] and "entries" not in short
        assert [entry["profiling_name"] for entry in entries] == [
            *("gloo:all_reduce", "gloo:all_reduce", "gloo:broadcast", "gloo:all_gather", "gloo:_reduce_scatter_base"),
            *("gloo:gather", "gloo:all_to_all", "gloo:barrier", "gloo:send 0->1" if rank == 0 else "gloo:recv 1<-0"),
        ]
        assert [entry["collective_seq_id"] for entry in entries] == [*range(1, 9), 8]
        assert all(entry["retired"] and entry["state"] == "scheduled" for entry in entries)
        first, gathered = entries[0], entries[3]
        assert first["input_sizes"] == first["output_sizes"] == [[3, 4]] and first["input_dtypes"] == ["Float"]
        assert gathered["output_sizes"] == [[2, 3, 4]] and gathered["timeout_ms"] == 1800000
        assert __file__ in str(first["frames"]) and "adapter.py" not in str(first["frames"])
        assert found["pg_config"]["0"]["ranks"] == "[0, 1]" and first["process_group"] == ("0", "default_pg")
        status = {"last_enqueued_collective": 8, "last_started_collective": -1, "last_completed_collective": 8}
        assert found["pg_status"] == {"0": status}
        assert as_json["pg_status"]["0"] == {key: str(value) for key, value in status.items()}
        assert [entry["profiling_name"] for entry in as_json["entries"]] == [e["profiling_name"] for e in entries]


def test_only_the_last_are_kept(tmp_path):
    for found, _, _ in run_ranks(2, _record, str(tmp_path), False, 4):
        assert [entry["record_id"] for entry in found["entries"]] == [5, 6, 7, 8][: len(found["entries"])]
        assert len(found["entries"]) == 4


@pytest.mark.parametrize("misfit", [False, True])
def test_torchs_tool_reads_it(tmp_path, misfit):
    run_ranks(2, _record, str(tmp_path), True, 100, misfit)
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path), "-p", "rank_"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert ("all_reduce" in said and "missing" in said.lower()) == misfit, said
