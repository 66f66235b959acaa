"""The mutants: wrong versions of the torch backend, one mistake each, and the tests that must notice.

The environment variable UNISONO_MUTANT chooses one. The process that runs the tests hands its name to the ranks
(tests/torch_backend/world.py), which are wrong for the time of a call. `make mutation` goes through all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tests.mutation import wrong
from tests.mutation.wrong import argument_changed, around, instead, op_changed, output_wrong
from unisono import ProcessGroupUnisono
from unisono.base.work import FINISHED, Work
from unisono.torch_backend import adapter as torch_face
from unisono.torch_backend import monitor, refusals, sparse
from unisono.torch_backend.strided import Copies

Test = tuple[str, str, dict[str, Any]]  # module, function, parameters


@dataclass(frozen=True)
class Mutant:
    change: wrong.Change
    tests: tuple[Test, ...]


MUTANTS: dict[str, Mutant] = {}


def chosen() -> str:
    """The name of the mutant that this process was asked for."""
    return os.environ.get("UNISONO_MUTANT", "")


def change_of(name: str) -> wrong.Change | None:
    return MUTANTS[name].change if name else None


def add(name: str, change: wrong.Change, *tests: Test) -> None:
    MUTANTS[name] = Mutant(change, tests)


def values_of(*functions: str) -> tuple[Test, ...]:
    """The value tests of these functions of torch.distributed."""
    return tuple(
        ("test_values", test, {"size": 3, "function": function})
        for function in functions
        for test in ("test_every_dtype_and_op", "test_sizes_places_and_groups")
    )


# --- values of collectives ----------------------------------------------------------------------------------

METHODS = {
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "all_gather_single": "all_gather_single",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all_single",
}
COALESCED = {
    "allreduce_coalesced": "all_reduce, managed",
    "allgather_coalesced": "all_gather_coalesced",
    "all_gather_single_coalesced": "all_gather_single, managed",
    "reduce_scatter_single_coalesced": "reduce_scatter_single, managed",
}
REDUCING = [m for m in METHODS | COALESCED if "reduce" in m]


def _add_values() -> None:
    for method, function in (METHODS | COALESCED).items():
        tests = values_of(function)
        add(f"{method}: off by one", output_wrong(method, wrong.off_by_one), *tests)
        add(f"{method}: last element lost", wrong.last_element_lost(method), *tests)
        add(f"{method}: wrong in async only", output_wrong(method, wrong.one_bit, wrong.in_async), *tests)
        add(f"{method}: wrong in sync only", output_wrong(method, wrong.one_bit, wrong.in_sync), *tests)
        if method != "broadcast":
            add(f"{method}: a rank's part dropped", wrong.part_dropped(method), *tests)
        if method in REDUCING:
            add(f"{method}: op ignored", op_changed(method, {"*": "sum"}), *tests)
            add(f"{method}: avg is sum", op_changed(method, {"avg": "sum"}), *tests)
            add(f"{method}: premul_sum is sum", op_changed(method, {"premul_sum": "sum"}), *tests)
    for method, function in METHODS.items():
        tests = values_of(function)
        add(f"{method}: wrong in subgroups only", output_wrong(method, wrong.one_bit, wrong.in_subgroup), *tests)
        add(f"{method}: wrong in the heap only", output_wrong(method, wrong.one_bit, wrong.in_heap), *tests)
        large = ("test_values", "test_several_mebibytes", {"size": 3, "function": function})
        add(f"{method}: wrong from 1 MiB", output_wrong(method, wrong.one_bit, wrong.when_large), large)
    for method, function in COALESCED.items():
        first_only = argument_changed(method, 0, lambda group, tensors: tensors[:1])
        if method in REDUCING and "scatter" not in method:
            add(f"{method}: only the first tensor", first_only, *values_of(function))
        else:
            add(f"{method}: inputs in another order", argument_changed(method, 1, wrong.rotated), *values_of(function))
    for method in ("reduce", "broadcast", "gather", "scatter"):
        add(f"{method}: wrong root", argument_changed(method, -1, wrong.wrong_root), *values_of(method))
    for op, other in {"min": "max", "band": "bor", "bxor": "bor", "product": "sum", "bor": "band"}.items():
        add(f"allreduce: {op} is {other}", op_changed("allreduce", {op: other}), *values_of("all_reduce"))
    for method in ("allreduce", "reduce"):
        one_rank = output_wrong(method, wrong.one_bit, wrong.on_last_rank)
        add(f"{method}: wrong on one rank only", one_rank, *values_of(METHODS[method]))
    for method in ("allgather", "all_gather_single", "alltoall", "all_to_all_single"):
        mixed_up = output_wrong(method, wrong.parts_rotated)
        add(f"{method}: parts in another order", mixed_up, *values_of(METHODS[method]))
    for method in ("reduce_scatter", "reduce_scatter_single", "scatter"):
        next_part = argument_changed(method, 1, wrong.rotated)
        add(f"{method}: the next rank's part", next_part, *values_of(METHODS[method]))
    for method in ("allgather", "alltoall"):
        uneven = output_wrong(method, wrong.one_bit, wrong.when_uneven)
        add(f"{method}: wrong with unequal sizes only", uneven, *values_of(METHODS[method]))


_add_values()


# --- messages, sparse, objects, strides ---------------------------------------------------------------------


def _message_off_by_one(right: Callable[..., Any]) -> Callable[..., Any]:
    def send(self: Any, tensors: Any, dst: int, tag: int = 0) -> Work:
        sent = [t.clone() for t in tensors]
        wrong.off_by_one(sent)
        work: Work = right(self, sent, dst, tag)
        return work

    return send


def _sum_without_last_rank(right: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(group: Any, tensor: Any, op: Any) -> Any:
        return right(group, tensor.mul_(0) if group.rank == group.size - 1 else tensor, op)

    return all_reduce


def _not_in_place(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda group, tensor, op: right(group, tensor.clone(), op)


RING = ("test_send_recv", "test_ring", {"size": 3, "blocking": False})
TAGS = ("test_send_recv", "test_tags", {"size": 2})
ANY_SOURCE = ("test_send_recv", "test_any_source", {"size": 3})
OBJECTS = ("test_objects", "test_objects", {"size": 3})
STRIDES = ("test_strided", "test_strides", {"size": 2, "place": "gaps"})

add("send: off by one", around("send", _message_off_by_one), RING)
add("send: last element lost", wrong.last_element_lost("recv"), RING)
add("tags are ignored", argument_changed("_message", 4, lambda group, tag: 0), TAGS)
add("recv: source ignored", instead(ProcessGroupUnisono, "recv", lambda self, tensors, src, tag=0:
    self.recv_anysource(tensors, tag)), ("test_send_recv", "test_batch_isend_irecv", {"size": 3}))  # fmt: skip
add("recv: wrong source is told", instead(Work, "_source_rank", lambda self: 0), ANY_SOURCE)
add("sparse: a rank's part dropped", around("all_reduce", _sum_without_last_rank, sparse),
    ("test_sparse", "test_sums", {"size": 3, "async_op": False}))  # fmt: skip
add("sparse: not in place", around("all_reduce", _not_in_place, sparse), ("test_sparse", "test_in_place", {"size": 2}))
add("objects: off by one", output_wrong("broadcast", wrong.off_by_one), OBJECTS)
add("objects: a rank's part dropped", wrong.part_dropped("allgather"), OBJECTS)
add("strides: nothing is written back", instead(Copies, "write_back", lambda self: None), STRIDES)


# --- handles ------------------------------------------------------------------------------------------------


def states_of(*names: str) -> tuple[Test, ...]:
    from tests.torch_backend import test_work

    numbers = [i for i, f in enumerate(test_work.FUNCTIONS) if f.__name__ in names]
    return tuple(("test_work", "test_states", {"size": 2, "which": i}) for i in numbers)


def _end_of_nothing(self: Any, device: Any) -> Work:
    self._batch = None
    return Work((), [])


STATES = states_of("_all_reduce")
ERRORS = ("test_work", "test_errors", {"size": 2})
FUTURE = ("test_work", "test_future", {"size": 2})
add("Work.wait: does not wait", instead(Work, "wait", lambda self, *timeout: True), *STATES)
add("Work.wait: knows no limit", around("wait", lambda right: lambda self, *timeout: right(self), Work), *STATES)
add("Work.wait: returns None", around("wait", lambda right: lambda self, *t: right(self, *t) and None, Work), *STATES)
add("Work.is_completed: always", instead(Work, "is_completed", lambda self: True), *STATES)
add("Work.is_success: always", instead(Work, "is_success", lambda self: True), ERRORS)
add("Work.is_success: as soon as it began", instead(Work, "is_success", lambda self: self.exception() is None), *STATES)
add("Work.exception: never", instead(Work, "exception", lambda self: None), ERRORS)
add("Work.result: something else", instead(Work, "result", lambda self: []), *STATES)
add("Work.get_future: hides errors", instead(Work, "_result_or_raise", lambda self: self._outputs), ERRORS)
add("Work.get_future: holds nothing", around("_result_or_raise", lambda right: lambda self: right(self) and [], Work),
    *STATES)  # fmt: skip
add("Work.get_future: over at once", around("get_future", lambda right: lambda self:
    right(Work((), self._outputs)), Work), FUTURE)  # fmt: skip
add("_end_coalescing: forgets what it began", instead(ProcessGroupUnisono, "_end_coalescing", _end_of_nothing),
    ("test_values", "test_a_managed_batch_waits", {"size": 2}))  # fmt: skip
add("the profiler sees nothing", instead(torch_face, "_profiling", lambda: False), ("test_work", "test_profiler", {}))


# --- groups, barriers, time limits --------------------------------------------------------------------------


def _no_limit(right: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, verb: str, arguments: Any, opts: Any, *rest: Any, **options: Any) -> Any:
        opts.timeout = torch_face._UNSET
        return right(self, verb, arguments, opts, *rest, **options)

    return run


def _sorted(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, ranks, *args, **options: right(self, sorted(ranks), *args, **options)


def _long_limit(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, ranks, timeout=None, *args, **options: right(self, ranks, None, *args, **options)


def limits_of(*names: str) -> tuple[Test, ...]:
    from tests.torch_backend import test_groups

    numbers = [i for i, f in enumerate(test_groups.LIMITS) if f.__name__ in names]
    return tuple(("test_groups", "test_time_limits", {"which": i}) for i in numbers)


BARRIERS = ("test_groups", "test_barriers", {"size": 3})
MISSING = ("test_groups", "test_a_monitored_barrier_names_who_is_missing", {"size": 4, "wait_all_ranks": True})
SPLIT = ("test_groups", "test_split_group", {"size": 3})
add("barrier: does nothing", instead(ProcessGroupUnisono, "barrier", lambda self, *args, **options: FINISHED), BARRIERS)
add("monitored_barrier: does nothing", instead(monitor, "barrier", lambda *args, **options: None), BARRIERS)
add("monitored_barrier: names one only", around("barrier", lambda right: lambda group, limit_s, all_ranks, tag:
    right(group, limit_s, False, tag), monitor), MISSING)  # fmt: skip
add("split_group: sorts", around("split_group", _sorted), SPLIT)
add("split_group: no time limit", around("split_group", _long_limit), *limits_of("_by_split"))
add("abort: does nothing", instead(ProcessGroupUnisono, "abort", lambda self: None),
    ("test_groups", "test_abort", {"how": "method"}))  # fmt: skip
add("set_timeout: does nothing", instead(ProcessGroupUnisono, "set_timeout", lambda self, timeout: None),
    *limits_of("_by_set_timeout"))  # fmt: skip
add("a call's time limit is ignored", around("_run", _no_limit), *limits_of("_by_options"))
add("a sync call's time limit is ignored", around("_run", _no_limit), *limits_of("_by_sync_options"))
add("shutdown: does nothing", instead(ProcessGroupUnisono, "shutdown", lambda self: None),
    ("test_groups", "test_groups_come_and_go", {}))  # fmt: skip


# --- bad input ----------------------------------------------------------------------------------------------


def _own_words(name: str, arguments: Any, error: Exception) -> Exception:
    return error


def _no_complaints(right: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *arguments: Any) -> Any:
        try:
            return right(self, *arguments)
        except dist.DistBackendError:
            return FINISHED

    return run


GLOO = ("test_bad_input", "test_gloo_refuses_it_in_the_same_class_and_words", {"size": 2})
DISAGREE = ("test_bad_input", "test_ranks_that_disagree_get_a_line_for_each", {"size": 2, "group_name": "world"})
add("refusals: in the core's words", instead(refusals, "refusal", _own_words), GLOO)
add("mismatch: nobody is told", around("_run", _no_complaints), DISAGREE)
