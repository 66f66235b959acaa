"""DistributedDataParallel on unisono: the same gradients and parameters as on gloo, bit for bit or nearly.

With four ranks gloo adds up in another order than unisono, so results that were added up differ in the last bits.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.torch_stack.worlds import detached, differences, randn

ROUNDING = 1e-5


class Net(nn.Module):
    """Some layers, enough for several buckets of 4 KiB, an embedding, and a branch that ranks may leave out."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.branch = nn.Linear(64, 64)
        self.last = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor, with_branch: bool = True) -> torch.Tensor:
        y = self.layers(self.words(x).mean(1))
        return self.last(self.branch(y) if with_branch else y)


def batch(rank: int, step: int, rows: int = 6) -> torch.Tensor:
    return (randn(rows, 3, by=(rank, step)).abs() * 7).long() % 20


def train(model: nn.Module, steps: int = 3, branch_of: str = "all", rows: int = 6) -> dict:
    """A few steps of SGD; returns all gradients of the last one, and parameters and buffers after it."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    for step in range(steps):
        optimizer.zero_grad()
        with_branch = branch_of == "all" or (branch_of == "even" and (rank + step) % 2 == 0)
        model(batch(rank, step, rows), with_branch).square().mean().backward()
        optimizer.step()
    grads = {f"{name}.grad": p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
    return detached({**grads, **model.state_dict()})


def wrapped(sparse: bool = False, **options) -> DistributedDataParallel:
    torch.manual_seed(dist.get_rank())  # DDP makes all ranks start from rank 0's parameters
    return DistributedDataParallel(Net(sparse), bucket_cap_mb=4096 / 2**20, **options)


def plain(options: dict) -> dict:
    return train(wrapped(**options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
        {"sparse": True},
    ],
    ids=lambda o: "+".join(o) or "default",
)
def test_training(stack, options):
    stack.compare(plain, options, tolerance=ROUNDING)


def unused(branch_of: str) -> dict:
    return train(wrapped(find_unused_parameters=True), branch_of=branch_of)


@pytest.mark.parametrize("branch_of", ["even", "none"])
def test_unused_parameters(stack, branch_of):
    stack.compare(unused, branch_of, tolerance=ROUNDING)


def there_are_buckets() -> int:
    model = wrapped()
    train(model)
    return model._get_ddp_logging_data()["rebuilt_bucket_sizes"].count(",") + 1


def test_several_buckets_are_used(stack):
    assert min(stack.run(there_are_buckets)) >= 3


def single_process() -> list[str]:
    """DDP over the parts of a batch against one process with the whole batch."""
    torch.manual_seed(0)
    alone, model = nn.Linear(7, 3), nn.Linear(7, 3)
    model.load_state_dict(alone.state_dict())
    ddp = DistributedDataParallel(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [randn(4, 7, by=(r,)) for r in range(size)]
    torch.cat([alone(part) for part in parts]).square().mean().backward()
    ddp(parts[rank]).square().mean().backward()
    return differences([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()], ROUNDING)


def test_against_a_single_process(stack):
    assert stack.run(single_process) == [[]] * 4


# --- communication hooks ------------------------------------------------------------------------------------


def own_hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Halves what the ranks' mean is, in a chain of two callbacks, and counts its calls."""
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    mean = work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())
    return mean.then(lambda future: future.value() / 2)


def bf16_compress(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook under another name: it refuses to be used on CPUs by its own."""
    return default_hooks.bf16_compress_hook(state, bucket)


def hooked(name: str) -> dict:
    # Several buckets at once wait for each other in gloo's two threads: one is enough for it.
    model = DistributedDataParallel(Net()) if name == "powerSGD" else wrapped()
    state = None
    if name == "own":
        state = []
        model.register_comm_hook(state, own_hook)
    elif name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == "post_localSGD":
        subgroup, _ = dist.new_subgroups(2)
        state = post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    elif name == "bf16_compress":
        model.register_comm_hook(None, bf16_compress)
    elif name.startswith("builtin"):
        kind = getattr(dist.BuiltinCommHookType, name.removeprefix("builtin_"))
        model._register_builtin_comm_hook(kind)
    else:
        model.register_comm_hook(None, getattr(default_hooks, name))
    result = train(model)
    if name == "own":
        assert len(state) >= 9 and max(state) >= 3, state  # one bucket in step 0, then four
    return result


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("own", ROUNDING),
        ("allreduce_hook", ROUNDING),
        ("builtin_ALLREDUCE", ROUNDING),
        # gloo adds 16-bit numbers up in 16 bits, unisono in 32.
        ("fp16_compress_hook", 2e-3),
        ("bf16_compress", 2e-2),
        ("builtin_FP16_COMPRESS", 2e-3),
        ("powerSGD", 1e-4),
        ("post_localSGD", ROUNDING),
    ],
)
def test_hooks(stack, name, tolerance):
    stack.compare(hooked, name, tolerance=tolerance)


def failing_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)

    def fail(future):
        raise ValueError("the hook's own error")

    return work.get_future().then(fail)


def error_in_a_hook() -> str:
    model = DistributedDataParallel(nn.Linear(3, 3))
    model.register_comm_hook(None, failing_hook)
    try:
        model(torch.ones(2, 3)).sum().backward()
    except Exception as error:
        return str(error)
    return "no error"


def test_an_error_in_a_hook_reaches_the_caller(stack):
    assert all("the hook's own error" in text for text in stack.run(error_in_a_hook))


# --- uneven inputs ------------------------------------------------------------------------------------------


def joined(divide_by_initial_world_size: bool) -> dict:
    """Rank r trains r + 1 steps; those who are out take part in the others' reductions."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    steps = 0
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(rank + 1):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            steps += 1
    return {"steps": steps, **detached(model.state_dict())}


@pytest.mark.parametrize("divide", [True, False])
def test_join_on_uneven_inputs(stack, divide):
    stack.compare(joined, divide, tolerance=ROUNDING)


def join_and_throw() -> str:
    model = DistributedDataParallel(nn.Linear(3, 3))
    try:
        with model.join(throw_on_early_termination=True):
            for _ in range(dist.get_rank() + 1):
                model(torch.ones(2, 3)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_join_may_throw(stack):
    assert all("exhausted" in text for text in stack.run(join_and_throw))


def no_sync() -> dict:
    model = wrapped()
    rank = dist.get_rank()
    with model.no_sync():
        model(batch(rank, 0)).square().mean().backward()
    model(batch(rank, 1)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_accumulation_without_sync(stack):
    stack.compare(no_sync, tolerance=ROUNDING)
