"""One row of the benchmark, as its ranks measure it.

Rank 0 leads. In every round each contender has its turn: unisono on heap and on ordinary tensors, gloo, each peer's
team of processes, and the limit (`Yardstick`, plain threads in rank 0's process). The order is another one in
every round, so that whatever one contender leaves behind, and whatever else the machine does, hits all of them alike.
Between turns all other ranks, of unisono and of the peers, sleep in a socket: nothing spins while another contender is
measured.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .apart.cases import OPS, Case, Lacking
from .apart.turns import Channel, accept, listen
from .contenders import LIMIT, Contender, Groups, Order, contenders_of
from .cpus import pin_to_one, using
from .host_bytes import count_sent
from .link import Link
from .peers import SILENCE_S, Team, start_teams
from .ratios import FEWEST_ROUNDS, summary

if TYPE_CHECKING:
    from unisono.group.group import Group

WARM_BYTES = 64 << 20  # larger buffers leave no cache warm
TURN_S = 1e-3  # calls are repeated up to this length
LARGE_BYTES, LARGE_TURN_S = 1 << 20, 4e-3  # the same above this size, where one call more or less would show
CROWDED_TURN_S = 10e-3  # the same when ranks share CPUs: more than one time slice of the scheduler
MOST_CALLS = 10_000
MOST_ROUNDS = 200
SLOW_S = 0.5  # whose calls take longer is timed in the first SLOW_ROUNDS only, so that others are timed at all
SLOW_ROUNDS = 3
HOPELESS_S = 3.0  # a peer whose first call takes longer is left out of the row
HOPELESS_ROWS = 2  # and after so many rows of an operation, out of the rest
MEMORY_SHARE = 0.7  # of what is free may be taken by one row
REFUSALS = (Lacking, RuntimeError, ValueError, TypeError, NotImplementedError)

Turn = Callable[[int, int], float]  # warm-up calls, timed calls -> seconds per call of the slowest rank


class Hopeless(Lacking):
    """So slow that all others would wait for it."""


@dataclass(frozen=True)
class Between:
    """Several hosts: whose rank is where, their network namespaces, and their addresses."""

    host_of: Sequence[int]
    namespaces: Sequence[str]
    addresses: Sequence[str]


@dataclass
class Stage:
    """What a rank keeps from join() to leave()."""

    groups: Groups
    channels: list[Channel]  # rank 0: to every other rank; the others: to rank 0
    cpus: set[int]  # that any of the ranks may use
    namespaces: Sequence[str] = ()  # of the hosts, if there are several
    teams: dict[str, list[Team]] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)
    hopeless: Counter[tuple[str, str]] = field(default_factory=Counter)  # rows, by peer and operation


_stage: Stage | None = None


def settle(group: Group, pin: bool, tasks: str | None) -> None:
    """Move this rank into the control group whose list of tasks is given, and to one CPU, round robin."""
    if tasks is not None:
        Path(tasks).write_text(str(os.getpid()))
    if pin:
        pin_to_one(group.rank)


def join(
    group: Group, folder: str, gloo: bool, backend: bool, peers: list[str], between: Between | None = None
) -> dict[str, Any]:
    """Connect the ranks for turn-taking, and in process groups; rank 0 starts the peers and says what it found.

    `between` is about the hosts that the ranks are in, if there are several.
    """
    global _stage
    path = os.path.join(folder, "turns")
    if group.rank == 0:
        with listen(path) as listener:
            channels = [channel for _, channel in accept(listener, group.size - 1, timeout_s=SILENCE_S)]
    else:
        channels = [Channel.connect(path, SILENCE_S)]
        channels[0].send({"rank": group.rank})
    groups = Groups(group, link=None if between is None else Link(group, between.host_of, between.addresses))
    if gloo or backend:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not dist.is_initialized():
            meeting = f"file://{os.path.join(folder, 'gloo')}"
            dist.init_process_group("gloo", init_method=meeting, rank=group.rank, world_size=group.size)
        groups.gloo = dist.new_group(backend="gloo")
    if backend:
        try:
            groups.backend = dist.new_group(backend="unisono")
        except (ValueError, RuntimeError, ImportError) as error:
            groups.backend_lacks = str(error).splitlines()[0]
    namespaces = () if between is None else between.namespaces
    _stage = Stage(groups, channels, _all_cpus(group.rank, channels), namespaces)
    if group.rank == 0 and peers:
        with using(_stage.cpus):
            crowded = group.size > len(_stage.cpus)
            _stage.teams, _stage.lacks = start_teams(peers, group.size, crowded, folder)
    libraries = {name: _stage.teams[name][0].library for name in _stage.teams}
    return {"libraries": libraries, "lacks": _stage.lacks}


def _all_cpus(rank: int, channels: list[Channel]) -> set[int]:
    """The CPUs of all ranks together, on rank 0: a launcher may have bound each rank to its own."""
    mine = os.sched_getaffinity(0)
    if rank != 0:
        channels[0].send(sorted(mine))
        return mine
    return mine.union(*(channel.receive(SILENCE_S) for channel in channels))


def leave(group: Group) -> None:
    """Undo join(), all ranks together."""
    global _stage
    stage, _stage = _stage, None
    if stage is None:
        return
    for teams in stage.teams.values():
        for team in teams:
            team.close()
    if dist.is_initialized():
        dist.barrier(group=stage.groups.gloo)
        dist.destroy_process_group()
    if stage.groups.link is not None:
        stage.groups.link.close()
    for channel in stage.channels:
        channel.close()


def measure(group: Group, case: Case, order: Order) -> dict[str, Any] | None:
    """Measure one row; rank 0 returns it, with "left_out" instead of results if memory does not suffice."""
    stage = _stage
    assert stage is not None, "join() comes first"
    op = OPS[case.op]
    row: dict[str, Any] = {
        "op": case.op,
        "ranks": case.ranks,
        "crowded": case.ranks > len(stage.cpus),
        "counts": list(case.counts),
        "size_bytes": case.size_bytes,
        "count": case.count,
        "dtype": case.dtype,
        "redop": case.redop if op.reduces else "none",
        "root": 0 if op.rooted else -1,
    }
    need = _memory_need(case, order, len(stage.teams))
    if _told(stage, need > MEMORY_SHARE * free_bytes()):
        return row | {"left_out": need} if group.rank == 0 else None
    found, lacks, jobs = contenders_of(stage.groups, case, order)
    found, wrong = _checked(stage, found, lacks, order.check)
    for job in jobs:
        job.clear()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        if group.rank != 0:
            _obey(stage.channels[0], found)
            return None
        results = _lead(stage, found, case, order, lacks, wrong)
    finally:
        if collecting:
            gc.enable()
    limit = results.pop(LIMIT, None)
    return row | {LIMIT: limit, "results": results, "lacks": lacks}


def free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _memory_need(case: Case, order: Order, peers: int) -> int:
    """Bytes of all ranks and contenders together; workarounds need up to twice as much as the operation."""
    shares = len(order.kinds) + 1 + 2 * order.gloo + peers + ("comm_func" in order.ways)
    return int(shares * OPS[case.op].buffers(case.ranks) * case.size_bytes)


def _told(stage: Stage, mine: bool) -> bool:
    """Rank 0's answer, on all ranks."""
    if stage.groups.direct.rank != 0:
        return bool(stage.channels[0].receive(SILENCE_S))
    for channel in stage.channels:
        channel.send(mine)
    return mine


