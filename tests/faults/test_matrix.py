"""The matrix of faults: a diagonal of it here, all of it when slow; each cell also without its fault."""

import re
from pathlib import Path

import pytest

from tests.faults import matrix
from tests.faults.page import PAGE, rows_of

GENEROUS_S = 2.0  # beyond the promise, for a loaded machine; `make faults` prints what was measured


def _run(case, measured):
    found = matrix.run(case)
    for _, _, seconds in found:
        measured(seconds)
        if case.moment.bound_s is not None:
            assert seconds < case.moment.bound_s + GENEROUS_S, f"told after {seconds} s"


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


def test_the_page_lists_the_matrix():
    """docs/faults.md is written by `make faults`, and has exactly these rows."""
    listed = re.findall(r"^\| (?!fault|---)([^|]*) \| ([^|]*) \|", Path(PAGE).read_text(), re.M)
    assert listed == rows_of(matrix.MATRIX), "run `make faults`"
