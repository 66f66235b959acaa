"""The matrix of faults: a diagonal of it here, also without the faults, and all of it when slow."""

import itertools
import re
from pathlib import Path

import pytest

from tests.faults import matrix, page, proofs
from tests.faults.page import PAGE, rows_of

# Beyond the promise: in CI several programs share each processor, and a rank may not run for a second. Here a cell
# fails if nobody is told, or only by a limit; `make faults`, on a machine at rest, fails if a promise is not kept.
GENEROUS_S = 2.0


def _run(case, measured):
    found = matrix.run(case)
    for _, _, seconds in found:
        measured(seconds)
    assert case.lateness_s(found) < GENEROUS_S, f"told {case.lateness_s(found)} s later than promised"


@pytest.mark.parametrize("case", list(matrix.diagonal()), ids=str)
def test_fault(case, measured):
    _run(case, measured)


@pytest.mark.parametrize("case", list(matrix.diagonal()), ids=str)
def test_without_the_fault(case):
    """The control: nobody is told anything."""
    matrix.run(case, inject=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(matrix.product()), ids=str)
def test_every_fault(case, measured):
    _run(case, measured)


def test_the_diagonal_has_every_combination():
    """Of calls that can be made either way: both, on one core and on all, with each number of ranks."""
    found = {(c.size, c.asynchronous, c.one_core) for c in matrix.diagonal() if c.moment.kinds == matrix.BOTH}
    assert found >= set(itertools.product(matrix.SIZES, (False, True), (False, True)))


def test_no_combination_runs_twice():
    """Nor is a run counted that differs from another by name only: one that makes no calls has one kind of them."""
    cases = [str(case) for case in matrix.product()]
    assert len(cases) == len(set(cases))
    ways = {case.asynchronous for case in matrix.product() if case.moment.kinds == matrix.ONE_KIND}
    assert ways == {False}


@pytest.mark.parametrize(("late_tries", "failures"), [(0, 0), (2, 0), (3, 1)])
def test_make_faults_fails_where_a_promise_is_broken(monkeypatch, capsys, late_tries, failures):
    case = next(c for c in matrix.product() if c.moment.bound_s == 0.1)
    times = [0.21] * late_tries + [0.19] * 3

    def run(case):
        return [("PeerLostError", "rank 1 died", 0.01), ("PeerLostError", "rank 1 died", times.pop(0))]

    monkeypatch.setattr(matrix, "run", run)
    done, failed = page.run_cases([case])
    assert failed == failures and done[0]["tries"] == min(late_tries + 1, 3)
    assert ("LATE" in capsys.readouterr().out) == bool(failures)


def test_the_page_lists_the_matrix():
    """docs/faults.md is written by `make faults`, and has exactly these rows."""
    listed = re.findall(r"^\| (?!fault|---)([^|]*) \| ([^|]*) \|", Path(PAGE).read_text(), re.M)
    assert listed == rows_of(matrix.MATRIX), "run `make faults`"


def test_every_cell_is_proven_able_to_fail():
    """By `make injected`, which takes each cell's defence away."""
    cells = [(row.fault, moment.name) for row in matrix.MATRIX for moment in row.moments]
    assert not [cell for cell in cells if not proofs.need_of(*cell)]
    unknown = set(proofs.NEEDS) - {name for cell in cells for name in cell}
    assert not unknown
