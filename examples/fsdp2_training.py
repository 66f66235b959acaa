"""FSDP2 training on CPUs, its buffers in shared memory: losses and time per step, next to gloo's.

    torchrun --nproc-per-node=2 examples/fsdp2_training.py

The model and the loop are plain torch. The two lines that differ from a program on gloo are marked.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import unisono.fsdp


def model_of(width, layers):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
    return nn.Sequential(*blocks)


def train(backend, options):
    """The loss of every step, and the milliseconds of the median one, on a group of this backend."""
    mesh = DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")  # 1: "unisono" instead of "gloo"
    model = model_of(options.width, options.layers)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if backend == "unisono":
        unisono.fsdp.use_shared_memory(model)  # 2: what is gathered and reduced is not copied
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chance = torch.Generator().manual_seed(dist.get_rank())
    losses, times = [], []
    for _ in range(options.steps):
        x = torch.randn(options.batch, options.width, generator=chance)
        start = time.perf_counter()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    return losses, sorted(times)[len(times) // 2] * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    results = {backend: train(backend, options) for backend in ("unisono", "gloo")}
    losses, on_gloo = (torch.tensor(results[backend][0]) for backend in ("unisono", "gloo"))
    assert torch.allclose(losses, on_gloo, rtol=1e-4), "both must train alike"
    assert losses[-1] < losses[0]
    if dist.get_rank() == 0:
        print(f"FSDP2, {dist.get_world_size()} ranks: loss {losses[0]:.3f} → {losses[-1]:.3f} in {options.steps} steps")
        for backend, (_, ms) in results.items():
            print(f"  {backend:8s} {ms:8.1f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
