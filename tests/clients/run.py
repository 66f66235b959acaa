"""Runs libraries on gloo and on unisono, compares what they give, and writes the table of docs/clients.md.

make clients                                  all of them
make clients ARGS="accelerate lightning"      some
make clients ARGS="--ranks 3 fsdp1"           on another number of ranks
"""

from __future__ import annotations

import argparse
import ast
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.clients import environments, page
from tests.clients.compare import difference

BACKENDS = ("gloo", "unisono")
#: What a program may say of itself; see the package's docstring.
CONSTANTS = {"REQUIREMENTS", "BESIDE", "PIP_OPTIONS", "SHOWN", "ENVIRONMENT", "RANKS", "BY_NAME", "TOLERANCE"}
CONSTANTS |= {"VARIABLES", "TORCHRUN", "PROBE"}
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 180.0


@dataclass
class Row:
    """A line of the table."""

    program: str
    versions: str
    title: str
    ranks: str = ""
    outcome: str = ""
    milliseconds: dict[str, float | None] = field(default_factory=dict)
    fine: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="all of tests/clients/programs unless named")
    parser.add_argument("--ranks", type=int, action="append", help="a number of ranks, instead of each program's own")
    parser.add_argument("--dry", action="store_true", help="do not write the table")
    args = parser.parse_args()
    names = args.programs or sorted(path.stem for path in PROGRAMS.glob("[a-z]*.py"))
    fine = True
    for name in names:
        rows = rows_of(name, args.ranks)
        print(*map(page.line, rows), sep="\n", flush=True)
        if not args.dry:
            page.write(rows, [name])
        fine = fine and all(row.fine for row in rows)
    return 0 if fine else 1


def rows_of(name: str, ranks: list[int] | None = None) -> list[Row]:
    """The lines of one program; of one that does not install, why."""
    source = (PROGRAMS / f"{name}.py").read_text()
    settings = declared(source)
    needed, where = settings.get("REQUIREMENTS", []), settings.get("ENVIRONMENT", "common")
    where = where if needed else None
    try:
        environments.install(where, needed, settings.get("PIP_OPTIONS", []))
        environments.install(where, settings.get("BESIDE", []))
        python = environments.python_of(where)
        environments.probe(python, settings.get("PROBE", ""))
    except environments.NotInstalled as reason:
        return [Row(name, ", ".join(needed), "", outcome=f"does not install: {reason}", fine=True)]
    shown = settings.get("SHOWN", [one.partition("[")[0].partition("=")[0] for one in needed]) or ["torch"]
    versions = ", ".join(f"{package} {number}" for package, number in environments.versions(python, shown).items())
    rows = []
    for size in ranks or settings.get("RANKS", (2,)):
        found = {backend: run(name, backend, size, python, settings) for backend in BACKENDS}
        rows += compared(name, versions, size, found, settings)
    return rows


def declared(source: str) -> dict[str, Any]:
    """The constants in capitals of a program's text, which may import what only its environment has."""
    values = {}
    for node in ast.parse(source).body:
        name = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(name, ast.Name) and name.id in CONSTANTS:
            values[name.id] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
    return values


def run(name: str, backend: str, size: int, python: str, settings: dict[str, Any]) -> list[dict[str, Any]] | str:
    """What the cases gave on each rank, or what went wrong."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(environments.ROOT), CLIENT_RANKS=str(size))
    environment["TORCH_EXTENSIONS_DIR"] = str(environments.FOLDER / "extensions")  # what DeepSpeed compiles
    environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"
    environment |= settings.get("VARIABLES", {})
    if backend == "unisono" and not settings.get("BY_NAME", True):
        environment["UNISONO_GLOO"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        launch = [python, "-m"]
        if settings.get("TORCHRUN", True):
            launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "-m"]
        command = [*launch, "tests.clients.rank", name, backend, folder]
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=environments.ROOT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = -signal.SIGKILL
        files = sorted(Path(folder).glob("*.pt"), key=lambda path: int(path.stem))
        results = [torch.load(path, weights_only=False) for path in files]
        if code or not results:
            sys.stderr.write(f"-- {name} on {backend}, {size} ranks, ended with {code}:\n{log.read_text()[-6000:]}\n")
            errors = [case["error"] for result in results for case in result.values() if "error" in case]
            return errors[0] if errors else f"ended with {code}, or took longer than {LIMIT_S:.0f} s"
        return results


def compared(name: str, versions: str, size: int, found: dict[str, Any], settings: dict[str, Any]) -> list[Row]:
    """A line for each case."""
    for backend, results in found.items():
        if isinstance(results, str):
            return [Row(name, versions, "", str(size), f"fails on {backend}: {results}")]
    ours, theirs = found["unisono"], found["gloo"]
    rows = []
    for title in ours[0]:
        row = Row(name, versions, title, str(size))
        row.milliseconds = {backend: found[backend][0][title]["milliseconds"] for backend in BACKENDS}
        limit = max(settings.get("TOLERANCE", 0.0), 0.0 if size == 2 else ours[0][title]["rounding"])
        try:
            worst = difference([one[title]["values"] for one in ours], [one[title]["values"] for one in theirs])
            row.fine = worst <= limit
            row.outcome = "same bits" if worst == 0.0 else f"{'within' if row.fine else 'differ by'} {worst:.0e}"
        except ValueError as error:
            row.outcome = f"differ {error}"
        if not row.fine:
            row.outcome = f"**{row.outcome}**"
        rows.append(row)
    return rows


if __name__ == "__main__":
    begin = time.monotonic()
    code = main()
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(code)
