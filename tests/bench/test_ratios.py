"""The bootstrap: right where the answer is known, silent where it is not."""

import random

import pytest

from unisono.bench.ratios import compare, summary


def noisy(seed, rounds, scale=1.0):
    """Times with a long tail of their own, under slow phases of the machine, which last several rounds."""
    machine, own = random.Random(0), random.Random(seed)
    times, phase = [], 1.0
    for _ in range(rounds):
        if machine.random() < 0.1:
            phase = machine.choice([1.0, 1.0, 1.5, 3.0])
        times.append(scale * phase * (1 + own.expovariate(8)))
    return times


def test_a_factor_of_two_is_seen():
    found = compare(noisy(1, 60, 2.0), noisy(2, 60))
    assert found.verdict == "slower" and found.low > 1.5 and found.low <= 2.0 <= found.high
    assert compare(noisy(2, 60), noisy(1, 60, 2.0)).verdict == "faster"


def test_the_same_twice_is_noise():
    """Of many pairs that are equally fast, few may be called different (5 % would be perfect)."""
    named = sum(compare(noisy(2 * i, 40), noisy(2 * i + 1, 40)).verdict != "noise" for i in range(100))
    assert named <= 12


def test_common_noise_cancels():
    """What hits both in the same round does not hide a difference of 10 %."""
    source = random.Random(3)
    base = [source.uniform(1, 20) for _ in range(40)]
    found = compare([1.1 * value for value in base], base)
    assert found.low == pytest.approx(1.1) and found.high == pytest.approx(1.1) and found.verdict == "slower"


def test_few_rounds_name_nobody():
    found = compare([2.0] * 7, [1.0] * 7)
    assert (found.ratio, found.low, found.high, found.verdict) == (2.0, None, None, "noise")


def test_it_is_repeatable():
    assert compare(noisy(1, 30), noisy(2, 30)) == compare(noisy(1, 30), noisy(2, 30))


def test_rounds_must_match():
    with pytest.raises(ValueError, match="as many rounds"):
        compare([1.0, 2.0], [1.0])


def test_summary():
    found = summary([3e-6, 1e-6, 2e-6, 100e-6])
    assert found["time_us"] == pytest.approx(2.5) and found["min_us"] == pytest.approx(1)
    assert found["p95_us"] == pytest.approx(100) and found["rounds_us"] == [3.0, 1.0, 2.0, 100.0]
