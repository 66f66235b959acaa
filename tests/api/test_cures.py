"""Errors that new users met name the cure, and a default group that appears by itself says so."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.testing import run_ranks


def rows_for_elements(group):
    whole, part = torch.zeros(5, 4), torch.zeros([2, 3][group.rank], 4)
    with pytest.raises(ValueError, match=r"counts are elements, not rows: for rows of 4 pass \[8, 12\]"):
        group.all_gather(whole, part, counts=[2, 3])
    with pytest.raises(ValueError, match="add up to the 20 elements") as caught:
        group.all_gather(whole, part, counts=[2, 5])
    assert "rows" not in str(caught.value)
    with pytest.raises(RuntimeError, match=r"splits are rows, not elements: for rows of 4 pass \[2, 3\]"):
        unisono.all_gather_into_tensor_uneven(whole, part, [8, 12], group=group)
    with pytest.raises(RuntimeError) as caught:
        unisono.all_gather_into_tensor_uneven(whole, part, [9, 11], group=group)
    assert "not elements" not in str(caught.value)
    with pytest.raises(RuntimeError, match="elements, not rows: for rows of 4 pass 4 times as much"):
        unisono.all_to_all_vc(torch.zeros(2, 4), torch.zeros(2, 4), [[1, 1], [1, 1]], group=group)
    group.barrier()


def test_rows_given_for_elements():
    run_ranks(2, rows_for_elements)


WHOLE, PART = torch.zeros(5, 4), torch.zeros(2, 4)
IN_ROWS = [
    lambda g: unisono.comm_func.reduce_scatter_tensor_uneven(WHOLE, [8, 12], group=g),
    lambda g: unisono.comm_func.all_gather_into_tensor_uneven(PART if g.rank == 0 else WHOLE[:3], [8, 12], g),
    lambda g: unisono.comm_func.all_to_all_single_with_output_shape([5, 4], WHOLE, [8, 12], [2, 3], g),
    lambda g: unisono.comm_func.all_to_all_v_c(WHOLE, WHOLE, [8, 12, 8, 12], g),
    lambda g: unisono.matmul_reduce_scatter(WHOLE, torch.zeros(4, 4), g, split_sizes=[8, 12]),
    lambda g: unisono.all_gather_matmul(PART if g.rank == 0 else WHOLE[:3], torch.zeros(4, 4), g, split_sizes=[8, 12]),
]


def elements_for_rows(group):
    for i, call in enumerate(IN_ROWS):
        with pytest.raises(ValueError if i else RuntimeError) as caught:
            call(group)
        assert "splits are rows, not elements: for rows of 4 pass [2, 3]" in str(caught.value), (i, caught.value)
    with pytest.raises(ValueError, match="one number of elements per rank"):
        group.all_gather(WHOLE, PART, [8, 8, 4])
    with pytest.raises(ValueError, match="must be elements, 0 or more for each rank: got -8"):
        group.all_gather(WHOLE, PART, (28, -8))
    with pytest.raises(ValueError, match=r"for rows of 4 pass \[8, 12\]"):
        group.all_gather(WHOLE, PART, (2, 3))


def test_elements_given_for_rows():
    run_ranks(2, elements_for_rows)


CASES = [
    (lambda x, w, g: unisono.matmul_all_reduce(x, [w], g), TypeError, r"pass weight\[0\] itself"),
    (lambda x, w, g: unisono.matmul_all_reduce(x, [w, w], g), TypeError, "the grouped form of this function"),
    (lambda x, w, g: unisono.grouped_matmul_all_reduce(x, [w, w], g, group_list=[1, 2]), ValueError, "split_item=1"),
    (
        lambda x, w, g: unisono.grouped_matmul_all_reduce([x, x], [w, w], g, split_item=1),
        ValueError,
        "pass split_item=0 for a list of results, 2 for one",
    ),
    (lambda x, w, g: unisono.grouped_matmul_all_reduce(x, [w, w], g), ValueError, "pass group_list, the rows"),
    (
        lambda x, w, g: unisono.grouped_matmul_all_reduce([x, x], [w, w], g, group_list=[1, 2]),
        ValueError,
        "pass no group_list and split_item=0 or 2",
    ),
    (lambda x, w, g: unisono.matmul_all_reduce(x, w, [w]), TypeError, "a list is meant for another argument"),
]


def fused_cures(group):
    for call, kind, words in CASES:
        with pytest.raises(kind, match=words):
            call(torch.zeros(3, 4), torch.zeros(4, 2), group)


def test_fused_errors_name_the_cure():
    run_ranks(1, fused_cures)


SCRIPT = """
    import torch, torch.distributed as dist, unisono
    print("sum", unisono.comm_func.all_reduce(torch.ones(1))[0].item())
    dist.destroy_process_group()
    try:
        unisono.comm_func.all_reduce(torch.ones(1))
    except ValueError as error:
        print("refused", "it was destroyed" in str(error))
"""


def after_destroy(group, store_path):
    store = dist.FileStore(store_path, group.size)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="it was destroyed"):
        unisono.comm_func.all_reduce(torch.ones(1))


@pytest.mark.parametrize("under_torchrun", [True, False])
def test_no_default_group_after_one_of_a_store(under_torchrun, tmp_path):
    started = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    run_ranks(1, after_destroy, str(tmp_path / "store"), env=started if under_torchrun else None, timeout_s=110)


@pytest.mark.parametrize("torchrun", [True, False])
def test_a_default_group_that_appears_by_itself(torchrun, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"] if torchrun else []
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, *start, str(script)], capture_output=True, text=True, timeout=100, env=kept)
    if torchrun:
        assert done.stdout.split() == ["sum", "1.0", "refused", "True"], done.stderr
        assert done.stderr.count("no default process group: made one") == 1
    else:
        assert done.returncode != 0 and "start the ranks by `torchrun" in done.stderr
