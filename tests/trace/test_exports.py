"""Torch's analyser on records whose rings have wrapped: it must find what is wrong, and nothing else."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trace.made import operation, record
from unisono.trace import exports

WORLD, PAIR = [0, 1, 2], [1, 2]


def _says(records, folder):
    exports.write_torch(records, folder)
    program = Path(sys.executable).parent / "torchfrtrace"
    said = subprocess.run([str(program), str(folder)], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout + said.stderr


def _is_fine(said):
    return not any(word in said.lower() for word in ("mismatch", "missing", "not all ranks", "has errors"))


def _job(calls, missing=()):
    """Three ranks; ranks 1 and 2 later also call in a pair. `missing` are (rank, number) in the world."""
    before_pair = calls * 3 // 5
    records = []
    for rank in WORLD:
        made = []
        for seq in range(1, calls + 1):
            if rank in PAIR and seq > before_pair:
                made.append(operation("all_reduce", seq - before_pair, "pair"))
            if (rank, seq) not in missing:
                made.append(operation("all_reduce", seq, "world"))
        groups = {"world": WORLD, "pair": PAIR} if rank in PAIR else {"world": WORLD}
        records.append(record(rank, groups, made))
    return records


@pytest.mark.parametrize("calls", [10, 1500])
def test_wrapped_rings_raise_no_false_alarm(tmp_path, calls):
    assert _is_fine(said := _says(_job(calls), tmp_path)), said


def test_the_rank_that_made_no_call_is_found_in_wrapped_rings(tmp_path):
    """The control: the same with a last call that rank 2 leaves out."""
    said = _says(_job(1500, missing=[(2, 1500)]), tmp_path)
    assert "missing ranks: {2}" in said and "sequence number: 1500" in said, said


def test_what_a_busy_ring_holds_no_more_is_not_missing(tmp_path):
    """Rank 1 has called so often in the pair that it holds none of its calls in the world."""
    records = _job(5)
    pair = [operation("all_reduce", seq, "pair") for seq in range(6, 2000)]
    for rank in PAIR:
        made = [*records[rank]["operations"], *pair]
        records[rank] = record(rank, {"world": WORLD, "pair": PAIR}, made)
    assert _is_fine(said := _says(records, tmp_path)), said


def _gathers(calls, forgets):
    """Even and uneven calls of three ranks; rank 1 has lost the splits of the first `forgets`."""
    records = []
    for rank in WORLD:
        made = []
        for seq in range(1, calls + 1):
            kind = ("all_gather", "reduce_scatter", "all_to_all", "gather")[seq % 4]
            splits = [2, 2, 2] if seq % 3 else [1, 2, 3]
            facts = {"root": 1 if kind == "gather" else -1, "count": splits[rank]}
            if kind != "gather" or rank == 1:
                facts["out_splits" if kind in ("all_gather", "gather") else "in_splits"] = splits
            if kind == "all_to_all":
                facts["in_splits"] = facts["out_splits"] = [2, 2, 2]
            if rank == 1 and seq <= forgets:
                facts = {key: fact for key, fact in facts.items() if "splits" not in key}
            made.append(operation(kind, seq, "world", **facts))
        records.append(record(rank, {"world": WORLD}, made))
    return records


@pytest.mark.parametrize("forgets", [0, 20])
def test_splits_that_one_rank_has_lost_are_no_mismatch(tmp_path, forgets):
    records = _gathers(40, forgets)
    assert _is_fine(said := _says(records, tmp_path)), said
    entries = pickle.loads((tmp_path / "unisono_trace_0").read_bytes())["entries"]
    assert [e["collective_seq_id"] for e in entries] == list(range(forgets + 1, 41))
    assert [e["record_id"] for e in entries] == list(range(40 - forgets))


def test_splits_that_differ_are_found(tmp_path):
    """The control: what one rank gives differs, in a call whose splits everybody still holds."""
    records = _gathers(40, 20)
    odd = next(o for o in records[2]["operations"] if o["op"] == "all_gather" and o["seq"] > 30)
    odd["out_splits"] = [3, 3, 3]
    assert not _is_fine(said := _says(records, tmp_path)), said


def test_a_group_that_one_process_has_forgotten_is_left_out(tmp_path):
    """Of closed groups a process keeps the last; another one, with fewer groups, lists more of them."""
    mine = [operation("all_reduce", 1, "old"), operation("all_reduce", 1, "world")]
    records = [record(0, {"old": [0, 1], "world": [0, 1]}, mine)]
    many = {f"g{i}": [1] for i in range(63)}
    records.append(record(1, {"world": [0, 1], **many}, [{**mine[0], "group_id": "0" * 16}, mine[1]]))
    assert _is_fine(said := _says(records, tmp_path)), said
