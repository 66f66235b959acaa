"""A mixture of experts whose experts are cut over the ranks, checked against the whole model.

    torchrun --nproc-per-node=2 examples/moe_feed_forward.py
    torchrun --nproc-per-node=2 examples/moe_feed_forward.py --dtype float16 --tokens 512

Every token goes to one expert, which is a feed-forward net: up to `hidden`, GELU, down again. Each rank holds a part of
every expert's hidden units: columns of the first weight, rows of the second. Tokens are sorted by expert, so that each
expert's tokens are consecutive rows, and `group_list` says how many each has. The first product needs no communication;
the second is summed over the ranks, gets the residual, and is rounded, in one call.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

import unisono

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class FeedForward:
    """This rank's part of all experts."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor, rank: int, size: int) -> None:
        # Rows and columns that do not divide equally are fine: a rank just holds one more than another.
        self.up = list(up.tensor_split(size, dim=2)[rank].contiguous())
        self.down = [unisono.PreparedWeight(w) for w in down.tensor_split(size, dim=1)[rank]]
        self.bias = list(bias)

    def __call__(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=len(self.up))
        x = tokens[order]
        # No ranks take part in the first product: each has all tokens, and its own hidden units.
        parts = [
            gelu(a.float() @ w.float()).to(a.dtype) for a, w in zip(x.split(counts.tolist()), self.up, strict=True)
        ]
        (y,) = unisono.grouped_matmul_all_reduce(
            [torch.cat(parts)], self.down, bias=self.bias, group_list=counts, split_item=3, residual=x
        )
        back = torch.empty_like(y)
        back[order] = y
        return back


def whole_model(
    tokens: torch.Tensor, expert: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """The same in one process, token by token, in float64."""
    rows = []
    for token, e in zip(tokens.double(), expert.tolist(), strict=True):
        rows.append(token + gelu(token @ up[e].double()) @ down[e].double() + bias[e].double())
    return torch.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--experts", type=int, default=6)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--hidden", type=int, default=257)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)

    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()

    # The same numbers on every rank, as if loaded from a checkpoint; a rank keeps its part of them.
    torch.manual_seed(0)
    tokens = torch.randn(args.tokens, args.width).to(dtype)
    expert = torch.randint(args.experts - 1, (args.tokens,))  # the last expert gets no token
    up = (torch.randn(args.experts, args.width, args.hidden) / args.width**0.5).to(dtype)
    down = (torch.randn(args.experts, args.hidden, args.width) / args.hidden**0.5).to(dtype)
    bias = torch.randn(args.experts, args.width).to(dtype)

    y = FeedForward(up, down, bias, rank, size)(tokens, expert)
    error = (y.double() - whole_model(tokens, expert, up, down, bias)).abs().max().item()
    assert error < TOLERANCE[dtype] * 4, f"rank {rank}: off by {error}"
    if rank == 0:
        print(f"{args.tokens} tokens, {args.experts} experts on {size} ranks, {args.dtype}: largest error {error:.2g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
