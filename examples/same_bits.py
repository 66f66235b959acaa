"""A small Llama generates the same tokens from the same logits, bit for bit, on 1, 2, 4 and 8 ranks.

    python examples/same_bits.py            # 200 tokens in bfloat16; others: examples/same_bits.py 12 float32

Its layers are plain torch modules; `unisono.tensor_parallel` cuts them over the ranks. With order="tree" every sum is
made in an order that does not depend on the cut. In the default order each number of ranks rounds differently.
"""

import hashlib
import sys

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.testing import run_ranks

DIM, HEADS, KV_HEADS, HEAD, HIDDEN, LAYERS, VOCABULARY = 1024, 16, 8, 64, 2560, 2, 256


def rotated(x, at):
    """Rotary positions, from position `at` on."""
    angles = torch.outer(torch.arange(at, at + x.shape[-2]), 10000.0 ** -torch.arange(0, 1, 2 / HEAD))
    (a, b), cos, sin = x.float().chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(DIM, HEADS * HEAD, bias=False), nn.Linear(HEADS * HEAD, DIM, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(DIM, KV_HEADS * HEAD, bias=False) for _ in range(2))

    def forward(self, x, past):
        # As many heads as this rank has columns for.
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        at = past[0].shape[2] if past else 0
        q, k = rotated(q, at), rotated(k, at)
        if past:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=not past, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.norm_2 = Attention(), nn.RMSNorm(DIM, 1e-5), nn.RMSNorm(DIM, 1e-5)
        self.gate_proj, self.up_proj = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x, past):
        y, past = self.attention(self.norm(x), past)
        h = self.norm_2(x := x + y)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h)), past


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, DIM), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM, 1e-5), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens, past):
        x, kept = self.embedding(tokens), []
        for i, block in enumerate(self.blocks):
            x, new = block(x, past[i] if past else None)
            kept.append(new)
        return self.head(self.norm(x[:, -1])), kept


@torch.no_grad()
def generate(group, order, count, dtype):
    """The tokens, and a digest of all logits."""
    torch.manual_seed(0)
    model = unisono.tensor_parallel(Llama().to(getattr(torch, dtype)), group, order=order)
    tokens, past, made, digest = torch.tensor([list(b"the same")]), None, [], hashlib.sha256()
    for _ in range(count):
        logits, past = model(tokens, past)
        digest.update(logits.view(torch.uint8).numpy().tobytes())
        made.append((tokens := logits.argmax(-1, keepdim=True)).item())
    return made, digest.hexdigest()[:16]


def main(count=200, dtype="bfloat16", sizes=(1, 2, 4, 8)):
    seen = {}
    for order in ("tree", None):
        for size in sizes:
            seen[order, size], *others = run_ranks(size, generate, order, count, dtype)
            assert all(other == seen[order, size] for other in others)
            print(f"order {order}  ranks {size}  tokens {seen[order, size][0][:6]}…  logits {seen[order, size][1]}")
    assert len({seen["tree", size][1] for size in sizes}) == 1, "the same logits"
    enough = 1 if dtype == "float32" else 200  # in 16 bits it takes some tokens until a last bit survives the rounding
    assert count < enough or len({seen[None, size][1] for size in sizes}) > 1, "other logits in the default order"


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 200, *sys.argv[2:])
