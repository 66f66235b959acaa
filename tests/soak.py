"""Hours in minutes: random collectives, sizes, groups, threads, async depth, kills and restarts, every result checked.

    make soak                       ten minutes
    make soak SECONDS=60 SEED=5     the same programs in the same order as any other run with that seed

Turns alternate. In a *long* turn ranks that live through the whole run do a random program in several groups and
threads; what they hold afterwards (private and shared memory, mappings, fds, threads, heap) must stay flat. In a
*deadly* turn fresh ranks do one, and some kill themselves at a random moment; the others must be told, shrink, go on
with right results, and leave nothing behind. A failure prints the turn's seed: `--only N` does that turn alone.

What ranks keep for later calls comes and goes, so flat means: of each rank, the least that it held after any of the
last WINDOW long turns is not more than the least after the first ones. A leak only grows: `--leak WHAT` plants one, in
long turns alone, and the run must fail.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
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
from unisono import Group
from unisono.testing import RankFailure, RankPool, run_ranks

SIZES = [0, 1, 3, 10, 257, 4096, 40_000, 300_000, 1_500_000]
DTYPES = [torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.uint8]
WARM_TURNS, WINDOW = 4, 4  # long turns
TURN_LIMIT_S = 90.0
UNEXPLAINED = (unisono.MismatchError, unisono.CollectiveTimeoutError)  # by a rank's death


def numbers(count: int, dtype: torch.dtype, rank: int, salt: int, shared: bool) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every dtype and order."""
    t = (torch.arange(count) * 7 + salt + rank * 3) % 5
    made = unisono.empty(count, dtype=dtype) if shared else torch.empty(count, dtype=dtype)
    return made.copy_(t)


class Calls:
    """One thread's calls in one group: the same on every rank, from the same seed."""

    def __init__(self, group: Any, seed: int) -> None:
        self.group, self.dice = group, random.Random(seed)
        self.own_dice = random.Random(1000 * seed + group.rank)  # for what ranks decide each for itself
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
        shared = self.own_dice.random() < 0.5  # which memory is this rank's own affair
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
    work(group, 100)
    for t in threads:  # also after an error here: a death must not hide what they find
        t.join()
    if failed:
        raise min(failed, key=_weight)
    for child in children:
        if child is not None and dice.random() < 0.7:
            child.close()  # the others are dropped


def _weight(error: BaseException) -> int:
    """Of several errors the least is reported: wrong results, then what a death does not explain, then the rest."""
    if isinstance(error, AssertionError):
        return 0
    return 1 if isinstance(error, UNEXPLAINED) or not isinstance(error, unisono.UnisonoError) else 2


# -- long turns


def filled(memory: Any) -> Any:
    memory[:] = b"1" * len(memory)
    return memory


LEAKS = {
    "fds": lambda: os.dup(0),
    "threads": lambda: threading.Thread(target=time.sleep, args=(10_000.0,), daemon=True).start(),
    "mappings": lambda: [mmap.mmap(-1, 4096) for _ in range(4)],
    "MiB private": lambda: filled(bytearray(2 << 20)),
    "MiB shared beyond the heaps": lambda: filled(mmap.mmap(-1, 4 << 20)),
    "MiB in use of the heap": lambda: unisono.ones(128 << 10),
}
_leaked: list[Any] = []


def long_turn(group: Any, seed: int, leak: str | None) -> dict[str, float]:
    account_exactly()
    program(group, seed)
    if leak is not None and group.rank == group.size - 1:
        _leaked.append(LEAKS[leak]())
    gc.collect()  # before the barrier: a rank keeps what it shares with a peer, and a thread, until that has left too
    group.barrier()
    return holdings()


def account_exactly() -> None:
    """Makes freed memory leave the process at once, so that what is resident is held by somebody.

    As it comes, glibc keeps up to 64 MiB at the end of each arena, of which threads make up to 8 a core, and
    malloc_trim looks at the end of the main one only: between 150 and 280 MiB were seen, always 90 of them in use.
    """
    arena_max, mmap_threshold, trim_threshold = -8, -3, -1  # malloc.h
    libc = ctypes.CDLL(None)
    for option, value in ((arena_max, 1), (mmap_threshold, 128 << 10), (trim_threshold, 128 << 10)):
        assert libc.mallopt(option, value) == 1


def holdings() -> dict[str, float]:
    """The least of each within 3 s: the rings that staged the last calls are given back after 2 s without any."""
    end = time.monotonic() + 3.0
    looks = [holdings_now()]
    while time.monotonic() < end:
        time.sleep(0.2)
        looks.append(holdings_now())
    return {what: min(look[what] for look in looks) for what in looks[0]}


