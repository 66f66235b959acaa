"""`unisono bench --setup-peers`: each peer from its PyPI wheels into an environment of its own, once.

One environment per peer, because they all bring a libmpi. A peer that is complete and whose recipe has not changed is
left as it is; one that failed half-way is made again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .peers import COMPILED, MARK, PEERS, Peer


class SetupFailed(Exception):
    """A step failed; the text is its last words."""


def setup_peers(names: Sequence[str]) -> int:
    """Sets up the peers named; returns how many could not be."""
    failed = 0
    for number, name in enumerate(names, 1):
        peer = PEERS[name]
        start = time.monotonic()
        head = f"[{number}/{len(names)}] {peer.title}"
        facts = peer.facts()
        if facts is not None and facts["recipe"] == _recipe(peer):
            print(f"{head}: there already, {', '.join(facts['versions'])}", flush=True)
            continue
        try:
            print(f"{head}: {' '.join([*peer.wheels, *peer.alone])}", flush=True)
            versions = _make(peer)
            print(f"{head}: {', '.join(versions)} in {time.monotonic() - start:.0f} s, {peer.folder}", flush=True)
        except (SetupFailed, OSError) as error:
            failed += 1
            print(f"{head}: FAILED, {error}", flush=True)
    return failed


def _recipe(peer: Peer) -> str:
    text = repr((peer.wheels, peer.alone, sys.version_info[:2]))
    if peer.compiled:
        text += _source(peer).read_text()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(peer: Peer) -> Path:
    return Path(__file__).parent / "apart" / str(peer.compiled)


def _make(peer: Peer) -> list[str]:
    folder = peer.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run("environment", [sys.executable, "-m", "venv", str(folder)])
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--only-binary", ":all:"]
    _run("wheels", [*pip, *peer.wheels])
    if peer.alone:
        _run("wheels on their own", [*pip, "--no-deps", *peer.alone])
    if peer.compiled:
        _run("compiling", _compile_command(peer))
    listed = _run("versions", [python, "-m", "pip", "--disable-pip-version-check", "list", "--format=json"])
    wanted = {name.lower() for name in (*peer.wheels, *peer.alone)}
    packages = json.loads(listed[listed.index("[") :].splitlines()[0])
    versions = [f"{p['name']} {p['version']}" for p in packages if p["name"].lower().replace("_", "-") in wanted]
    (folder / MARK).write_text(json.dumps({"recipe": _recipe(peer), "versions": versions}))
    return versions


def _compile_command(peer: Peer) -> list[str]:
    lib = peer.folder / "lib"
    libraries = [f"-l:{name}" for name in ("libmpi.so.12", "libhwloc.so.15", "libintlc.so.5")]
    return [
        *("g++", "-O2", "-std=c++17", "-fPIC", "-shared", "-o", str(peer.folder / COMPILED), str(_source(peer))),
        *(f"-I{peer.folder / 'include'}", str(lib / "ccl" / "cpu" / "lib" / "libccl.a"), f"-L{lib}", *libraries),
        *("-lpthread", "-ldl", "-Wl,-z,defs", f"-Wl,-rpath,{lib}"),
    ]


def _run(step: str, command: list[str]) -> str:
    """Runs one step with a line about it; what it printed."""
    print(f"    {step} ...", flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise SetupFailed(f"{step}: {error.filename} is not installed") from None
    if done.returncode != 0:
        words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        told = [line for line in words if "error" in line.lower()] or words or ["no message"]
        raise SetupFailed(f"{step}: {told[-1].strip()}")
    return done.stdout
