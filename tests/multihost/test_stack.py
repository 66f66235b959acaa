"""What stands on a process group, over pretended hosts: the same results as on one host.

Hosts of 2+2 ranks sum in the order of one host, so not a bit may differ; interleaved ranks are summed in another order.
"""

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.multihost.pretended import LAYOUTS, pretending
from tests.torch_stack import test_compile, test_ddp, test_dtensor, test_fsdp
from tests.torch_stack.worlds import detached, differences, leaves, randn, world
from unisono import comm_func
from unisono.testing import run_ranks
from unisono.transport import find
from unisono.transport.hosts.transport import HostsTransport


def functions() -> list:
    """comm_func with gradients, as it is and compiled."""
    torch._dynamo.reset()

    def loss(x: torch.Tensor) -> torch.Tensor:
        rows = [1, 3, 2, 4]
        whole, _ = comm_func.all_gather_into_tensor_uneven(x, rows)
        part, _ = comm_func.reduce_scatter_tensor_uneven(whole * whole, rows)
        total, _ = comm_func.all_reduce(part.sum(0))
        return (total * x).sum()

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = randn(1 + [0, 2, 1, 3][dist.get_rank()], 3, by=(dist.get_rank(),)).requires_grad_()
        value = function(x)
        value.backward()
        found += [value.detach(), x.grad]
    return found


def fused() -> list:
    """Small and large products, with their gradients."""
    found = []
    for rows in (8, 400):
        x = randn(rows, 32, by=(dist.get_rank(), 1)).requires_grad_()
        weight = randn(32, 96, by=(dist.get_rank(), 2)).requires_grad_()
        for y in (
            unisono.matmul_all_reduce(x, weight),
            unisono.matmul_reduce_scatter(x, weight, split_sizes=[rows - 5, 0, 3, 2]),
            unisono.all_gather_matmul(x, weight),
        ):
            y.square().sum().backward()
            found.append(y.detach())
        found += [x.grad, weight.grad]
    return found


def uneven_mesh() -> list:
    """HSDP whose shards are inside hosts, or across them; returns where it differs from one process."""
    return [torch.tensor(len(test_fsdp.trained(case))) for case in ("plain", "hsdp", "shared")]


PROGRAMS = {
    "DDP": lambda: test_ddp.plain({}),
    "DDP compiled": lambda: test_compile.trained("aot_eager"),
    "FSDP2 and HSDP": uneven_mesh,
    "DTensor": lambda: test_dtensor.redistributed(1),
    "tensor parallel": lambda: test_dtensor.tensor_parallel(True),
    "compiled gradients": test_compile.gradient,
    "comm_func": functions,
    "fused": fused,
}


def over_hosts_and_on_one(group, hosts, tolerance):
    complaints = []
    for name, program in PROGRAMS.items():
        with world(group, "unisono"):
            want = detached(program())
        with pretending(hosts), world(group, "unisono"):
            assert isinstance(find.find(None, torch.ones(1)), HostsTransport)
            got = detached(program())
        assert leaves(want)
        complaints += [f"{name}: {line}" for line in differences(got, want, tolerance)]
        if name == "FSDP2 and HSDP" and any(int(n) for n in got):
            complaints.append(f"{name} differs from one process")
    return complaints


@pytest.mark.parametrize(
    ("layout", "tolerance"), [("2+2", 0.0), pytest.param("interleaved", 1e-5, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(400)
def test_the_same_as_on_one_host(layout, tolerance):
    assert run_ranks(4, over_hosts_and_on_one, LAYOUTS[layout], tolerance, timeout_s=350) == [[]] * 4
