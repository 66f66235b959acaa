"""Every row of docs/migration.md: the same data by torch.distributed (P) or as MindSpore documents it (M)."""

import pathlib
import re

import pytest

from tests.functional import from_mindspore, from_torch
from tests.functional.rows import Row
from tests.functional.worlds import default_group
from unisono import comm_func

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "migration.md"


ROWS = {
    name.upper(): row
    for rows in (from_torch, from_mindspore)
    for name, row in vars(rows).items()
    if re.fullmatch(r"[pm]\d+", name)
}


def _run(group, backend, folder, names):
    with default_group(group, backend, folder):
        for name in names:
            try:
                ROWS[name](Row(backend))
            except Exception as error:
                error.add_note(f"row {name}")
                raise


@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("backend", ["unisono", "gloo"])
@pytest.mark.parametrize("letter", ["P", "M"])
def test_rows(pool, size, backend, letter, tmp_path):
    pool.run(_run, backend, str(tmp_path), [name for name in ROWS if name[0] == letter])


def test_every_row_of_the_page_has_a_test():
    assert re.findall(r"^\| ([PM]\d+) \|", PAGE.read_text(), re.M) == list(ROWS)


def test_every_function_is_on_the_page():
    page = PAGE.read_text()
    missing = [name for name in comm_func.__all__ if f"`{name}" not in page]
    assert not missing
