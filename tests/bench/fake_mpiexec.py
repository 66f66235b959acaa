"""Stands where a launcher is: `mpiexec … -n 2 python -c program folder` starts two ranks of the made-up peer."""

import os
import pathlib
import subprocess
import sys

size = int(sys.argv[sys.argv.index("-n") + 1])
fake = pathlib.Path(__file__).with_name("fake_rank.py")
ranks = [
    subprocess.Popen([sys.executable, str(fake), sys.argv[-1]], env={**os.environ, "FAKE_RANK": str(rank)})
    for rank in range(size)
]
sys.exit(max(rank.wait() for rank in ranks))
