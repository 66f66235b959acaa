"""Random programs of collectives on 2, 3 and 4 ranks give what the model says, bit for bit."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.programs import programs, run_program

COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
}  # the pool stays the same for all examples, and is meant to


def _check(pool, program):
    results = pool.run(run_program, program)
    lines = [f"rank {rank}: {line}" for rank, found in enumerate(results) for line in found]
    assert not lines, "\n".join(lines[:12])


@pytest.mark.parametrize("size", [2, 3, 4])
@settings(max_examples=40, derandomize=True, **COMMON)
@given(data=st.data())
def test_programs(pool, size, data):
    _check(pool, data.draw(programs(size)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 3, 4, 7])
@settings(max_examples=1500, print_blob=True, **COMMON)
@given(data=st.data())
def test_many_programs(pool, size, data):
    _check(pool, data.draw(programs(size, max_steps=60)))
