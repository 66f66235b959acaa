"""A transformer block cut over the ranks, and the tokens per second it makes on unisono and on gloo.

    torchrun --nproc-per-node=2 examples/tensor_parallel_block.py
    torchrun --nproc-per-node=2 examples/tensor_parallel_block.py --dtype bfloat16 --batch 32

Each rank has some heads of the attention and some hidden units of the feed-forward net. Both end in a product whose
parts are summed over the ranks: with gloo a product and an all_reduce, with unisono one call that does both.
"""

import argparse
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

import unisono

HEAD = 64


class Block:
    """This rank's part of the weights; `sums` multiplies and adds over the ranks."""

    def __init__(self, width, dtype, rank, size, sums):
        torch.manual_seed(0)  # the same whole weights on every rank, as if loaded from a checkpoint
        shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "up": (width, 4 * width)}
        whole = {name: torch.randn(shape).div(width**0.5).to(dtype) for name, shape in shapes.items()}
        ends = {name: torch.randn(n, width).div(n**0.5).to(dtype) for name, n in (("o", width), ("down", 4 * width))}
        self.columns = {name: w.chunk(size, dim=1)[rank].contiguous() for name, w in whole.items()}
        self.rows = {name: w.chunk(size, dim=0)[rank].contiguous() for name, w in ends.items()}
        self.sums = sums

    def __call__(self, x, keys, values):
        """One token for each of the batch; `keys` and `values` of all tokens before."""
        h = F.rms_norm(x, x.shape[-1:])
        q, k, v = ((h @ self.columns[name]).view(len(x), -1, 1, HEAD) for name in "qkv")
        keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        attention = F.scaled_dot_product_attention(q, keys, values).reshape(len(x), -1)
        x = x + self.sums(attention, self.rows["o"])
        hidden = F.gelu(F.rms_norm(x, x.shape[-1:]) @ self.columns["up"])
        return x + self.sums(hidden, self.rows["down"]), keys, values


def on_gloo(group, x, weight):
    y = x @ weight
    dist.all_reduce(y, group=group)
    return y


@torch.no_grad()
def generate(sums, options):
    """The last activations, and tokens per second."""
    dtype, rank, size = getattr(torch, options.dtype), dist.get_rank(), dist.get_world_size()
    block = Block(options.width, dtype, rank, size, sums)
    x = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(1)).to(dtype)
    keys = values = torch.empty(options.batch, options.width // HEAD // size, 0, HEAD, dtype=dtype)
    x, keys, values = block(x, keys, values)  # the first call of all warms up
    dist.barrier()
    start = time.perf_counter()
    for _ in range(options.tokens):
        x, keys, values = block(F.rms_norm(x, x.shape[-1:]), keys, values)
    return x, options.tokens * options.batch / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    gloo = dist.new_group(backend="gloo")  # kept here and not longer: its threads must end before Python does
    x, fast = generate(unisono.matmul_all_reduce, options)
    y, slow = generate(partial(on_gloo, gloo), options)
    if options.dtype == "float32":  # in 16 bits the two round differently
        assert torch.allclose(x, y, rtol=1e-3, atol=1e-3), "both must compute the same"
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, width {options.width}, batch {options.batch}, {options.dtype}")
        print(f"  unisono {fast:9.0f} tokens/s\n  gloo    {slow:9.0f} tokens/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
