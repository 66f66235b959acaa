"""Methods of a process group against those of ProcessGroupGloo: lists of several tensors, futures, errors, options."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.torch_backend import world
from unisono.testing import run_ranks

R = dist.ReduceOp
CPU = torch.device("cpu")


def _both():
    """gloo's backend itself, below torch's dispatcher, and a group of ours."""
    return world.gloo._get_backend(CPU), dist.group.WORLD


def _given(count=5, dtype=torch.float32, times=2):
    rank = dist.get_rank()
    return [(torch.arange(count) + 10 * rank + 3 * i + 1).to(dtype) for i in range(times)]


# --- several tensors per rank ---------------------------------------------------------------------------------


def _all_reduce(op, times=2, dtype=torch.float32, cut=None):
    def run(pg):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        tensors = _given(dtype=dtype, times=times)
        if cut is not None:
            tensors = [torch.zeros(5, 3, dtype=dtype)[:, 1].copy_(t) for t in tensors]
        return tensors, pg.allreduce(tensors, options)

    return run


def _same_twice(pg):
    (t,) = _given(times=1)
    return [t], pg.allreduce([t, t])


def _sparse(times):
    def run(pg):
        rank = dist.get_rank()
        tensors = [
            torch.sparse_coo_tensor(
                [[rank, rank + i]], [1.0 + i, 10.0], (dist.get_world_size() + times,), check_invariants=True
            )
            for i in range(times)
        ]
        return tensors, pg.allreduce(tensors)

    return run


def _broadcast(root_tensor, times=3):
    def run(pg):
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = dist.get_world_size() - 1, root_tensor
        tensors = _given(times=times)
        return tensors, pg.broadcast(tensors, options)

    return run


def _all_gather(times, dtype=torch.int64):
    def run(pg):
        inputs = _given(dtype=dtype, times=times)
        outputs = [[torch.zeros(5, dtype=dtype) for _ in range(times * dist.get_world_size())] for _ in inputs]
        return [*inputs, *(t for part in outputs for t in part)], pg.allgather(outputs, inputs)

    return run


def _gather(pg):
    (t,) = _given(times=1)
    here = dist.get_rank() == 1
    outputs = [torch.zeros_like(t) for _ in range(dist.get_world_size())]
    options = dist.GatherOptions()
    options.rootRank = 1
    return [t, *outputs], pg.gather([outputs] if here else [], [t], options)


def _plain(call):
    """torch's plain forms, with a tensor for a list and names for options."""

    def run(pg):
        (t,) = _given(times=1)
        return [t], call(pg, t)

    return run


CALLS = {
    "broadcast, root=1": _plain(lambda pg, t: pg.broadcast(t, root=1)),
    "all_reduce of a tensor": _plain(lambda pg, t: pg.allreduce(t)),
    "all_reduce, op": _plain(lambda pg, t: pg.allreduce(t, op=R.MAX)),
    **{f"all_reduce {op}": _all_reduce(op, 3) for op in (R.SUM, R.MIN, R.MAX)},
    "all_reduce product": _all_reduce(R.PRODUCT, dtype=torch.float64),
    "all_reduce bor": _all_reduce(R.BOR, dtype=torch.int32),
    "all_reduce of one": _all_reduce(R.SUM, 1),
    "all_reduce, the same tensor twice": _same_twice,
    "sparse": _sparse(1),
    "two sparse": _sparse(2),
    **{f"broadcast of tensor {i}": _broadcast(i) for i in range(3)},
    "broadcast of one": _broadcast(0, 1),
    **{f"all_gather of {times}": _all_gather(times) for times in (1, 2, 3)},
    "gather": _gather,
}


def _flat(value):
    if isinstance(value, torch.Tensor):
        return value.to_dense().tolist()
    return [_flat(part) for part in value]


def _as_gloo():
    complaints = []
    for name, call in CALLS.items():
        found = []
        for pg in _both():
            tensors, work = call(pg)
            future = work.get_future()
            value = future.wait()
            found.append((_flat(tensors), _flat(value)))
        for what, theirs, ours in zip(("tensors", "future"), *found, strict=True):
            if theirs != ours:
                complaints.append(f"{name}, {what}: gloo has {theirs}, ours is {ours}")
    return complaints


@pytest.mark.parametrize("size", [2, 3])
def test_several_tensors_and_futures(ranks, size):
    ranks.check(_as_gloo)


def _means():
    """gloo divides only the first tensor of a list; here all of them hold the mean of the ranks' sums."""
    size = dist.get_world_size()
    tensors, work = _all_reduce(R.AVG, 2, torch.float64)(dist.group.WORLD)
    work.wait()
    want = sum(2 * torch.arange(5.0, dtype=torch.float64) + 20 * r + 5 for r in range(size)) / size
    assert all(torch.allclose(t, want) for t in tensors), (tensors, want)


