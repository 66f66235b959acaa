"""Tensors with gaps, transposed or channels-last, as inputs and outputs of every collective, on any of the ranks."""

import pytest
import torch
import torch.distributed as dist

import unisono

ROWS, COLUMNS = 4, 6


def _gaps(t):
    return torch.full((t.shape[0], 2 * t.shape[1]), -9.0)[:, ::2].copy_(t)


def _transposed(t):
    return torch.full((t.shape[1], t.shape[0]), -9.0).t().copy_(t)


def _flipped(t):
    """The rows of a larger tensor: whole rows, but not behind one another."""
    return torch.full((2 * t.shape[0], t.shape[1]), -9.0)[::2].copy_(t)


def _in_the_heap(t):
    return unisono.empty(t.shape[1], t.shape[0]).t().copy_(t)


PLACES = {"gaps": _gaps, "transposed": _transposed, "rows": _flipped, "in the heap": _in_the_heap}


def _of(rank):
    return torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS) + 100.0 * (rank + 1)


def _with_strides(place, who, async_op):
    """`who` of the ranks, or all, have such tensors; the others have contiguous ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    make = PLACES[place] if who is None or who == rank else torch.clone
    complaints = []

    def compare(name, work, *pairs):
        if work is not None:
            work.wait()
        for got, want in pairs:
            if not torch.equal(got, want):
                complaints.append(f"{name}, {place}: {got}, want {want}")

    def blank(rows=ROWS):
        return make(torch.full((rows, COLUMNS), -7.0))

    mine, everyone = _of(rank), [_of(r) for r in range(size)]
    total, last = sum(everyone), size - 1
    options = {"async_op": async_op}

    t = make(mine)
    compare("all_reduce", dist.all_reduce(t, **options), (t, total))
    t, u = make(mine), torch.ones(3)
    with dist._coalescing_manager(async_ops=async_op) as manager:
        dist.all_reduce(u, **options)
        dist.all_reduce(t, **options)
    compare("all_reduce, managed", manager if async_op else None, (t, total), (u, torch.full((3,), float(size))))
    t = make(mine)
    compare("reduce", dist.reduce(t, last, **options), (t, total if rank == last else mine))
    t = make(mine)
    compare("broadcast", dist.broadcast(t, last, **options), (t, everyone[last]))
    source, outputs = make(mine), [blank() for _ in range(size)]
    work = dist.all_gather(outputs, source, **options)
    compare("all_gather", work, *zip(outputs, everyone, strict=True), (source, mine))
    source, output = make(mine), blank(ROWS * size)
    work = dist.all_gather_single(output, source, **options)
    compare("all_gather_single", work, (output, torch.cat(everyone)), (source, mine))
    sources, output = [make(mine + r) for r in range(size)], blank()
    work = dist.reduce_scatter(output, sources, **options)
    compare("reduce_scatter", work, (output, total + size * rank), (sources[0], mine))
    source, output = make(torch.cat([mine + r for r in range(size)])), blank()
    compare(
        "reduce_scatter_single", dist.reduce_scatter_single(output, source, **options), (output, total + size * rank)
    )
    outputs = [blank() for _ in range(size)] if rank == 0 else None
    work = dist.gather(make(mine), outputs, dst=0, **options)
    compare("gather", work, *([] if outputs is None else zip(outputs, everyone, strict=True)))
    output = blank()
    work = dist.scatter(output, [make(part) for part in everyone] if rank == 0 else None, src=0, **options)
    compare("scatter", work, (output, mine))
    outputs = [blank() for _ in range(size)]
    work = dist.all_to_all(outputs, [make(mine + r) for r in range(size)], **options)
    compare("all_to_all", work, *zip(outputs, [part + rank for part in everyone], strict=True))
    source, output = make(torch.cat([mine + r for r in range(size)])), blank(ROWS * size)
    work = dist.all_to_all_single(output, source, **options)
    compare("all_to_all_single", work, (output, torch.cat([part + rank for part in everyone])))
    return complaints


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_strides(ranks, size, place):
    for who in (None, 0, size - 1):
        for async_op in (False, True):
            ranks.check(_with_strides, place, who, async_op)


def _seen_without_waiting():
    """The values are there as soon as the handle says so, by whichever way one asks."""
    size = dist.get_world_size()
    complaints = []
    for way in ("is_completed", "is_success", "result", "future", "callback", "synchronize"):
        t = _transposed(torch.ones(ROWS, COLUMNS))
        work = dist.all_reduce(t, async_op=True)
        if way in ("is_completed", "is_success"):
            while not getattr(work, way)():
                pass
        elif way == "result":
            work.result()
        elif way == "synchronize":
            work.synchronize()
        elif way == "future":
            work.get_future().wait()
        else:
            seen = work.get_future().then(lambda future: future.value()[0].clone())
            if not torch.equal(seen.wait(), torch.full((ROWS, COLUMNS), float(size))):
                complaints.append(f"callback: {seen.value()}")
        if not torch.equal(t, torch.full((ROWS, COLUMNS), float(size))):
            complaints.append(f"{way}: {t}")
        t.fill_(5.0)
        work.wait()
        if t.min() != 5.0:
            complaints.append(f"{way}: waiting again has written again")
    return complaints


@pytest.mark.parametrize("size", [2])
def test_strided_results_are_there_when_the_handle_says_so(ranks, size):
    ranks.check(_seen_without_waiting)


def _expanded():
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(torch.ones(1).expand(4))
    output = torch.empty(4 * dist.get_world_size())
    dist.all_gather_single(output, torch.full((1,), float(dist.get_rank())).expand(4))
    assert output.tolist() == [float(r) for r in range(dist.get_world_size()) for _ in range(4)]


@pytest.mark.parametrize("size", [2])
def test_an_expanded_tensor_is_an_input_only(ranks, size):
    ranks.run(_expanded)
