"""Tensors of one coalesced call that share memory: every tensor is read before any is written, as gloo does it."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

import unisono
from tests.torch_backend import world

N = 6


def _memory(make, n):
    return make(n).copy_(torch.arange(float(n)) + 100 * (dist.get_rank() + 1))


# name -> what to call with (group, size, make, async_op); returns the memory and a work or None.
def _all_reduces(*cuts):
    def run(group, size, make, async_op):
        memory = _memory(make, 4 * N)
        options = dist.AllreduceCoalescedOptions()
        options.asyncOp = async_op
        return memory, group.allreduce_coalesced([cut(memory) for cut in cuts], options)

    return run


def _managed(group, size, make, async_op):
    memory = _memory(make, 2 * N)
    with dist._coalescing_manager(group, async_ops=async_op) as manager:
        dist.all_reduce(memory[:N], group=group, async_op=async_op)
        dist.all_reduce(memory[:N], group=group, async_op=async_op)
    return memory, manager if async_op else None


def _all_gathers(outputs, inputs):
    def run(group, size, make, async_op):
        memory = _memory(make, 16 * N * size)
        options = AllgatherOptions()
        options.asyncOp = async_op
        whole = [memory[at * N :][: N * size] for at in outputs]
        return memory, group.all_gather_single_coalesced(whole, [memory[at * N :][:N] for at in inputs], options)

    return run


def _lists(group, size, make, async_op):
    memory = _memory(make, 16 * N)
    parts = memory.split(N)
    options = AllgatherOptions()
    options.asyncOp = async_op
    outputs = [[parts[2 * rank], parts[2 * rank + 1]] for rank in range(size)]
    return memory, group.allgather_coalesced(outputs, [parts[12], parts[0]], options)


def _between_each_other(group, size, make, async_op):
    """Outputs whose rows alternate, which is no overlap."""
    memory = _memory(make, 16 * N * size)
    rows = memory.view(-1, N)
    options = AllgatherOptions()
    options.asyncOp = async_op
    outputs = [rows[: 2 * size : 2], rows[1 : 2 * size : 2]]
    if group is world.gloo:  # which does not take them as outputs
        for i, output in enumerate(outputs):
            dist.all_gather(list(output), rows[10 + i], group)
        return memory, None
    return memory, group.all_gather_single_coalesced(outputs, [rows[10:11], rows[11:12]], options)


def _reduce_scatters(outputs, inputs):
    def run(group, size, make, async_op):
        memory = _memory(make, 8 * N * size)
        options = dist.ReduceScatterOptions()
        options.asyncOp = async_op
        whole = [memory[at * N :][: N * size] for at in inputs]
        return memory, group.reduce_scatter_single_coalesced([memory[at * N :][:N] for at in outputs], whole, options)

    return run


def _first(memory):
    return memory[:N]


CASES = {
    "all_reduce: one tensor twice": _all_reduces(_first, _first),
    "all_reduce: three times, and another": _all_reduces(_first, lambda m: m[3 * N :], _first, _first),
    "all_reduce: one in the other": _all_reduces(lambda m: m[1:3], lambda m: m),
    "all_reduce: partly": _all_reduces(_first, lambda m: m[N // 2 : 2 * N]),
    "all_reduce: a chain": _all_reduces(lambda m: m[8:20], lambda m: m[4:10], lambda m: m[:6]),
    "all_reduce: with gaps": _all_reduces(lambda m: m[::2], lambda m: m[3:9], lambda m: m[1::2]),
    "all_reduce: transposed": _all_reduces(_first, lambda m: m.view(4, N).t(), lambda m: m.view(4, N)),
    "all_reduce: managed": _managed,
    "all_gather: an output over the next input": _all_gathers([0, 4], [8, 1]),
    "all_gather: an output over an earlier input": _all_gathers([0, 4], [5, 9]),
    "all_gather: lists": _lists,
    "all_gather: rows that alternate": _between_each_other,
    "reduce_scatter: an output in the next input": _reduce_scatters([5, 0], [1, 4]),
    "reduce_scatter: an output in an earlier input": _reduce_scatters([7, 2], [1, 4]),
}


def _as_gloo_does(make, async_op):
    complaints = []
    for name, run in CASES.items():
        found = []
        for group in (world.gloo, dist.group.WORLD):
            memory, work = run(group, dist.get_world_size(), make, async_op)
            if work is not None:
                work.wait()
            found.append(memory)
        if not torch.equal(*found):
            complaints.append(f"{name}: {found[1].tolist()}, gloo has {found[0].tolist()}")
    return complaints


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [torch.empty, unisono.empty], ids=["ordinary", "heap"])
@pytest.mark.parametrize("async_op", [False, True])
def test_as_gloo_does(ranks, size, make, async_op):
    ranks.check(_as_gloo_does, make, async_op)


def _on_one_rank_only():
    """Rank 0 gives one tensor twice, the others two: the calls of the ranks still belong together."""
    found = []
    for group in (world.gloo, dist.group.WORLD):
        memory = _memory(torch.empty, 2 * N)
        parts = memory.split(N)
        tensors = [parts[0], parts[0]] if dist.get_rank() == 0 else list(parts)
        group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
        found.append(memory)
    return [] if torch.equal(*found) else [f"{found[1].tolist()}, gloo has {found[0].tolist()}"]


@pytest.mark.parametrize("size", [2, 3])
def test_on_one_rank_only(ranks, size):
    ranks.check(_on_one_rank_only)


REFUSED = {
    "all_gather: one output twice": _all_gathers([0, 0], [5, 6]),
    "all_gather: outputs partly": _all_gathers([0, 1], [5, 6]),
    "all_gather: lists": lambda group, size, *_: (
        None,
        group.allgather_coalesced([list(torch.ones(2 * N).expand(2, 2 * N))] * size, [torch.ones(2 * N)] * 2),
    ),
    "reduce_scatter: one output twice": _reduce_scatters([0, 0], [1, 4]),
    "reduce_scatter: with gaps": lambda group, size, *_: (
        None,
        group.reduce_scatter_single_coalesced(
            (lambda m: [m[::2], m[2::2]])(torch.ones(4)), [torch.ones(2 * size), torch.ones(size)]
        ),
    ),
}


def _two_results_in_one_place(make, async_op):
    complaints = []
    for name, run in REFUSED.items():
        calls = dist.group.WORLD._get_sequence_number_for_group()
        try:
            run(dist.group.WORLD, dist.get_world_size(), make, async_op)
            complaints.append(f"{name}: no error")
        except RuntimeError as error:
            if "two outputs of one coalesced call share memory" not in str(error):
                complaints.append(f"{name}: {error!r}")
        if dist.group.WORLD._get_sequence_number_for_group() != calls:
            complaints.append(f"{name}: calls were made")
    return complaints


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("async_op", [False, True])
def test_two_results_in_one_place_are_refused(ranks, size, async_op):
    ranks.check(_two_results_in_one_place, torch.empty, async_op)


def _in_place():
    """The very same tensor as input and output of one call, with gaps: the result must stay, not the copied input."""
    rank, size = dist.get_rank(), dist.get_world_size()
    complaints = []
    rows = (torch.arange(float(2 * N * size)) * (rank + 1)).view(size, 2 * N)[:, ::2]
    want = rows[rank] / (rank + 1) * (size * (size + 1) / 2)
    inputs = list(rows)
    dist.reduce_scatter(inputs[rank], inputs)
    if not torch.equal(inputs[rank], want):
        complaints.append(f"reduce_scatter: {inputs[rank].tolist()}, want {want.tolist()}")
    outputs = list(torch.full((size, 2 * N), float(rank))[:, ::2])
    dist.all_gather_coalesced([[output] for output in outputs], [outputs[rank]])
    if [output.tolist() for output in outputs] != [[float(r)] * N for r in range(size)]:
        complaints.append(f"all_gather_coalesced: {outputs}")
    return complaints


@pytest.mark.parametrize("size", [2, 3])
def test_in_place_with_gaps(ranks, size):
    ranks.check(_in_place)