def _gaps():
    """gloo takes tensors with gaps for contiguous ones: it changes the wrong elements."""
    size = dist.get_world_size()
    tensors, work = _all_reduce(R.SUM, cut=True)(dist.group.WORLD)
    work.wait()
    want = sum(2 * torch.arange(5.0) + 20 * r + 5 for r in range(size))
    assert all(torch.equal(t, want) and t._base[:, 0].eq(0).all() for t in tensors), (tensors, want)


@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize("body", [_means, _gaps])
def test_right_where_gloo_is_not(ranks, size, body):
    ranks.run(body)


# --- errors -----------------------------------------------------------------------------------------------------


def _options(kind, root=0, tensor=0):
    made = getattr(dist, kind)()
    made.rootRank = root
    if tensor:
        made.rootTensor = tensor
    return made


def _x(count=1, dtype=torch.float32):
    return torch.zeros(count, dtype=dtype)


def _s():
    return torch.sparse_coo_tensor([[0]], [1.0], (2,))


# What is wrong -> the call on a backend, whose rank is r of s.
BAD = {
    "broadcast: root tensor": lambda pg, r, s: pg.broadcast([_x()], _options("BroadcastOptions", r, 1)),
    "broadcast: root tensor negative": lambda pg, r, s: pg.broadcast([_x()], _options("BroadcastOptions", r, -1)),
    "broadcast: root rank": lambda pg, r, s: pg.broadcast([_x(), _x()], _options("BroadcastOptions", s)),
    "broadcast: root tensor of two": lambda pg, r, s: pg.broadcast([_x(), _x()], _options("BroadcastOptions", r, 2)),
    "broadcast: types": lambda pg, r, s: pg.broadcast([_x(), _x(1, torch.float64)], _options("BroadcastOptions", r)),
    "broadcast: sizes": lambda pg, r, s: pg.broadcast([_x(), _x(2)], _options("BroadcastOptions", r)),
    "broadcast: sparse": lambda pg, r, s: pg.broadcast([_s(), _s()], _options("BroadcastOptions", r)),
    "allreduce: none": lambda pg, r, s: pg.allreduce([], dist.AllreduceOptions()),
    "allreduce: types": lambda pg, r, s: pg.allreduce([_x(), _x(1, torch.float64)]),
    "allreduce: sizes": lambda pg, r, s: pg.allreduce([_x(), _x(2)]),
    "allreduce: layouts": lambda pg, r, s: pg.allreduce([_x(), _s()]),
    "allreduce_coalesced: none": lambda pg, r, s: pg.allreduce_coalesced([], dist.AllreduceCoalescedOptions()),
    "reduce: root tensor": lambda pg, r, s: pg.reduce([_x()], _options("ReduceOptions", r, 1)),
    "reduce: root": lambda pg, r, s: pg.reduce([_x()], _options("ReduceOptions", -1)),
    "reduce: two": lambda pg, r, s: pg.reduce([_x(), _x()], _options("ReduceOptions", r)),
    "allgather: no inputs": lambda pg, r, s: pg.allgather([], []),
    "allgather: no outputs": lambda pg, r, s: pg.allgather([], [_x()]),
    "allgather: more outputs": lambda pg, r, s: pg.allgather([[_x()] * s, [_x()] * s], [_x()]),
    "allgather: types": lambda pg, r, s: pg.allgather([[_x()] * 2 * s] * 2, [_x(), _x(1, torch.float64)]),
    "allgather: sizes": lambda pg, r, s: pg.allgather([[_x()] * 2 * s] * 2, [_x(), _x(2)]),
    "allgather: lengths": lambda pg, r, s: pg.allgather([[_x()] * s] * 2, [_x(), _x()]),
    "gather: no input": lambda pg, r, s: pg.gather([], [], _options("GatherOptions")),
    "gather: two inputs": lambda pg, r, s: pg.gather([], [_x(), _x()], _options("GatherOptions")),
    "gather: root": lambda pg, r, s: pg.gather([], [_x()], _options("GatherOptions", s)),
    "gather: no output": lambda pg, r, s: pg.gather([], [_x()], _options("GatherOptions", r)),
    "gather: two outputs": lambda pg, r, s: pg.gather([[_x()] * s] * 2, [_x()], _options("GatherOptions", r)),
    "gather: elsewhere": lambda pg, r, s: pg.gather([[_x()] * s], [_x()], _options("GatherOptions", (r + 1) % s)),
    "scatter: no output": lambda pg, r, s: pg.scatter([], [], _options("ScatterOptions")),
    "scatter: two outputs": lambda pg, r, s: pg.scatter([_x(), _x()], [], _options("ScatterOptions")),
    "scatter: no input": lambda pg, r, s: pg.scatter([_x()], [], _options("ScatterOptions", r)),
    "scatter: two inputs": lambda pg, r, s: pg.scatter([_x()], [[_x()] * s] * 2, _options("ScatterOptions", r)),
    "scatter: elsewhere": lambda pg, r, s: pg.scatter([_x()], [[_x()] * s], _options("ScatterOptions", (r + 1) % s)),
    "reduce_scatter: two outputs": lambda pg, r, s: pg.reduce_scatter([_x(), _x()], [[_x()] * s] * 2),
    "reduce_scatter: no input": lambda pg, r, s: pg.reduce_scatter([_x()], []),
    "send: two": lambda pg, r, s: pg.send([_x(), _x()], (r + 1) % s, 0),
}


