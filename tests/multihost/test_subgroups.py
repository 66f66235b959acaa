"""Numbers of groups over hosts: subgroups inside a host take none; who has no more is told what to do."""

import pytest
import torch

from tests.multihost.pretended import LAYOUTS, over_hosts
from unisono.transport.hosts.links import MOST_CONTEXTS


def numbers(group):
    with over_hosts(group, LAYOUTS["2+2"]) as over:
        engine = over.transport.links.engine
        for _ in range(5):
            over.split([0, 1] if over.rank < 2 else [2, 3]).close()
        inside = engine.contexts
        across = over.split([over.rank % 2, over.rank % 2 + 2])
        group.barrier()
        across.close()
        made = engine.contexts
        engine.contexts = MOST_CONTEXTS - 1
        with pytest.raises(RuntimeError, match="Keep subgroups instead") as caught:
            over.split([0, 1, 2, 3])
        near = over.split([0, 1] if over.rank < 2 else [2, 3])
        tensor = torch.ones(4)
        near.all_reduce(tensor)
        over.all_reduce(tensor)  # nobody was disturbed
        near.close()
        return inside, made, str(MOST_CONTEXTS - 1) in str(caught.value), tensor[0].item()


@pytest.mark.parametrize("size", [4])
def test_numbers_of_subgroups(pool, size):
    assert pool.run(numbers) == [(0, 1, True, 8.0)] * size
