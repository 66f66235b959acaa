"""The server that fresh ranks are forked from, and the table of measured detection times at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import fresh

_measured: list[tuple[str, float]] = []


def _nothing() -> None:
    pass


@pytest.fixture(scope="session", autouse=True)
def fresh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start it before any test counts processes; it imports tests.* by name."""
    root = str(Path(__file__).resolve().parents[2])
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, old]))
    first = fresh.context.Process(target=_nothing)
    first.start()
    first.join()
    first.close()
    if old is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = old
    yield


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[float], None]:
    """Print a time from fault to report, and keep it for the table."""

    def keep(seconds: float) -> None:
        _measured.append((request.node.name, seconds))
        print(f"{request.node.name}: reported after {1e3 * seconds:.1f} ms")

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _measured:
        return
    terminalreporter.section("time from fault to report (ms)")
    worst: dict[str, float] = {}
    for name, seconds in _measured:
        worst[name] = max(worst.get(name, 0.0), seconds)
    for name, seconds in sorted(worst.items(), key=lambda item: -item[1]):
        terminalreporter.line(f"{1e3 * seconds:9.1f}  {name}")
