"""FSDP2 with parameters that do not divide by the ranks: what its padding costs, in bytes and time, and without it.

    torchrun --nproc-per-node=3 examples/fsdp2_uneven.py

Two models: a Llama with a vocabulary of 32003, and one whose 8 experts are one parameter, as in transformers, so that 3
ranks have room for 9. "padded" is FSDP2's own hook for shared memory, "without" is the line that is marked. It takes
minutes on 2 cores; `--rounds 3` is a first look.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import unisono.fsdp

SIZES = {"width": 512, "hidden": 1375, "layers": 4, "words": 32003, "tokens": 32, "rounds": 15}


class Layer(nn.Module):
    """Attention and a feed-forward network, of one expert or of many."""

    def __init__(self, width, hidden, experts):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        shape = (experts,) if experts > 1 else ()
        self.up = nn.Parameter(torch.randn(*shape, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(*shape, width, hidden) / hidden**0.5)

    def forward(self, x):
        x = x + self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        hidden = nn.functional.silu(x @ self.up.mT) @ self.down.mT
        return x + (hidden.mean(0) if self.up.dim() == 3 else hidden)


class Job:
    def __init__(self, options, experts, how):
        torch.manual_seed(0)
        words, width, hidden = options.words, options.width, options.hidden
        layers = [Layer(width, hidden, experts) for _ in range(options.layers)]
        self.model = nn.Sequential(nn.Embedding(words, width), *layers, nn.Linear(width, words))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.parts = [part for part in self.model.modules() if isinstance(part, FSDPModule)]
        for part in self.parts:
            part.set_allocate_memory_from_process_group_for_comm(True)
        if how == "without":
            unisono.fsdp.use_shared_memory(self.model)  # takes the padding out as well
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.tokens = torch.arange(options.tokens) * (dist.get_rank() + 1) % words

    def gather(self):
        for part in self.parts:
            part.unshard()
            part.reshard()

    def train(self):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.tokens[:-1]), self.tokens[1:]).backward()
        self.optimizer.step()

    def bytes(self):
        """What one rank's buffers hold when every parameter is gathered once, and how much of it is padding."""
        padding = sum(unisono.fsdp.padding_bytes(part) for part in self.parts)
        return padding + sum(p.numel() * p.element_size() for p in self.model.parameters()), padding


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    for title, experts in (("Llama", 1), ("8 experts", 8)):
        jobs = {how: Job(options, experts, how) for how in ("padded", "without")}
        times = {(how, step): [] for how in jobs for step in ("gather", "train")}
        for how, step in list(times) * (options.rounds + 1):  # by turns: what else the machine does strikes both
            dist.barrier()
            begin = time.perf_counter()
            getattr(jobs[how], step)()
            times[how, step].append(1e3 * (time.perf_counter() - begin))
        pairs = zip(*(job.model.parameters() for job in jobs.values()), strict=True)
        assert all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs), "not the same bits"
        whole, padding = jobs["padded"].bytes()
        if dist.get_rank() == 0:
            print(f"{title}, {dist.get_world_size()} ranks: {padding / whole:.2%} of {whole} bytes are padding")
            for (how, step), taken in times.items():
                print(f"  {how:8s} {step:6s} {statistics.median(taken[1:]):8.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
