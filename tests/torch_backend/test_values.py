"""Every collective of torch.distributed × dtype × op × size × group, against a reference from one process, by bits."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.calls import REDUCING, all_kinds, matrices, sampled, splits
from tests.reference import MOVABLE, REDUCTIONS
from tests.torch_backend import functions, world
from tests.torch_backend.functions import FUNCTIONS, DistCall, check

SIZES = (0, 1, 2, 7, 64, 1021, 16_385, 70_001)
SUM = ("float32", "sum")
ONE_COUNT = ("all_reduce", "reduce", "broadcast")


def several(function):
    return "coalesced" in function or "managed" in function


def pairs_of(function):
    """All (dtype, op) that torch lets through."""
    verb = FUNCTIONS[function][0]
    if verb not in REDUCING:
        return [(dtype, "sum") for dtype in MOVABLE]
    # torch refuses the product of complex numbers where it would hand them on as pairs of reals.
    refused = {("complex64", "product"), ("complex128", "product")} if verb == "all_reduce" else set()
    return [pair for pair in REDUCTIONS if pair not in refused]


def make_call(function, size, seed, pair, group, elements, cut=0, root=0, **rest):
    """A call of `function` in a group of a world of `size` ranks; `cut` chooses how uneven the chunks are."""
    verb, form, _ = FUNCTIONS[function]
    members = len(world.layouts(size)[group])
    kinds = rest.pop("kinds", ("oo",) * size)
    columns = rest.pop("columns", 1)

    def counts_of(total):
        if verb in ONE_COUNT:
            return total
        if verb == "all_to_all":
            cells = matrices(total // columns, members)
            return tuple(tuple(n * columns for n in row) for row in cells[cut % len(cells)])
        ways = splits(total, members)
        return ways[cut % len(ways)] if form == "list" else (total // members,) * members

    parts = tuple(counts_of(n) for n in (elements, elements // 2 + 3, 5)) if several(function) else ()
    whole = parts[0] if parts else counts_of(elements)
    return DistCall(
        verb, pair[0], whole, pair[1], root % members, kinds, form, 0, columns, seed=seed,
        function=function, group=group, parts=parts, **rest,
    )  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_dtype_and_op(ranks, size, function):
    groups = list(world.layouts(size))
    calls = [
        make_call(function, size, seed, pair, groups[seed % len(groups)], 60, seed, seed, async_op=seed % 5 > 2)
        for seed, pair in enumerate(pairs_of(function))
    ]
    check(ranks, calls)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_sizes_places_and_groups(ranks, size, function):
    axes = {
        "elements": SIZES,
        "kinds": all_kinds(size),
        "group": list(world.layouts(size)),
        "async_op": (False, True),
        "pair": pairs_of(function),
        "columns": (1, 3, 4),
        "cut": range(7),
        "root": range(size),
        "special": (False, False, True),
    }
    check(ranks, [make_call(function, size, seed, **picked) for seed, picked in enumerate(sampled(40, **axes))])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_several_mebibytes(ranks, size, function):
    """More than the stage holds: odd, in pieces, in the heap and outside."""
    elements = 3 * (1 << 20) // 4 + 5
    check(
        ranks,
        [
            make_call(function, size, seed, SUM, "world", elements, seed, seed, kinds=kinds, async_op=seed == 1)
            for seed, kinds in enumerate([("hh",) * size, ("oo",) * size])
        ],
    )


def _shapes():
    """Functions keep the shape they are given, whatever it is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    complaints = []
    for shape in ((), (1,), (0,), (0, 3), (3, 0, 2), (2, 3, 4), (1, 1, 1, 5)):
        mine = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape) * (rank + 1)
        of_rank = [torch.arange(1.0, 1.0 + mine.numel()).reshape(shape) * (r + 1) for r in range(size)]
        total = sum(of_rank)

        def compare(name, got, want, shape=shape):
            if got.shape != want.shape or not torch.equal(got, want):
                complaints.append(f"{name} of {tuple(shape)}: {got.shape} {got}, want {want.shape} {want}")

        def blank(shape=shape):
            return torch.full(shape, -7.0)

        got = mine.clone()
        dist.all_reduce(got)
        compare("all_reduce", got, total)
        got = mine.clone()
        dist.reduce(got, size - 1)
        compare("reduce", got, total if rank == size - 1 else mine)
        got = mine.clone()
        dist.broadcast(got, size - 1)
        compare("broadcast", got, of_rank[-1])
        parts = [blank() for _ in range(size)]
        dist.all_gather(parts, mine)
        compare("all_gather", torch.stack(parts), torch.stack(of_rank))
        for whole in (torch.stack(of_rank), torch.cat(of_rank) if shape else torch.stack(of_rank)):
            got = torch.full_like(whole, -7.0)
            dist.all_gather_single(got, mine)
            compare("all_gather_single", got, whole)
            got = blank()
            dist.reduce_scatter_single(got, whole * (rank + 1))
            compare("reduce_scatter_single", got, of_rank[rank] * sum(range(1, size + 1)))
        got = blank()
        dist.reduce_scatter(got, [part * (rank + 1) for part in of_rank])
        compare("reduce_scatter", got, of_rank[rank] * sum(range(1, size + 1)))
        parts = [blank() for _ in range(size)] if rank == 0 else None
        dist.gather(mine, parts, dst=0)
        if rank == 0:
            compare("gather", torch.stack(parts), torch.stack(of_rank))
        got = blank()
        dist.scatter(got, of_rank if rank == 0 else None, src=0)
        compare("scatter", got, of_rank[rank])
        parts = [blank() for _ in range(size)]
        dist.all_to_all(parts, [mine + r for r in range(size)])
        compare("all_to_all", torch.stack(parts), torch.stack([part + rank for part in of_rank]))
    return complaints


@pytest.mark.parametrize("size", [1, 3])
def test_shapes(ranks, size):
    ranks.check(_shapes)


def _many_in_flight(seed):
    """Calls in all groups at once, all of them under way before the first is waited for; waited for backwards."""
    size = dist.get_world_size()
    names = list(world.layouts(size))
    calls = [
        make_call(function, size, 97 * seed + i, SUM, names[(i + seed) % len(names)], 40 + 9 * i, i, i, async_op=True)
        for i, function in enumerate([f for f in FUNCTIONS if "managed" not in f] * 2)
    ]
    under_way = [(call, functions.start(call)) for call in calls]
    return [
        f"{line} in {call}"
        for call, started in reversed(under_way)
        if started is not None
        for line in started.finish()[0]
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_in_flight_in_several_groups(ranks, size):
    for seed in range(4):
        ranks.check(_many_in_flight, seed)


def _managed_batch():
    """A batch with a device, as FSDP makes it, is over only when all of its calls are."""
    late = dist.get_rank() == dist.get_world_size() - 1
    for ask in (dist.all_reduce, lambda t, async_op: dist.broadcast(t, dist.get_world_size() - 1, async_op=async_op)):
        tensors = [torch.full((n,), float(late)) for n in (1, 500, 20_000)]
        dist.barrier()
        if late:
            time.sleep(0.2)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            for t in tensors:
                ask(t, async_op=True)
        manager.wait()
        assert all(bool((t == 1).all()) for t in tensors)


@pytest.mark.parametrize("size", [2, 3])
def test_a_managed_batch_waits(ranks, size):
    ranks.run(_managed_batch)
