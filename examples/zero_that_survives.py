"""ZeRO-style training that loses a rank by SIGKILL and goes on: the others read its shard in its own memory.

    python examples/zero_that_survives.py --ranks 4 --kill 1 --at 6

Every rank holds all parameters, and a shard of the optimizer's state that no other rank has: values and Adam's two
moments, kept under a name and written in turns to two buffers, so that death inside a write leaves the step before.
Until the kill the bits must be those of an undisturbed run, then those of the survivors from that step's checkpoint on.
"""

import argparse
import os
import signal

import torch

import unisono

BATCH, INPUTS, HIDDEN = 24, 20, 60  # samples in a step over all ranks, so fewer ranks train the same model
COUNT = INPUTS * HIDDEN + HIDDEN  # parameters: y = w2 tanh(w1 x)


class Trainer:
    def __init__(self, group: unisono.Group, whole: torch.Tensor, step: int) -> None:
        """Takes this rank's shard of the state, whose rows are values and two moments, under two names to keep."""
        self.group, self.step = group, step
        self.shards = [COUNT // group.size + (r < COUNT % group.size) for r in range(group.size)]
        mine = whole.split(self.shards, dim=1)[group.rank]
        self.kept = [unisono.keep(f"state {i}", unisono.empty(mine.shape)) for i in (0, 1)]
        with self.kept[step % 2].update(step) as state:
            state.copy_(mine)
        self.values, self.gradient = unisono.zeros(COUNT), unisono.zeros(self.shards[group.rank])
        self.values.copy_(whole[0])

    def train_step(self, dies: bool) -> float:  # returns the loss of the whole batch
        samples = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(self.step))
        x = samples.tensor_split(self.group.size)[self.group.rank]
        values = self.values.clone().requires_grad_()
        w1, w2 = values[: INPUTS * HIDDEN].view(INPUTS, HIDDEN), values[INPUTS * HIDDEN :]
        loss = ((x @ w1).tanh() @ w2 - x.sum(1)).square().sum() / BATCH
        loss.backward()
        self.group.reduce_scatter(self.gradient, values.grad, self.shards)
        self.step += 1
        old, g, n = self.kept[1 - self.step % 2].tensor, self.gradient, self.step
        with self.kept[n % 2].update(n) as new:  # Adam, from one buffer into the other
            torch.add(old[1] * 0.9, g, alpha=0.1, out=new[1])
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)  # half of the new state is written
            torch.add(old[2] * 0.999, g.square(), alpha=0.001, out=new[2])
            torch.sub(old[0], 0.01 * new[1] / (1 - 0.9**n) / (new[2] / (1 - 0.999**n)).sqrt().add(1e-8), out=new[0])
        self.group.all_gather(self.values, new[0], self.shards)
        self.group.all_reduce(total := loss.detach().double())
        return total.item()

    def gather_state(self, group: unisono.Group, step: int, lost: dict[int, torch.Tensor]) -> torch.Tensor:
        """The whole state of a step, on every rank of ``group``; ``lost`` has the shards of ranks not in it."""
        parts = [lost.get(r, torch.empty(3, n)) for r, n in enumerate(self.shards)]
        group.all_gather([parts[r] for r in range(len(parts)) if r not in lost], self.kept[step % 2].tensor)
        return torch.cat(parts, dim=1)

    def recover(self) -> "Trainer":
        """The trainer of the ranks that are left, from the last step of which every shard is whole."""
        new, lost = self.group.shrink()
        inherited = {r: {i.step: i.tensor for i in new.inherit(r).values() if i.whole} for r in lost}
        last = torch.tensor([max(k.step for k in self.kept if k.step is not None)])
        new.all_reduce(last, "min")  # ranks are one step apart at most, and each has its last two
        step = min(int(last), *(max(steps) for steps in inherited.values()))
        return Trainer(new, self.gather_state(new, step, {r: inherited[r][step] for r in lost}), step)


def train(group: unisono.Group, whole: torch.Tensor, begin: int, end: int, kill: int = -1, at: int = 0) -> tuple:
    trainer, rank, losses = Trainer(group, whole, begin), group.rank, {}
    while (step := trainer.step) < end:
        try:
            losses[step] = trainer.train_step(dies=rank == kill and step + 1 == at)
        except unisono.PeerLostError as error:
            trainer = trainer.recover()
            if trainer.group.rank == 0:
                print(f"  {error}\n  {trainer.group.size} ranks go on from step {trainer.step}", flush=True)
    return losses, trainer.gather_state(trainer.group, end, {})


def run(ranks: int, *job: object) -> tuple:  # what the first rank returned that was not killed
    return next(r for r in unisono.testing.run_ranks(ranks, train, *job, check=False) if isinstance(r, tuple))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"ranks": 4, "kill": 1, "at": 6, "steps": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    start = torch.randn(3, COUNT, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [0.0], [0.0]])
    print(f"{options.ranks} ranks, rank {options.kill} is killed while it writes step {options.at}:", flush=True)
    losses, state = run(options.ranks, start, 0, options.steps, options.kill, options.at)
    expected, checkpoint = run(options.ranks, start, 0, options.at - 1)
    continued, wanted = run(options.ranks - 1, checkpoint, options.at - 1, options.steps)
    for step, loss in (expected | continued).items():
        print(f"  step {step:2d}   loss {losses[step]:.6f}   never disturbed {loss:.6f}")
    assert losses == expected | continued and torch.equal(state, wanted)
    print("the same bits as a run that was never disturbed")
