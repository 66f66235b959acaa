import json
import os
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent


@pytest.fixture
def fake_peer(tmp_path, monkeypatch):
    """Puts the made-up peer where MPICH's environment would be; call it with what it shall do."""

    def put(how):
        bin_folder = tmp_path / "unisono" / "peers" / "mpich" / "bin"
        bin_folder.mkdir(parents=True, exist_ok=True)
        mpiexec = bin_folder / "mpiexec"
        mpiexec.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FOLDER / "fake_mpiexec.py"}" "$@"\n')
        mpiexec.chmod(0o755)
        (bin_folder / "python").unlink(missing_ok=True)
        os.symlink(sys.executable, bin_folder / "python")
        (bin_folder.parent / "unisono-peer.json").write_text(json.dumps({"recipe": "fake", "versions": ["fake 1"]}))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("FAKE_PEER", how)

    return put
