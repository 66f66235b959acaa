"""Proofs that every cell of the fault matrix can fail: the defence it needs switched off, or a fault planted in a rank.

A defence of the core is switched off in a core that was built with UNISONO_FAULTS. One that is written in Python is
patched here, in the rank. Where there is none to switch off, since nothing of ours could go wrong, what the cell looks
for is planted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import unisono
from unisono.group import rendezvous

PLANTED = "/dev/shm/unisono-planted-"  # the leftovers of a crashed run, by pid


def _joining_has_no_deadline() -> None:
    meet = rendezvous.meet

    def endless(*args: Any) -> Any:
        return meet(*args[:-1], math.inf)

    rendezvous.meet = endless


def _versions_are_not_compared() -> None:
    rendezvous.Plan.differs = lambda self, other: ""  # type: ignore[method-assign]


def _too_large_a_tensor_is_cut() -> None:
    empty = unisono._core.empty
    unisono._core.empty = lambda shape, *kind: empty([min(n, 1 << 20) for n in shape], *kind)


def _a_failed_join_leaves_a_file_open() -> None:
    meet = rendezvous.meet

    def leak(*args: Any) -> Any:
        os.dup(0)
        return meet(*args)

    rendezvous.meet = leak


def _a_rank_leaves_memory_behind() -> None:
    with open(f"{PLANTED}{os.getpid()}", "w"):
        pass


def _one_element_is_wrong() -> None:
    all_reduce = unisono.Group.all_reduce

    def wrong(self: unisono.Group, tensor: Any, *args: Any, **options: Any) -> Any:
        made = all_reduce(self, tensor, *args, **options)
        tensor.view(-1)[-1] += self.rank == self.size - 1
        return made

    unisono.Group.all_reduce = wrong  # type: ignore[method-assign]


PATCHES: dict[str, Callable[[], None]] = {
    "joining deadline": _joining_has_no_deadline,
    "versions": _versions_are_not_compared,
    "memory": _too_large_a_tensor_is_cut,
    "files": _a_failed_join_leaves_a_file_open,
    "leftovers": _a_rank_leaves_memory_behind,
    "results": _one_element_is_wrong,
}

# A cell, by its moment or else its row, and what it needs.
NEEDS = {
    "before joining": "joining deadline",
    "in the handshake": "deadlines",
    "idle": "deaths",
    "in small calls": "deaths",
    "in large calls, shared memory": "deaths",
    "in large calls, ordinary tensors": "deaths",
    "in fused matmuls": "deaths",
    "in calls nobody waits for": "deaths",
    "two": "deaths",
    "rank 0": "deaths",
    "all but one": "deaths",
    "by exit": "deaths",
    "shrink": "deaths",
    "by close": "departures",
    "longer than the deadline": "deadlines",
    "SIGCONT in time": "patience",
    "a rank that is slow": "deadlines",
    "an extra call on one rank": "deadlines",
    "the last call": "deadlines",
    "before other calls": "agreement",
    "op": "agreement",
    "shape": "agreement",
    "dtype": "agreement",
    "reduce op": "agreement",
    "root": "agreement",
    "splits": "agreement",
    "wrong splits": "arguments",
    "memory": "memory",
    "files": "files",
    "kill -9 of all ranks": "leftovers",
    "the child uses the group": "forks",
    "an end with work in flight": "endings",
    "Ctrl-C while waiting": "interrupts",
    "many threads, many groups": "order",
    "a call inside a hook": "results",
    "more than 2³¹ elements": "width",
    "zero elements": "empties",
    "odd tensors": "arguments",
    "1 and 7 ranks": "rest",
    "64 ranks": "results",
    "another version on one rank": "versions",
    "half-open and foreign connections": "strangers",
    "a stopped rank goes on after the others' time-out": "withdrawal",
    "two groups": "cycles",
    "callbacks that sleep, drop the last reference or raise": "callbacks",
    "busy neighbours": "rest",
}


def need_of(fault: str, moment: str) -> str | None:
    """The row's name counts first: several cells may have the same moment."""
    return NEEDS.get(fault) or NEEDS.get(moment)


def switch_off(defence: str) -> None:
    """From now on, in this process."""
    if defence in PATCHES:
        PATCHES[defence]()
    else:
        assert unisono._core.switch_off(defence), defence  # type: ignore[attr-defined]
