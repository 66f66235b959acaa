"""`unisono bench`: collectives measured as nccl-tests does, against the memory's limit and against peers, in one run.

    python -m unisono.cli bench all_reduce -b 8 -e 64M -f 8 -n 2

Who imports whom: command > builds, hosts, scaling, summaries, targets, tuning > table > ranks, rows > contenders,
host_bytes, cpus > jobs, gloo_calls > plan > apart. What is in `apart` also runs in the peers' environments.
"""

from .command import main

__all__ = ["main"]