def _checked(
    stage: Stage, found: list[Contender], lacks: dict[str, str], check: bool
) -> tuple[list[Contender], dict[str, int | None]]:
    """Those that work, after one call of each, and on rank 0 the wrong elements of all variants and ranks."""
    working: list[Contender] = []
    wrong: dict[str, int | None] = {}
    for contender in found:
        try:
            count = contender.check()
        except REFUSALS as error:  # by all ranks alike, before anything was sent
            if contender.ours:
                raise
            lacks.setdefault(contender.name, str(error).splitlines()[0] or type(error).__name__)
            continue
        working.append(contender)
        wrong[contender.name] = (wrong.get(contender.name) or 0) + count if check else None
    for name in {contender.name for contender in working}:
        lacks.pop(name, None)
    if stage.groups.direct.rank != 0:
        stage.channels[0].send(wrong)
        return working, wrong
    for channel in stage.channels:
        theirs = channel.receive(SILENCE_S)
        wrong = {name: None if count is None else count + theirs[name] for name, count in wrong.items()}
    return working, wrong


def _obey(leader: Channel, contenders: list[Contender]) -> None:
    while (order := leader.receive(SILENCE_S)) is not None:
        number, warmup, calls = order
        leader.send(contenders[number].run(warmup, calls))


def _lead(
    stage: Stage,
    found: list[Contender],
    case: Case,
    order: Order,
    lacks: dict[str, str],
    wrong: dict[str, int | None],
) -> dict[str, Any]:
    crowded = case.ranks > len(stage.cpus)
    warmup = 1 if case.size_bytes <= WARM_BYTES else 0

    def local_turn(number: int) -> Turn:
        def turn(untimed: int, calls: int) -> float:
            for channel in stage.channels:
                channel.send([number, untimed, calls])
            seconds = found[number].run(untimed, calls)
            return max([seconds, *(float(channel.receive(SILENCE_S)) for channel in stage.channels)])

        return turn

    with contextlib.ExitStack() as ending:
        for channel in stage.channels:
            ending.callback(channel.send, None)
        turns: dict[str, dict[str, Turn]] = {}
        for number, contender in enumerate(found):
            turns.setdefault(contender.name, {})[contender.variant] = local_turn(number)
        chosen = {name: _fastest(variants, case) for name, variants in turns.items()}
        if LIMIT not in chosen and not _moves_nothing(case) and not stage.namespaces:
            with using(stage.cpus):
                yardstick = _yardstick(case)
            variant = f"{yardstick.variant}, {yardstick.threads} threads"
            chosen[LIMIT] = (variant, lambda untimed, calls: float(yardstick.round(calls, untimed)))
        lacks |= {name: why for name, why in stage.lacks.items() if name not in stage.teams}
        for name, teams in stage.teams.items():
            try:
                if stage.hopeless[name, case.op] >= HOPELESS_ROWS:
                    raise Lacking(f"left out: too slow in {HOPELESS_ROWS} rows of {case.op} before")
                team, wrong[name] = _best_team(teams, case, order.check)
                chosen[name] = (team.name, team.run)
                ending.callback(_drop, team)
            except Lacking as why:
                lacks[name] = str(why)
                stage.hopeless[name, case.op] += isinstance(why, Hopeless)
        rounds = _take_turns(chosen, case, order, warmup, crowded, lacks)
        sent = {name: count_sent(stage.namespaces, chosen[name][1], case) for name in rounds if stage.namespaces}
    results: dict[str, Any] = {}
    for name, (batch, seconds) in rounds.items():
        variant = chosen[name][0]
        messages = 1 if name == LIMIT else OPS[case.op].messages
        results[name] = {
            **summary([value / messages for value in seconds]),
            "batch": batch,
            "variant": variant,
            "wrong": wrong.get(name),
            **({"sent": sent[name]} if sent else {}),
        }
    return results


