"""Random programs of collectives: how they are drawn, and how a rank runs one and checks it with the model.

A program is a list of steps in one order that all ranks share. Each step is a collective on the world or on a
subgroup, or a message between two ranks; a rank outside the step's group skips it. Async steps stay in flight
until a later step says that everything is waited for, in an order of each rank's own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.calls import LIMIT_S, Call, Placed, Started, splits, start, threshold_counts, unwritten
from tests.reference import MOVABLE, REDUCIBLE, difference, dtype_of, make_input, ops_of

ONE_TENSOR = ("all_reduce", "reduce", "broadcast")
CHUNKED = ("all_gather", "reduce_scatter", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
IN_PLACE = ("all_reduce", "reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Message:
    source: int
    destination: int
    tag: int
    from_anybody: bool  # recv does not name the source; only in sync messages
    call: Call  # dtype, counts, kinds of sender and receiver, async_op, seed


@dataclass(frozen=True)
class Step:
    group: int  # 0 is the world, k the k-th subgroup
    what: Call | Message
    wait: bool  # for everything in flight, after this step


@dataclass(frozen=True)
class Program:
    subgroups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        lines = [f"    {step!r}," for step in self.steps]
        return "\n".join([f"Program({self.subgroups!r}, (", *lines, "))"])


# --- drawing ------------------------------------------------------------------------------------------------

kind_letters = st.sampled_from(["hh", "oo", "hh", "oo", "ho", "oh"])


def counts_near_thresholds(dtype: str, size: int) -> st.SearchStrategy[int]:
    edges = threshold_counts(dtype, size)
    return st.one_of(st.sampled_from(edges), st.integers(0, 64), st.integers(0, 70_000))


@st.composite
def calls(draw: Any, size: int, seed: int) -> Call:
    verb = draw(st.sampled_from([*ONE_TENSOR, "all_reduce", *CHUNKED, "all_to_all"]))
    dtype = draw(st.sampled_from(REDUCIBLE if verb in REDUCING else MOVABLE))
    op = draw(st.sampled_from(ops_of(dtype))) if verb in REDUCING else "sum"
    count = draw(counts_near_thresholds(dtype, size))
    counts: Any = count
    if verb in CHUNKED:
        counts = draw(st.one_of(st.sampled_from(splits(count, size)), st.just((count,) * size)))
    elif verb == "all_to_all":
        cell = st.integers(0, 2 * count // size + 1)
        counts = tuple(tuple(draw(cell) for _ in range(size)) for _ in range(size))
    forms = ["plain"] + ["in_place"] * (verb in IN_PLACE) + ["list"] * (verb not in ONE_TENSOR)
    one_kind = st.builds(lambda kind: (kind,) * size, kind_letters)
    return Call(
        verb,
        dtype,
        counts,
        op=op,
        root=draw(st.integers(0, size - 1)),
        kinds=draw(st.one_of(one_kind, st.tuples(*[kind_letters] * size))),
        form=draw(st.sampled_from(forms)),
        shift=draw(st.sampled_from([0, 0, 1, 3])),
        async_op=draw(st.booleans()),
        special=draw(st.booleans()),
        seed=seed,
    )


@st.composite
def messages(draw: Any, size: int, seed: int) -> Message:
    source = draw(st.integers(0, size - 1))
    destination = draw(st.integers(0, size - 1).filter(lambda rank: rank != source))
    dtype = draw(st.sampled_from(MOVABLE))
    count = draw(counts_near_thresholds(dtype, size))
    async_op = draw(st.booleans())
    call = Call("send", dtype, count, kinds=(draw(kind_letters),), async_op=async_op, seed=seed)
    # A receive from anybody has a tag of its own, or it would take another receive's message.
    from_anybody = not async_op and draw(st.booleans())
    tag = 1000 + seed if from_anybody else draw(st.integers(0, 3))
    return Message(source, destination, tag, from_anybody, call)


@st.composite
def programs(draw: Any, size: int, min_steps: int = 5, max_steps: int = 25) -> Program:
    some_ranks = st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True).map(tuple)
    subgroups = tuple(draw(st.lists(some_ranks, max_size=2)))
    steps = []
    for seed in range(draw(st.integers(min_steps, max_steps))):
        group = draw(st.integers(0, len(subgroups)))
        members = size if group == 0 else len(subgroups[group - 1])
        message = members > 1 and draw(st.integers(0, 4)) == 0
        what = draw(messages(members, seed) if message else calls(members, seed))
        steps.append(Step(group, what, wait=draw(st.integers(0, 5)) == 0))
    return Program(subgroups, tuple(steps))


# --- running ------------------------------------------------------------------------------------------------


def run_program(group: Any, program: Program) -> list[str]:
    """On a rank: run the program; complaints with the step in question."""
    groups = [group]
    for ranks in program.subgroups:
        groups.append(group.split(ranks if group.rank in ranks else None))
    chance = random.Random(group.rank)
    complaints: list[str] = []
    in_flight: list[tuple[int, Started]] = []

    def wait_for_all() -> None:
        chance.shuffle(in_flight)
        while in_flight:
            finish(*in_flight.pop())

    def finish(number: int, started: Started) -> None:
        found, _ = started.finish()
        complaints.extend(f"step {number}: {line}\n      in {program.steps[number]}" for line in found)

    for number, step in enumerate(program.steps):
        own = groups[step.group]
        if own is not None:
            try:
                is_message = isinstance(step.what, Message)
                started = pass_on(own, step.what) if is_message else start(own, step.what)
                if started is not None and started.handle is not None:
                    in_flight.append((number, started))
                elif started is not None:
                    finish(number, started)
            except Exception as error:
                raise AssertionError(f"step {number}, {step}: {error!r}") from error
        if step.wait:
            wait_for_all()
    wait_for_all()
    for made in groups[1:]:
        if made is not None:
            made.close()
    return complaints


def pass_on(group: Any, message: Message) -> Started | None:
    """Send or receive, if this rank has a part in the message."""
    call = message.call
    if group.rank not in (message.source, message.destination):
        return None
    started = Started(call)
    content = make_input(call.dtype, call.counts, message.source, call.seed)
    options = {"tag": message.tag, "async_op": call.async_op, "timeout_s": LIMIT_S}
    if group.rank == message.source:
        placed = started.watch("sent tensor", Placed(content, call.kinds[0][0], call), content)
        started.handle = group.send(placed.tensor, message.destination, **options)
        return started
    empty = unwritten(call.counts, dtype_of(call.dtype))
    placed = started.watch("received tensor", Placed(empty, call.kinds[0][1], call), content)
    answer = group.recv(placed.tensor, None if message.from_anybody else message.source, **options)
    if call.async_op:
        started.handle = answer
    elif answer != message.source:
        raise AssertionError(f"recv returned source {answer}: {difference(placed.flat, content) or 'right bits'}")
    return started