def holdings_now() -> dict[str, float]:
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)  # noqa: SIM115
    heap = unisono._core.heap_usage()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": leaks.threads(),
        "mappings": sum(1 for _ in open("/proc/self/maps")),
        "MiB private": int(status["RssAnon"].split()[0]) / 1024,
        "MiB shared": int(status["RssShmem"].split()[0]) / 1024,
        "MiB of addresses": int(status["VmSize"].split()[0]) / 1024,
        "MiB in use of the heap": heap["in_use"] / 2**20,
        "MiB resident of the heap": heap["resident"] / 2**20,
    }


def compare_with_heaps(ranks: list[dict[str, float]]) -> None:
    """What a rank sees of shared memory is its own heap and its peers': more than all of them hold is a leak."""
    heaps = sum(held["MiB resident of the heap"] for held in ranks)
    for held in ranks:
        held["MiB shared beyond the heaps"] = max(0.0, held.pop("MiB shared") - heaps)


# The rest is flat: in 240 s of long turns, private memory stayed within 0.2 MiB and the number of mappings the same.
# Addresses: glibc keeps up to 40 MiB of stacks of threads that have ended. Resident of the heap: it keeps 1 MiB of free
# pages, and blocks smaller than a page's worth of them.
SLACK = {
    "fds": 0,
    "threads": 0,
    "mappings": 8,
    "MiB private": 4,
    "MiB shared beyond the heaps": 1,
    "MiB of addresses": 64,
    "MiB in use of the heap": 1,
    "MiB resident of the heap": 4,
}


def least(turns: list[dict[str, float]]) -> dict[str, float]:
    return {what: min(held[what] for held in turns) for what in SLACK}


def grown(turns: list[dict[str, float]]) -> list[str]:
    """What one rank holds more than at first, after all its long turns so far."""
    counted = turns[WARM_TURNS:]
    if len(counted) < 2 * WINDOW:
        return []
    first, now = least(counted[:WINDOW]), least(counted[-WINDOW:])
    return [f"{what}: {first[what]:.1f} -> {now[what]:.1f}" for what in SLACK if now[what] > first[what] + SLACK[what]]


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
    kept = unisono.keep("turns", unisono.zeros(1000))  # before its death can come: the others look for it
    if group.rank in deaths:
        threading.Timer(deaths[group.rank], os.kill, (os.getpid(), signal.SIGKILL)).start()
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
            if isinstance(error, UNEXPLAINED):
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
    return ranks, leaks.settled_growth(before, limit_s=30.0)  # slower peers have yet to leave


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
    parser.add_argument("--leak", choices=list(LEAKS), help="plant one on the last rank; long turns only")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"SEED={seed}", flush=True)
    torch.set_num_threads(1)
    until, turn = time.monotonic() + options.seconds, 0
    held: list[list[dict[str, float]]] = [[] for _ in range(options.ranks)]  # by rank, after each long turn
    with RankPool(options.ranks) as pool:
        pool.run(Group.barrier, timeout_s=TURN_LIMIT_S)  # from here on there is a fork server
        while time.monotonic() < until:
            number = options.only if options.only is not None else turn
            its_seed = seed * 10_000 + number
            try:
                if number % 2 and options.leak is None:
                    words = do_deadly_turn(its_seed)
                else:
                    ranks = pool.run(long_turn, its_seed, options.leak, timeout_s=TURN_LIMIT_S)
                    compare_with_heaps(ranks)
                    for r, now in enumerate(ranks):
                        held[r].append(now)
                        assert not (lines := grown(held[r])), f"rank {r} grew: {', '.join(lines)}"
                    words = ", ".join(f"{value:.0f} {what}" for what, value in held[0][-1].items())
            except Exception as error:
                print(f"FAILED turn {number} of SEED={seed}: {type(error).__name__}: {error}", flush=True)
                return 1
            print(f"turn {number}: {words}", flush=True)
            turn += 1
            if options.only is not None:
                break
    if len(held[0]) >= WARM_TURNS + 2 * WINDOW:
        for r, turns in enumerate(held):
            first, last = least(turns[WARM_TURNS:][:WINDOW]), least(turns[-WINDOW:])
            print(f"rank {r}: " + ", ".join(f"{first[what]:.1f} -> {last[what]:.1f} {what}" for what in SLACK))
    print(f"{turn} turns without a fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