def _take_turns(
    chosen: dict[str, tuple[str, Turn]], case: Case, order: Order, warmup: int, crowded: bool, lacks: dict[str, str]
) -> dict[str, tuple[int, list[float]]]:
    """Batch size and seconds by round, of every contender that lasted."""
    turn_s = CROWDED_TURN_S if crowded else LARGE_TURN_S if case.size_bytes > LARGE_BYTES else TURN_S
    rounds: dict[str, tuple[int, list[float]]] = {}

    def take(name: str, calls: int) -> float | None:
        try:
            return chosen[name][1](warmup, calls)
        except Lacking as why:  # a peer that ended takes its place in the table as lacking
            lacks[name] = str(why)
            rounds.pop(name, None)
            return None

    fewest = 10 if case.size_bytes <= 64 << 10 else 3 if case.size_bytes <= 4 << 20 else 1
    for name in chosen:
        # The best of three: a batch that noise made short would be measured as slower in every round.
        least, tries = fewest, [take(name, 1)]
        if tries[0] is not None and tries[0] > SLOW_S:
            least = 1
        else:
            tries = [take(name, fewest) for _ in range(3) if name not in lacks]
        if name not in lacks:
            quickest = min(once for once in tries if once is not None)
            rounds[name] = (max(least, min(MOST_CALLS, int(turn_s / max(quickest, 1e-9)))), [])
    shuffle = random.Random(repr(case))  # the same when repeated, another in each row
    names: list[str] = []
    start, done = time.monotonic(), 0
    while not _enough(done, time.monotonic() - start, order):
        if done % len(rounds) == 0 or len(names) != len(rounds):
            names = shuffle.sample(list(rounds), len(rounds))
        for name in balanced(names, done):
            batch, seconds = rounds[name]
            if len(seconds) >= SLOW_ROUNDS and seconds[-1] > SLOW_S:
                continue
            took = take(name, batch)
            if took is not None:
                seconds.append(took)
        done += 1
    return rounds


