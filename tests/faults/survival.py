"""Bodies of ranks that lose others and go on: for test_shrink.py. They run inside `live` of scenarios.py."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch

import unisono
from tests.faults.scenarios import Line, described

COUNT = 5000


def numbers(seed: int) -> torch.Tensor:
    """Values whose sum depends on the order of addition."""
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5)


def collectives(group: Any, seeds: list[int]) -> list[Any]:
    """What some calls give in a group, rank r of which stands for the r-th seed: the bits as bytes."""
    mine = numbers(seeds[group.rank])
    shared = unisono.to_shared_(mine.clone())
    group.all_reduce(shared)
    ordinary = mine.clone()
    group.all_reduce(ordinary, "avg", async_op=True).wait()
    gathered = torch.empty(group.size * 3)
    group.all_gather(gathered, mine[:3].contiguous())
    part = torch.empty(7)
    group.reduce_scatter(part, torch.cat([mine[: 7 * group.size]]))
    if group.size > 1:
        got = torch.empty(4)
        group.send(mine[:4].contiguous(), (group.rank + 1) % group.size)
        group.recv(got, (group.rank - 1) % group.size)
    child = group.split(range(group.size))
    t = torch.ones(1)
    child.all_reduce(t)
    child.close()
    return [x.numpy().tobytes() for x in (shared, ordinary, gathered, part, t)]


def fail_first(line: Line, group: Any) -> float:
    """All calls until one fails by the death of a rank; when it did."""
    t = torch.ones(line.options.get("count", 100_000))
    line.tell("inside")
    try:
        while True:
            group.all_reduce(t, "avg", async_op=line.options.get("async_op", False)) and None
            if line.options.get("async_op"):
                group.barrier()
    except unisono.UnisonoError as error:
        line.tell("failed", **described(error))
    return time.monotonic()


def shrinking(line: Line, group: Any) -> None:
    """Survivors shrink, use the new group, and say what it gave."""
    began = fail_first(line, group)
    new, lost = group.shrink(timeout_s=line.options.get("limit_s", 30.0))
    took = time.monotonic() - began
    with contextlib.suppress(unisono.ClosedError):
        group.barrier()
        raise AssertionError("the old group still works")
    bits = collectives(new, new.ranks)
    line.tell("shrunk", rank=new.rank, size=new.size, ranks=new.ranks, lost=lost, took_s=took, bits=bits)
    new.close()


def repeatedly(line: Line, group: Any) -> None:
    """Shrinks each time that somebody dies, until told to end."""
    alive = group
    line.tell("inside")
    t = torch.ones(1000)
    while True:
        try:
            alive.all_reduce(t, "max")
        except unisono.UnisonoError:
            alive, lost = alive.shrink(timeout_s=30.0)
            line.tell("shrunk", rank=alive.rank, size=alive.size, ranks=alive.ranks, lost=lost)
        if line.options["until"] == alive.size:
            break
    line.tell("done", bits=collectives(alive, alive.ranks))
    alive.close()


def keeping(line: Line, group: Any) -> None:
    """The victim writes a kept tensor in brackets without end; survivors inherit it."""
    victim = line.options["late"][0]
    group.barrier()
    if line.rank == victim:
        write_for_ever(line)
    began = fail_first(line, group)
    new, lost = group.shrink()
    assert lost == [victim], lost
    inherited = new.inherit(victim)
    found = {name: (packed(i.tensor), i.step, i.whole) for name, i in inherited.items()}
    line.tell("shrunk", took_s=time.monotonic() - began)
    line.tell("inherited", found=found)
    held = inherited["large"].tensor
    del inherited, found
    new.close()
    del new
    before = held.clone()
    assert torch.equal(before, held)  # the memory outlives both groups
    line.tell("held", first=held[0].item())


def packed(t: torch.Tensor) -> tuple[str, list[int], bytes]:
    """A tensor for the pipe: torch would send a file descriptor, which the leak guard sees."""
    return str(t.dtype).removeprefix("torch."), list(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes()


def unpacked(dtype: str, shape: list[int], data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)


def write_for_ever(line: Line) -> None:
    large, small = unisono.zeros(1 << 18), unisono.zeros(2, 3, dtype=torch.bfloat16)
    untouched = unisono.zeros(4, dtype=torch.int64).fill_(42)
    kept, other = unisono.keep("large", large), unisono.keep("small", small)
    unisono.keep("untouched", untouched)
    unisono.keep("dropped", unisono.zeros(3)).drop()
    unisono.keep("replaced", unisono.zeros(3))
    unisono.keep("replaced", unisono.zeros(5))
    broken = unisono.keep("broken", unisono.zeros(2))
    with contextlib.suppress(KeyError), broken.update(1):
        raise KeyError
    line.tell("inside")
    step = 0
    while True:
        step += 1
        with kept.update(step):
            large += 1
            if line.options["moment"] == "inside" and step == 5:
                line.tell("writing")
                time.sleep(60)
        with other.update(step):
            small.fill_(step % 100)
        if line.options["moment"] == "outside" and step == 5:
            line.tell("writing")
            time.sleep(60)
        if line.options["moment"] == "any" and step == 1:
            line.tell("writing")


def dying_on_cue(line: Line, group: Any) -> None:
    """As `shrinking`, but some ranks kill themselves inside of shrink, at a random moment of it."""
    victim = line.rank in line.options["late"]
    fail_first(line, group)
    if victim:
        import random
        import signal
        import threading

        delay_s = random.Random(line.options["seed"] * 100 + line.rank).uniform(
            0.0, line.options.get("within_s", 0.004)
        )
        threading.Thread(
            target=lambda: (time.sleep(delay_s), os.kill(os.getpid(), signal.SIGKILL)), daemon=True
        ).start()
    new, _ = group.shrink(timeout_s=30.0)
    if victim:
        time.sleep(30)
    while True:  # a victim may have been one of the new group for a moment
        try:
            new.barrier()
            if not set(line.options["late"]) & set(new.ranks):
                break
            time.sleep(0.001)
        except unisono.UnisonoError:
            new, _ = new.shrink(timeout_s=30.0)
    line.tell("shrunk", rank=new.rank, size=new.size, ranks=new.ranks, bits=collectives(new, new.ranks))
    new.close()


def disagreeing(line: Line, group: Any) -> None:
    """Rank r leaves out options["exclude"][r]; then all leave out the same."""
    group.barrier()  # all have joined
    line.tell("inside")
    if line.rank in line.options["late"]:
        line.hear()
    try:
        group.shrink(exclude=line.options["exclude"][line.rank], timeout_s=10.0)
    except unisono.UnisonoError as error:
        line.tell("failed", **described(error))
    new, lost = group.shrink(exclude=line.options["then"], timeout_s=20.0)
    line.tell("shrunk", rank=new.rank, size=new.size, ranks=new.ranks, lost=lost, bits=collectives(new, new.ranks))
    new.close()


def stopped(line: Line, group: Any) -> None:
    """A rank is stopped: the others' shrink runs out of time, and then they leave it out."""
    late = line.options["late"]
    group.barrier()
    line.tell("inside")
    if line.rank in late:
        line.hear()
        try:
            group.shrink(timeout_s=10.0)
        except unisono.UnisonoError as error:
            line.tell("left out", **described(error))
        return
    line.hear()
    try:
        group.shrink(timeout_s=2.0)
    except unisono.UnisonoError as error:
        line.tell("failed", **described(error))
    new, lost = group.shrink(exclude=late, timeout_s=20.0)
    line.tell("shrunk", rank=new.rank, size=new.size, ranks=new.ranks, lost=lost, bits=collectives(new, new.ranks))
    try:
        new.inherit(late[0])
    except ValueError as error:
        line.tell("not dead", text=str(error))
    new.close()


BODIES = {body.__name__: body for body in (shrinking, repeatedly, keeping, dying_on_cue, disagreeing, stopped)}