def _words(error):
    text = re.sub(r"ProcessGroup(Gloo|Unisono)(::\w+)?:? ?", "", str(error).splitlines()[0])
    return re.split(r" at index| \(expected|\.$|, got", text)[0].strip()


def _refused_alike():
    complaints = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, call in BAD.items():
        errors = []
        for pg in _both():
            with pytest.raises(RuntimeError) as caught:
                call(pg, rank, size).wait()
            errors.append(caught.value)
        if _words(errors[0]) not in str(errors[1]):
            complaints.append(f"{name}: {errors[1]} lacks {_words(errors[0])!r}")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size, "the group is out of step after refusals"
    return complaints


@pytest.mark.parametrize("size", [2, 3])
def test_refused_in_the_words_of_gloo_before_anything_moves(ranks, size):
    ranks.check(_refused_alike)


def _overlaps():
    memory = torch.ones(8)
    size = dist.get_world_size()
    calls = [
        lambda pg: pg.allreduce([memory[:4], memory[2:6]]),
        lambda pg: pg.broadcast([memory[:4], memory[3:7]]),
        lambda pg: pg.allgather([list(memory[: 2 * size].split(1))] * 2, [torch.ones(1), torch.ones(1)]),
        lambda pg: pg.allgather(
            [list(memory[: 2 * size].split(1)), [torch.ones(1) for _ in range(2 * size)]], [memory[:1], torch.ones(1)]
        ),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="share memory"):
            call(dist.group.WORLD)
    apart = torch.ones(4, 4)
    dist.group.WORLD.allreduce([apart[:, 0], apart[:, 2]]).wait()  # one between the other: no byte in common
    want = torch.ones(4, 4)
    want[:, [0, 2]] = 2.0 * size
    assert torch.equal(apart, want) and torch.equal(memory, torch.ones(8))


@pytest.mark.parametrize("size", [2])
def test_tensors_of_one_call_that_share_memory(ranks, size):
    ranks.run(_overlaps)


# --- options and time-outs --------------------------------------------------------------------------------------


def _late(group, path, how):
    """Rank 0 calls alone with a limit of 1 ms, of the call or of the group; the others stay, or leave."""
    store = dist.FileStore(path, group.size)
    dist.init_process_group("unisono", store=store, rank=group.rank, world_size=group.size)
    pg = dist.group.WORLD
    assert pg.options._timeout == timedelta(minutes=30)
    options = dist.AllreduceOptions()
    if "call" in how:
        options.timeout = timedelta(milliseconds=1)
    else:
        pg.set_timeout(timedelta(milliseconds=1))
        assert pg.options._timeout == timedelta(milliseconds=1)
    store.set(f"joined {group.rank}", "1")  # rank 0 gives the group up, which must not meet others on their way into it
    store.wait([f"joined {r}" for r in range(group.size)], timedelta(seconds=60))
    words = ""
    if group.rank == 0:
        if "leave" in how:
            store.wait(["left"], timedelta(seconds=60))
            time.sleep(0.05)
        with pytest.raises(unisono.CollectiveTimeoutError) as caught:
            pg.allreduce([torch.ones(1)], options).wait()
        words = str(caught.value)
        store.set("over", "1")
    if "leave" in how:
        if group.rank:
            dist.destroy_process_group()
        store.set("left", "1") if group.rank == group.size - 1 else None
    store.wait(["over"], timedelta(seconds=60))
    return words


@pytest.mark.parametrize("how", ["call", "group", "call, they leave", "group, they leave"])
def test_time_outs_as_gloo_says_them(tmp_path, how):
    words = run_ranks(2, _late, str(tmp_path / "store"), how)[0]
    assert "Timed out waiting 1ms" in words
    assert ("left" in words) == ("leave" in how)