def balanced(names: list[str], turn: int) -> list[str]:
    """One of the orders in which, over as many rounds as there are names, each comes after each other equally often.

    >>> [balanced(["a", "b", "c", "d"], turn) for turn in range(2)]
    [['a', 'd', 'b', 'c'], ['b', 'a', 'c', 'd']]
    """
    count = len(names)
    order = [(place // 2 if place % 2 == 0 else -(place + 1) // 2) + turn for place in range(count)]
    return [names[place % count] for place in order]


def _fastest(variants: dict[str, Turn], case: Case) -> tuple[str, Turn]:
    """The variant whose best of three short turns is least."""
    if len(variants) == 1:
        return next(iter(variants.items()))
    calls = 5 if case.size_bytes <= 1 << 20 else 1
    return min(variants.items(), key=lambda item: min(item[1](1, calls) for _ in range(3)))


def _best_team(teams: list[Team], case: Case, check: bool) -> tuple[Team, int | None]:
    """The setting of a peer that is fastest for this case, with the case ready; the others' memory is free again."""
    alive = [team for team in teams if team.alive]
    if not alive:
        raise Lacking("all its processes have ended")
    calls = 5 if case.size_bytes <= 1 << 20 else 1
    why = Lacking("refused")
    times: list[tuple[float, int, Team]] = []
    for team in alive:
        try:
            wrong, first = team.prepare(case)
            if first > HOPELESS_S:
                why = Hopeless(f"left out of this row: its first call took {first:.1f} s")
            else:
                times.append((min(team.run(1, calls) for _ in range(3)) if len(alive) > 1 else first, wrong, team))
            team.drop()
        except Lacking as error:
            why = error
    if not times:
        raise why
    _, wrong, best = min(times, key=lambda entry: entry[0])
    best.prepare(case)
    return best, wrong if check else None


def _drop(team: Team) -> None:
    with contextlib.suppress(Lacking):
        team.drop()


def _enough(rounds: int, spent_s: float, order: Order) -> bool:
    if order.rounds is not None:
        return rounds >= order.rounds
    if rounds < 15:  # fewer only where one round takes seconds, but enough for a range
        return rounds >= FEWEST_ROUNDS and spent_s > 5 * order.seconds
    return rounds >= MOST_ROUNDS or spent_s > order.seconds


def _moves_nothing(case: Case) -> bool:
    """One rank alone, in place: there is no least traffic to compare with."""
    return case.ranks == 1 and case.op in ("all_reduce", "reduce", "broadcast")


def _yardstick(case: Case) -> Any:
    from unisono._yardstick import Yardstick

    if case.op.startswith("p2p"):  # one message copied once, by both ends together
        return Yardstick("broadcast", case.size_bytes, [], 2)
    splits = [float(n) for n in case.counts] if case.count else []
    return Yardstick(case.op, case.size_bytes if case.op != "barrier" else 0, splits, case.ranks)
