"""ZeRO-style training that loses a rank by SIGKILL and goes on: the others read its shard in its own memory.

    python examples/zero_that_survives.py --ranks 4 --kill 1 --at 6

Every rank holds all parameters, and the optimizer's state for a shard of them alone: values, and Adam's two moments. No
other rank has that shard, so with ordinary memory the death of its owner ends the run. Here the state is kept:

    kept = unisono.keep("state 0", tensor)               a name in the owner's heap, which all ranks have mapped
    with kept.update(step): ...                          not whole while it is written
    new, lost = group.shrink()                           the group of the survivors
    new.inherit(lost[0])["state 0"]                      the dead rank's tensor, its step, and whether it is whole

A step writes the new state beside the old one, in turns, so that death in the middle of a write leaves the step before.
Every rank draws its part of one global batch, so fewer ranks train the same model. The program runs three times: with
the kill, without, and from the last step's state on with as many ranks as survived; the first and the last must have
the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import FileStore

import unisono

BATCH = 24  # samples in a step, over all ranks
Job = dict[str, Any]


def shards_of(count: int, ranks: int) -> list[int]:
    """How many of the parameters each rank owns."""
    return [count // ranks + (r < count % ranks) for r in range(ranks)]


class Trainer:
    """A model whose optimizer state is spread over the ranks of a group. `state` has rows: values and two moments."""

    def __init__(self, group: unisono.Group, job: Job) -> None:
        self.job = job
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 1))
        tensors = list(self.model.parameters())
        self.count = sum(t.numel() for t in tensors)
        self.values, self.gradients = unisono.zeros(self.count), unisono.zeros(self.count)
        at = 0
        for t in tensors:  # parameters and gradients become views of the flat buffers
            self.values[at : at + t.numel()] = t.detach().view(-1)
            t.data = self.values[at : at + t.numel()].view_as(t)
            t.grad = self.gradients[at : at + t.numel()].view_as(t)
            at += t.numel()
        whole = torch.zeros(3, self.count)
        whole[0] = self.values
        self.begin(group, whole if job["state"] is None else job["state"], job["from"])

    def begin(self, group: unisono.Group, whole: Tensor, step: int) -> None:
        """Takes this rank's shard of the state, and keeps it under two names: an even step and an odd one."""
        self.group, self.step = group, step
        self.shards = shards_of(self.count, group.size)
        self.first = sum(self.shards[: group.rank])
        mine = whole[:, self.first : self.first + self.shards[group.rank]]
        self.kept = [unisono.keep(f"state {i}", unisono.empty(mine.shape)) for i in (0, 1)]
        with self.kept[step % 2].update(step) as state:
            state.copy_(mine)
        self.values.copy_(whole[0])
        self.gradient = unisono.zeros(self.shards[group.rank])

    def train_step(self) -> float:
        """One step; returns the loss of the whole batch."""
        step, group = self.step, self.group
        chance = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, 20, generator=chance)
        mine = slice(group.rank * BATCH // group.size, (group.rank + 1) * BATCH // group.size)
        self.gradients.zero_()
        loss = (self.model(inputs[mine]) - inputs[mine].sum(1, keepdim=True)).square().sum() / BATCH
        loss.backward()
        group.reduce_scatter(self.gradient, self.gradients, self.shards)
        self.update_state(step + 1)
        group.all_gather(self.values, self.kept[(step + 1) % 2].tensor[0], self.shards)
        self.step = step + 1
        total = loss.detach().clone().double()
        group.all_reduce(total)
        return float(total)

    def update_state(self, step: int) -> None:
        """Adam, from one buffer into the other."""
        old = self.kept[1 - step % 2].tensor
        with self.kept[step % 2].update(step) as new:
            torch.add(old[1] * 0.9, self.gradient, alpha=0.1, out=new[1])
            if self.job["kill"] == self.group.rank and self.job["at"] == step and self.group.name == "world":
                os.kill(os.getpid(), signal.SIGKILL)  # half of the new state is written
            torch.add(old[2] * 0.999, self.gradient.square(), alpha=0.001, out=new[2])
            sizes = (1 - 0.9**step), (1 - 0.999**step)
            torch.sub(old[0], 1e-2 * (new[1] / sizes[0]) / ((new[2] / sizes[1]).sqrt() + 1e-8), out=new[0])

    def recover(self) -> None:
        """Goes on with the ranks that are left, from the last step of which every shard is whole."""
        shards, group = self.shards, self.group
        new, lost = group.shrink()
        inherited = {r: {i.step: i.tensor for i in new.inherit(r).values() if i.whole} for r in lost}
        # Ranks are one step apart at most, and each has its last two.
        last = torch.tensor([max(k.step for k in self.kept if k.step is not None)])
        new.all_reduce(last, "min")
        step = min([int(last), *(max(steps) for steps in inherited.values())])
        mine = self.kept[step % 2].tensor
        whole = torch.empty(3, self.count)
        for row in range(3):
            parts = [torch.empty(n) if r not in lost else inherited[r][step][row] for r, n in enumerate(shards)]
            new.all_gather([part for r, part in enumerate(parts) if r not in lost], mine[row].contiguous())
            whole[row] = torch.cat(parts)
        self.begin(new, whole, step)


def run_rank(rank: int, size: int, path: str, results: Any, job: Job) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(unisono.Group.from_store(FileStore(path, size), rank, size, timeout_s=60.0), job)
    losses: dict[int, float] = {}
    while trainer.step < job["until"]:
        try:
            step = trainer.step
            losses[step] = trainer.train_step()
        except unisono.PeerLostError as error:
            trainer.recover()
            if trainer.group.rank == 0:
                print(f"  {error}\n  {trainer.group.size} ranks go on from step {trainer.step}")
    state = torch.zeros(3, trainer.count)
    for row in range(3):
        trainer.group.all_gather(state[row], trainer.kept[trainer.step % 2].tensor[row].contiguous(), trainer.shards)
    if trainer.group.rank == 0:
        results.put((losses, state.tolist()))
    trainer.group.close()


def run(ranks: int, **job: Any) -> tuple[dict[int, float], Tensor]:
    """Losses by step, and the state at the end."""
    context = multiprocessing.get_context("spawn")
    job = {"kill": None, "at": 0, "from": 0, "state": None, **job}
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        arguments = [(rank, ranks, f"{folder}/store", results, job) for rank in range(ranks)]
        processes = [context.Process(target=run_rank, args=a) for a in arguments]
        for process in processes:
            process.start()
        losses, state = results.get()
        for process in processes:
            process.join()
    return losses, torch.tensor(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", type=int, default=1, help="which rank")
    parser.add_argument("--at", type=int, default=6, help="in the middle of which step's write")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    ranks, last = options.ranks, options.at - 1

    print(f"{ranks} ranks, rank {options.kill} is killed while it writes step {options.at}:")
    disturbed, state = run(ranks, kill=options.kill, at=options.at, until=options.steps)
    undisturbed, same = run(ranks, until=options.steps)
    _, checkpoint = run(ranks, until=last)
    continued, wanted = run(ranks - 1, state=checkpoint, **{"from": last}, until=options.steps)
    for step in range(options.steps):
        print(f"  step {step:2d}   loss {disturbed[step]:.6f}   undisturbed {undisturbed[step]:.6f}")
    assert all(disturbed[step] == undisturbed[step] for step in range(last)), "until then the same bits"
    assert all(disturbed[step] == loss for step, loss in continued.items()), "and of the smaller group since"
    assert torch.equal(state, wanted), "the same state at the end"
    torch.testing.assert_close(state, same, rtol=1e-3, atol=1e-4)
    print("the same bits as a run that was never disturbed")


if __name__ == "__main__":
    main()
