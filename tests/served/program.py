"""A program written for gloo, as clients write them, which must run as it is. Prints one line a rank."""

import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def names_and_options(pg):
    """What clients ask a group about itself."""
    assert dist.get_backend() == "gloo" == dist.get_backend(pg) == pg.name() == pg._get_backend_name()
    assert dist.get_backend() is dist.Backend.GLOO or dist.get_backend() == dist.Backend.GLOO
    assert dist.get_backend_config() == "cpu:gloo,cuda:gloo"
    backend = pg._get_backend(torch.device("cpu"))
    assert isinstance(backend, dist.ProcessGroupGloo) and backend.options._timeout == timedelta(seconds=100)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=70))
    assert backend.options._timeout == timedelta(seconds=70)
    assert issubclass(type(backend), dist.ProcessGroupGloo) and dist.ProcessGroupGloo.__name__ == "ProcessGroupGloo"
    dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)


def groups(rank, size):
    """Every way to ask for a group on CPU; a sum in each."""
    made = {
        "gloo": dist.new_group(backend="gloo"),
        "cpu:gloo": dist.new_group(backend="cpu:gloo"),
        "Backend.GLOO": dist.new_group(list(range(size)), backend=dist.Backend.GLOO, timeout=timedelta(seconds=60)),
        "like the default": dist.new_group(list(range(size))[::-1]),
        "mesh": dist.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)).get_group("dp"),
        "options": direct(rank, size),
    }
    for name, group in made.items():
        total = torch.full((3,), rank + 1.0)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [size * (size + 1) / 2] * 3, name
    return {name: type(group).__name__ for name, group in made.items()}


def direct(rank, size):
    """The constructor, with gloo's options and devices."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=50)
    options._threads = 2
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    store = dist.PrefixStore("direct", dist.distributed_c10d._get_default_store())
    pg = dist.ProcessGroupGloo(store, rank, size, options)
    assert pg.options._timeout == timedelta(seconds=50) and pg.options._threads == 2
    assert (pg.rank(), pg.size()) == (rank, size)
    return pg


def train(rank):
    """DDP, whose gradients are the mean of the ranks'."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    ddp = DistributedDataParallel(model)
    x = torch.arange(6.0).view(2, 3) + rank
    ddp(x).pow(2).sum().backward()
    return [round(value, 3) for value in model.weight.grad.flatten().tolist()]


def behind():
    """A dtype that unisono does not know: gloo sends the bytes of whatever it gets."""
    rank = dist.get_rank()
    if "UNISONO_GLOO" not in os.environ:
        return None  # torch's dispatcher is before gloo, and knows no kernel for such a message
    q = torch.quantize_per_tensor(torch.full((5,), float(rank)), 0.5, 0, torch.quint8)
    if rank == 0:
        dist.send(q, 1)
    elif rank == 1:
        dist.recv(q, 0)
    return q.dequantize().tolist()


def main(rank=None, size=None, path=None):
    where = {} if rank is None else {"init_method": f"file://{path}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=100), **where)
    rank, size = dist.get_rank(), dist.get_world_size()
    names_and_options(dist.group.WORLD)
    told = {
        "world": type(dist.group.WORLD).__name__,
        "groups": groups(rank, size),
        "gradient": train(rank),
        "behind": behind(),
        "gathered": gathered(size),
    }
    dist.destroy_process_group()
    print(f"rank {rank} {json.dumps(told)}\n", end="", flush=True)


def gathered(size):
    found = [None] * size
    dist.all_gather_object(found, {"rank": dist.get_rank()})
    return found


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        mp.spawn(main, (2, os.environ["MEETING_FILE"]), nprocs=2)
