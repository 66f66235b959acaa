"""`make mutation`: are the tests of the torch backend any good? Breaks it in every way of mutants.py and looks.

    python -m tests.mutation.run [words in the names of mutants]

For each mutant the tests named there run in ranks that have the mistake; one of them has to fail. First all of these
tests run without any mistake, and have to pass. Prints a table; the exit status is 1 if a mutant was not noticed.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import time
from collections.abc import Sequence

import tests.conftest
from tests.conftest import Pool
from tests.mutation.mutants import MUTANTS, Test
from tests.torch_backend.conftest import Ranks
from unisono.testing import RanksFailed, stop_fork_server

tests.conftest.RUN_LIMIT_S = 60.0  # a mutant that makes ranks wait for ever has been noticed


def main(words: Sequence[str]) -> int:
    names = [name for name in MUTANTS if not words or any(word in name for word in words)]
    if not names:
        print(f"no mutant has any of {', '.join(words)} in its name")
        return 2
    began = time.monotonic()
    every_test = {_label(test): test for name in names for test in MUTANTS[name].tests}
    fail_anyway = 0
    for label, test in every_test.items():
        if complaint := first_failure("", [test]):
            fail_anyway += 1
            print(f"FAILS WITHOUT ANY MUTANT  {label}: {complaint}", flush=True)
    if fail_anyway:
        return 1
    print(f"{len(every_test)} tests pass without any mutant; {len(names)} mutants:\n", flush=True)
    unnoticed = []
    width = max(map(len, names))
    for name in names:
        complaint = first_failure(name, MUTANTS[name].tests)
        if not complaint:
            unnoticed.append(name)
        print(f"{'noticed' if complaint else 'MISSED '}  {name:{width}}  {complaint[:90]}", flush=True)
    print(f"\n{len(names) - len(unnoticed)} of {len(names)} noticed in {time.monotonic() - began:.0f} s")
    for name in unnoticed:
        print(f"NOT NOTICED: {name}, by {', '.join(_label(test) for test in MUTANTS[name].tests)}")
    return 1 if unnoticed else 0


_pools: dict[int, Pool] = {}


def first_failure(mutant: str, chosen: Sequence[Test]) -> str:
    """What the first of these tests that fails says; empty if all pass."""
    os.environ["UNISONO_MUTANT"] = mutant
    try:
        for module, name, parameters in chosen:
            test = getattr(importlib.import_module(f"tests.torch_backend.{module}"), name)
            arguments = dict(parameters)
            if "ranks" in inspect.signature(test).parameters:
                arguments["ranks"] = Ranks(_pools.setdefault(arguments["size"], Pool(arguments["size"])))
            try:
                test(**arguments)
            except (AssertionError, RanksFailed) as error:
                if _own_fault(str(error)):
                    raise RuntimeError(f"mutant {mutant!r} itself is broken:\n{error}") from None
                return f"{name}: {_essence(str(error))}"
        return ""
    finally:
        # Values that are wrong leave nothing behind, other mistakes may: the next mutant gets new ranks.
        if any(module != "test_values" for module, _, _ in chosen):
            close_pools()
        os.environ["UNISONO_MUTANT"] = ""


def close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _label(test: Test) -> str:
    module, name, parameters = test
    return f"{module}.{name}({', '.join(f'{k}={v}' for k, v in parameters.items())})"


def _own_fault(text: str) -> bool:
    """Says whether a rank failed in the code of the mutants, not in the backend or in a test."""
    for traceback in text.split("Traceback (most recent call last):")[1:]:
        files = re.findall(r'File "[^"]*/((?:tests|unisono)/[^"]*)"', traceback)
        if files and files[-1].startswith("tests/mutation/"):
            return True
    return False


def _essence(text: str) -> str:
    """The line that says what is wrong, of a test's complaint or of a rank's traceback."""
    found = re.search(r"\n  (rank \d+: .*)", text) or re.search(r"\n(\w[\w.]*(?:Error|Failed)[^\n]*)", text)
    return " ".join((found[1] if found else text).split())


if __name__ == "__main__":
    status = main(sys.argv[1:])
    close_pools()
    stop_fork_server()
    sys.exit(status)
