"""Hours in minutes: random collectives, sizes, groups, threads, async depth, kills and restarts, every result checked.

    make soak                       ten minutes
    make soak SECONDS=60 SEED=5     the same programs in the same order as any other run with that seed

Turns alternate. In a *long* turn ranks that live through the whole run do a random program in several groups and
threads; what they hold afterwards (memory, address space, fds, threads, heap) must stay flat. In a *deadly* turn fresh
ranks do one, and some kill themselves at a random moment; the others must be told, shrink, go on with right results,
and leave nothing behind. A failure prints the turn's seed: `--only N` does that turn alone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import torch

import unisono
from tests import leaks
from unisono.testing import RankFailure, RankPool, run_ranks

SIZES = [0, 1, 3, 10, 257, 4096, 40_000, 300_000, 1_500_000]
DTYPES = [torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.uint8]
WARM_TURNS = 6
TURN_LIMIT_S = 90.0
SETTLE_S = 15.0


def numbers(count: int, dtype: torch.dtype, rank: int, salt: int, shared: bool) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every dtype and order."""
    t = (torch.arange(count) * 7 + salt + rank * 3) % 5
    made = unisono.empty(count, dtype=dtype) if shared else torch.empty(count, dtype=dtype)
    return made.copy_(t)


class Calls:
    """One thread's calls in one group: the same on every rank, from the same seed."""

    def __init__(self, group: Any, seed: int) -> None:
        self.group, self.dice = group, random.Random(seed)
        self.pending: list[Any] = []

    def expect(self, got: torch.Tensor, want: torch.Tensor, what: str) -> None:
        if not torch.equal(got, want.to(got.dtype)):
            where = (got != want.to(got.dtype)).nonzero()[0].tolist()
            raise AssertionError(f"{what} on rank {self.group.rank} of {self.group.size}: wrong at {where}")

    def one(self) -> None:
        group, dice = self.group, self.dice
        verbs = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "message", "barrier"]
        verb, count, dtype = dice.choice(verbs), dice.choice(SIZES), dice.choice(DTYPES)
        salt, depth, root = dice.randrange(100), dice.choice([0, 0, 1, 4]), dice.randrange(group.size)
        counts = [dice.choice([0, 1, 50, count // 2]) for _ in range(group.size)]
        few = min(count, 5000)
        shared = random.random() < 0.5  # which memory is this rank's own affair
        lengths = {"all_gather": counts[group.rank], "reduce_scatter": sum(counts), "all_to_all": few * group.size}
        length = lengths.get(verb, count)
        mine = out = numbers(length, dtype, group.rank, salt, shared)
        options = {"async_op": depth > 0}

        def everybody() -> list[torch.Tensor]:
            return [numbers(length, dtype, r, salt, False) for r in range(group.size)]

        def want() -> torch.Tensor:
            """What this rank must hold in `out`."""
            if verb == "all_reduce":
                return sum(x.long() for x in everybody())
            if verb == "broadcast":
                return everybody()[root]
            if verb == "all_gather":
                return torch.cat([numbers(n, dtype, r, salt, False) for r, n in enumerate(counts)])
            if verb == "reduce_scatter":
                begin = sum(counts[: group.rank])
                return sum(x.long() for x in everybody())[begin : begin + counts[group.rank]]
            if verb == "all_to_all":
                return torch.cat([x[group.rank * few : (group.rank + 1) * few] for x in everybody()])
            if verb == "message":
                return everybody()[(group.rank - 1) % group.size]
            return mine

        if verb == "all_reduce":
            handle = group.all_reduce(mine, **options)
        elif verb == "broadcast":
            handle = group.broadcast(mine, root, **options)
        elif verb == "all_gather":
            out = torch.empty(sum(counts), dtype=dtype)
            handle = group.all_gather(out, mine, counts, **options)
        elif verb == "reduce_scatter":
            out = torch.empty(counts[group.rank], dtype=dtype)
            handle = group.reduce_scatter(out, mine, counts, **options)
        elif verb == "all_to_all":
            out = torch.empty(length, dtype=dtype)
            handle = group.all_to_all(out, mine, **options)
        elif verb == "message" and group.size > 1:
            out, handle = torch.empty(count, dtype=dtype), None
            sent = group.send(mine, (group.rank + 1) % group.size, tag=salt, async_op=True)
            group.recv(out, (group.rank - 1) % group.size, tag=salt)
            sent.wait()
        else:
            handle = group.barrier(**options)
        self.pending.append((handle, out, want, f"{verb} of {count} {dtype}"))
        while len(self.pending) > depth:
            self.end_first()

    def end_first(self) -> None:
        handle, out, want, what = self.pending.pop(0)
        if handle is not None:
            handle.wait()
        self.expect(out, want(), what)

    def run(self, calls: int) -> None:
        for _ in range(calls):
            self.one()
        while self.pending:
            self.end_first()


def program(group: Any, seed: int) -> None:
    """Several groups, one thread for each, and calls in the whole group beside them."""
    dice = random.Random(seed)
    members = sorted(dice.sample(range(group.size), dice.randint(1, group.size)))
    children = [group.split(range(group.size)), group.split(members if group.rank in members else None)]
    failed: list[BaseException] = []

    def work(child: Any, number: int) -> None:
        try:
            Calls(child, seed + number).run(dice_calls)
        except BaseException as error:
            failed.append(error)

    dice_calls = dice.choice([5, 20, 40])
    threads = [threading.Thread(target=work, args=(c, i)) for i, c in enumerate(children) if c is not None]
    for t in threads:
        t.start()
    Calls(group, seed + 100).run(dice_calls)
    for t in threads:
        t.join()
    for child in children:
        if child is not None and dice.random() < 0.7:
            child.close()  # the others are dropped
    if failed:
        raise failed[0]


# -- long turns


def long_turn(group: Any, seed: int) -> dict[str, float]:
    program(group, seed)
    group.barrier()
    gc.collect()
    return holdings(group)


def holdings(group: Any) -> dict[str, float]:
    ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps of freed tensors, in an arena per thread, is held by nobody
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)  # noqa: SIM115
    heap = unisono._core.heap_usage()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": leaks.threads(),
        "MiB resident": int(status["VmRSS"].split()[0]) / 1024,
        "MiB of addresses": int(status["VmSize"].split()[0]) / 1024,
        "MiB in use of the heap": heap["in_use"] / 2**20,
    }


SLACK = {"fds": 6, "threads": 4, "MiB resident": 200, "MiB of addresses": 600, "MiB in use of the heap": 24}


def grown(first: dict[str, float], now: dict[str, float]) -> list[str]:
    return [f"{what}: {first[what]:.0f} -> {now[what]:.0f}" for what in first if now[what] > first[what] + SLACK[what]]


# -- deadly turns


def _highest(group: Any, number: int) -> int:
    agreed = torch.tensor([number])
    group.all_reduce(agreed, "max")
    return int(agreed)


def deadly_turn(group: Any, seed: int, deaths: dict[int, float]) -> tuple[list[int], list[str]]:
    """Runs programs until everyone who is to die is dead; who is left in the end, and what was left behind."""
    torch.set_num_threads(1)
    ours = group.split(range(group.size))
    group.barrier()
    before = leaks.holdings()
    if group.rank in deaths:
        threading.Timer(deaths[group.rank], os.kill, (os.getpid(), signal.SIGKILL)).start()
    kept = unisono.keep("turns", unisono.zeros(1000))
    alive, turn, has_lost = ours, 0, False
    while True:
        try:
            if has_lost:  # inside of the try: another rank may die just now
                turn, has_lost = _highest(alive, turn) + 1, False
            with kept.update(turn) as t:
                t.fill_(turn)
            program(alive, seed + 1000 * turn)
            turn = _highest(alive, turn + 1)
            if not set(deaths) & set(alive.ranks) and turn >= 3:
                break
        except unisono.UnisonoError as error:
            if isinstance(error, (unisono.MismatchError, unisono.CollectiveTimeoutError)):
                raise
            past = alive
            alive, lost = alive.shrink(timeout_s=30.0)
            for rank in lost:
                found = alive.inherit(rank)["turns"]
                if found.whole and found.step is not None:
                    assert found.tensor.eq(found.step).all(), "a torn write was called whole"
            has_lost = True
            del past
    ranks = list(alive.ranks)
    alive.close()
    kept.drop()
    del alive, ours, t, kept
    gc.collect()
    return ranks, leaks.settled_growth(before, limit_s=10.0)


def do_deadly_turn(seed: int) -> str:
    dice = random.Random(seed)
    size = dice.randint(2, 5)
    victims = dice.sample(range(size), dice.choice([0, 1, 1, size - 1]))
    deaths = {r: dice.uniform(0.0, 1.0) for r in victims}
    before = leaks.holdings()
    results = run_ranks(size, deadly_turn, seed, deaths, check=False, timeout_s=TURN_LIMIT_S, grace_s=TURN_LIMIT_S)
    survivors = [r for r in range(size) if r not in victims]
    for r, result in enumerate(results):
        if r in victims:
            assert isinstance(result, RankFailure) and result.signal == signal.SIGKILL, f"rank {r}: {result}"
            continue
        assert not isinstance(result, RankFailure), f"rank {r}: {result.reason}\n{result.traceback}"
        ranks, left = result
        assert ranks == survivors, f"rank {r} is left with {ranks}, not {survivors}"
        assert not left, f"rank {r} left behind: {left}"
    left = leaks.settled_growth(before, limit_s=10.0)
    assert not left, left
    return f"{size} ranks, {len(victims)} killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", type=int, default=None, help="this turn alone")
    parser.add_argument("--ranks", type=int, default=3, help="of the long turns")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"SEED={seed}", flush=True)
    torch.set_num_threads(1)
    until, turn, first, last = time.monotonic() + options.seconds, 0, [], []
    with RankPool(options.ranks) as pool:
        while time.monotonic() < until:
            number = options.only if options.only is not None else turn
            its_seed = seed * 10_000 + number
            try:
                if number % 2:
                    words = do_deadly_turn(its_seed)
                else:
                    last = pool.run(long_turn, its_seed, timeout_s=TURN_LIMIT_S)
                    if turn <= 2 * WARM_TURNS:
                        first = last
                    until_settled = time.monotonic() + SETTLE_S  # pages of the heaps go back within seconds
                    while any(map(grown, first, last)) and time.monotonic() < until_settled:
                        time.sleep(0.5)
                        last = pool.run(holdings, timeout_s=TURN_LIMIT_S)
                    for r, held in enumerate(last):
                        assert not (lines := grown(first[r], held)), f"rank {r} grew: {', '.join(lines)}"
                    words = ", ".join(f"{value:.0f} {what}" for what, value in last[0].items())
            except Exception as error:
                print(f"FAILED turn {number} of SEED={seed}: {type(error).__name__}: {error}", flush=True)
                return 1
            print(f"turn {number}: {words}", flush=True)
            turn += 1
            if options.only is not None:
                break
    print(f"{turn} turns without a fault; rank 0 held at first {first[:1]}, in the end {last[:1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
