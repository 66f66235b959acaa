"""One rank of a made-up peer: answers turns as a real one would, and does what the environment asks for.

FAKE_PEER: "good", "wrong" (3 elements on each rank), "lacking", "dies" (rank 1 in its first run), "hangs" (in its
first run, burning time as MPI does), "slow" (says its first call took 10 s).
"""

import os
import sys
import time

sys.path.append(sys.argv[1])

from apart.cases import Lacking
from apart.turns import serve_turns

RANK = int(os.environ["FAKE_RANK"])
HOW = os.environ.get("FAKE_PEER", "good")


class FakeJob:
    def __init__(self, case):
        if HOW == "lacking":
            raise Lacking(f"no {case.op} here")
        self.case = case

    def check(self):
        return 3 if HOW == "wrong" else 0, 10.0 if HOW == "slow" else 1e-6

    def run(self, warmup, calls):
        if HOW == "dies" and RANK == 1:
            os._exit(7)
        end = time.monotonic() + 60  # also if the defence that is tested does not work
        while HOW == "hangs" and time.monotonic() < end:
            time.sleep(0)
        return 1e-6 * (RANK + 1) * self.case.count  # the slowest rank is the last


serve_turns(os.environ["UNISONO_BENCH_TURNS"], RANK, "Fake MPI 1.2.3", FakeJob)
