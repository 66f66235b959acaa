"""Parts of a row's measurement that a whole run would hide."""

import itertools
from types import MappingProxyType

import pytest

from unisono.bench import rows
from unisono.bench.apart.cases import Case, Lacking
from unisono.bench.contenders import Contender, Order


class FakeChannel:
    def __init__(self, answer):
        self.answer = answer

    def receive(self, timeout_s=None):
        return self.answer


class FakeStage:
    class groups:
        class direct:
            rank = 0

    def __init__(self, *answers):
        self.channels = [FakeChannel(answer) for answer in answers]


def contender(name, variant, wrong, ours=False):
    def count_wrong(returned):
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    return Contender(name, variant, lambda: None, lambda: None, count_wrong, lambda: None, ours)


def test_wrong_elements_of_all_ranks_and_variants():
    found = [contender("heap", "", 0), contender("gloo", "a", 1), contender("gloo", "b", 2)]
    stage = FakeStage({"heap": 0, "gloo": 10}, {"heap": 5, "gloo": 0})
    working, wrong = rows._checked(stage, found, {}, True)
    assert working == found and wrong == {"heap": 5, "gloo": 13}
    assert rows._checked(stage, found, {}, False)[1] == {"heap": None, "gloo": None}


def test_refusals():
    """A variant that is refused is left out; a name is lacking when all are; the Group's own refusal is a fault."""
    lacks = {}
    found = [contender("gloo", "a", RuntimeError("no bfloat16\nmore")), contender("gloo", "b", 0)]
    assert rows._checked(FakeStage(), found, lacks, True)[0] == found[1:] and lacks == {}
    assert rows._checked(FakeStage(), found[:1], lacks, True)[0] == [] and lacks == {"gloo": "no bfloat16"}
    with pytest.raises(RuntimeError):
        rows._checked(FakeStage(), [contender("heap", "", RuntimeError("broken"), ours=True)], {}, True)


def test_turns_are_even_and_a_lost_peer_is_lacking():
    taken = []

    def turn(name, lost_after=1000):
        def take(warmup, calls):
            taken.append(name)
            if taken.count(name) > lost_after:
                raise Lacking("lost")
            return 1e-6

        return take

    lacks = {}
    chosen = {"heap": ("", turn("heap")), "mpich": ("", turn("mpich", 5)), "limit": ("", turn("limit"))}
    case = Case("all_reduce", 2, (1, 1))
    found = rows._take_turns(chosen, case, Order(rounds=20), 1, False, lacks)
    assert lacks == {"mpich": "lost"} and found.keys() == {"heap", "limit"}
    assert all(len(seconds) == 20 and batch == 1000 for batch, seconds in found.values())
    orders = {tuple(taken[i : i + 2]) for i in range(30, len(taken) - 1, 2)}
    assert len(orders) > 1  # not always the same first


@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_everybody_follows_everybody(count):
    names = [str(i) for i in range(count)]
    pairs = [pair for turn in range(count) for pair in itertools.pairwise(rows.balanced(names, turn))]
    assert len(set(pairs)) == len(pairs) == count * (count - 1)


def test_an_odd_number_takes_turns_too():
    for turn in range(10):
        assert sorted(rows.balanced(["a", "b", "c", "d", "e"], turn)) == ["a", "b", "c", "d", "e"]


def test_the_fastest_variant_is_taken():
    times = {"a": 3e-6, "b": 1e-6, "c": 2e-6}
    variants = {name: (lambda warmup, calls, t=t: t) for name, t in times.items()}
    assert rows._fastest(variants, Case("all_reduce", 2, (1, 1)))[0] == "b"


def test_memory_is_counted(monkeypatch):
    """Nothing is allocated for a row that would not fit."""
    case = Case("all_reduce", 1 << 28, (1 << 27, 1 << 27))
    assert rows._memory_need(case, Order(gloo=False), 0) == 3 * 2 * case.size_bytes
    assert rows._memory_need(case, Order(), 4) == 9 * 2 * case.size_bytes

    class Stage(FakeStage):
        cpus = frozenset({0, 1})
        teams = MappingProxyType({})

    class Group:
        rank = 0

    monkeypatch.setattr(rows, "_stage", Stage())
    monkeypatch.setattr(rows, "free_bytes", lambda: 1 << 30)
    row = rows.measure(Group(), case, Order())
    assert row["left_out"] == 5 * 2 * case.size_bytes and "results" not in row
