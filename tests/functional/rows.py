"""What the rows of docs/migration.md have at hand; the rows themselves are in from_torch.py and from_mindspore.py."""

import inspect

import torch
import torch.distributed as dist

from unisono import comm_func

WORLD = comm_func.GlobalComm.WORLD_COMM_GROUP


class Row:
    """What a row's test has at hand on rank 0 or 1 of 2."""

    def __init__(self, backend):
        self.backend, self.rank, self.peer = backend, dist.get_rank(), 1 - dist.get_rank()
        self.x = torch.arange(8.0).reshape(4, 2) + 10 * self.rank
        self.other = torch.arange(8.0).reshape(4, 2) + 10 * self.peer
        self.both = [self.x, self.other] if self.rank == 0 else [self.other, self.x]


def same(a, b):
    assert torch.equal(a, b) and a.dtype == b.dtype, (a, b)


def takes(function, **defaults):
    """The function has exactly these parameters, in this order, with these defaults."""
    found = {name: p.default for name, p in inspect.signature(function).parameters.items() if name != "self"}
    assert found == defaults and list(found) == list(defaults), (function, found)
