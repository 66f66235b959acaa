"""The environments that programs run in: folders under ``build/clients`` with real packages from PyPI.

torch's CPU build comes first, and a constraint keeps it: a package that wants another torch does not install, and the
table says so. unisono is the wheel of this checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "clients"
PIP = ["-m", "pip", "--disable-pip-version-check", "-q"]


class NotInstalled(Exception):
    """A package does not install; the message is pip's reason."""


def python_of(name: str | None) -> str:
    """The interpreter of an environment, which is made if it is not there; None is this one."""
    if name is None:
        return sys.executable
    python = FOLDER / name / "bin" / "python"
    if not (FOLDER / name / "torch.done").exists():
        _run([sys.executable, "-m", "venv", str(FOLDER / name)])
        _run([str(python), *PIP, "install", f"torch=={_torch_version()}", "numpy"])
        (FOLDER / name / "torch.done").touch()
    _install_unisono(name, str(python))
    return str(python)


def install(name: str | None, requirements: Sequence[str], options: Sequence[str] = ()) -> None:
    """Installs what a program needs, once; raises :class:`NotInstalled` with the reason."""
    if name is None or not requirements:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    constraints = FOLDER / "constraints.txt"
    constraints.write_text(f"torch=={_torch_version()}\n")
    done = FOLDER / name / "installed.txt"
    line = " ".join([*options, *requirements]) + "\n"
    if done.exists() and line in done.read_text():
        return
    _run([python_of(name), *PIP, "install", "-c", str(constraints), *options, *requirements])
    with done.open("a") as file:
        file.write(line)


def probe(python: str, line: str) -> None:
    """Runs a line of Python in an environment; raises :class:`NotInstalled` with the error it ended with."""
    done = subprocess.run([python, "-c", line], capture_output=True, text=True)
    if done.returncode:
        raise NotInstalled((done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1])


def versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """The versions of packages in an environment."""
    program = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]), sep='\\n')"
    shown = subprocess.run([python, "-c", program, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, shown.stdout.split(), strict=True))


def _torch_version() -> str:
    return metadata.version("torch").partition("+")[0]


def _install_unisono(name: str, python: str) -> None:
    """The wheel of this checkout, built anew when the package was installed anew in ``.venv``."""
    installed = ROOT / ".venv" / "package.done"
    wheels = FOLDER / "wheel"
    built = wheels / "built.done"
    if not built.exists() or built.stat().st_mtime < installed.stat().st_mtime:
        for old in wheels.glob("*.whl"):
            old.unlink()
        _run([sys.executable, *PIP, "wheel", "--no-build-isolation", "--no-deps", "-w", str(wheels), str(ROOT)])
        built.touch()
    there = FOLDER / name / "unisono.done"
    if not there.exists() or there.stat().st_mtime < built.stat().st_mtime:
        wheel = next(wheels.glob("unisono-*.whl"))
        _run([python, *PIP, "install", "--no-deps", "--force-reinstall", str(wheel)])
        there.touch()


def _run(command: Sequence[str]) -> None:
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NotInstalled(errors[0] if errors else f"pip ended with {done.returncode}")
