"""What unisono raises, and how a failure in the core becomes one of these.

Errors of a group: programs read ``.op``, ``.seq``, ``.group``, ``.rank`` and ``.peers``; people read the text: type, op
and number, group, one fact, then a line per rank where ranks differ. All derive from torch's ``DistBackendError``, so
an ``except`` clause written for torch.distributed catches them.

Errors in arguments are ``TypeError`` and ``ValueError``, raised before anything is sent: programs read ``.rule``,
``.argument``, ``.expected`` and ``.got``. The core hands them over as data; their English is in the table ``_RULES``.
What the adapters refuse in the words of other libraries (torch_npu, MindSpore, MindSpeed) has those only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed import DistBackendError


class UnisonoError(DistBackendError):
    """Base of all errors of a group. ``peers`` are the ranks it is about."""

    op: str = ""
    seq: int = 0
    group: str = ""
    rank: int = -1
    peers: tuple[int, ...] = ()


class MismatchError(UnisonoError):
    """Ranks made calls that do not fit together. Nothing was moved and the group can still be used."""


class PeerLostError(UnisonoError):
    """A rank died or left while others needed it."""


class CollectiveTimeoutError(UnisonoError, TimeoutError):
    """A call did not end before its deadline."""


class AbortedError(UnisonoError):
    """The group was given up, by this rank or by another."""


class ClosedError(UnisonoError):
    """The group was closed on this rank."""


class ForkedError(UnisonoError):
    """A group was used in a child of the process that made it."""


class HeapMemoryError(UnisonoError, MemoryError):
    """The heap cannot grow: too little memory on the machine or in its cgroup."""


class SystemCallError(UnisonoError):
    """The operating system refused something, or shared memory holds something impossible."""


class DeadlockError(UnisonoError):
    """Ranks wait for each other in a cycle over several groups, so that no call of it can ever end."""


class ArgumentError(Exception):
    """An argument that a function refuses: ``rule`` is a key of ``_RULES`` and says which requirement it breaks."""

    rule: str = ""
    argument: str = ""
    expected: Any = None
    got: Any = None


class ArgumentValueError(ArgumentError, ValueError):
    """An argument of the right type with a wrong value."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a wrong type, or with a wrong dtype."""


# Rule -> text. The first block is in the order of `Rule` in core/python/errors.h, where the core picks one.
_RULES: dict[str, str] = {
    "whole_number": "{argument} must be a whole number, got {got!r}",
    "not_negative": "{argument} must not be negative, got {got}",
    "rank_range": "{argument} must be a rank from 0 to {expected}, got {got}",
    "another_rank": "{argument} must be another rank than this one, {got}",
    "list_length": "{argument} must have one tensor per rank: expected {expected}, got {got}",
    "list_dtype": "{argument} has dtype {got}, the first has {expected}",
    "divides": "{argument} has {got} elements, which do not divide into {expected} equal parts; give '{other}'",
    "rows_divide": (  # MindSpore's words: only its functions leave the rows of a result to the transport
        "the first dimension for 'input_shape' must be divided by 'rank_size', "
        "but got input_shape[0]: {got}, rank_size: {expected}"
    ),
    "shape": "{argument} must be a shape of at most 64 sizes, got {got!r}",
    "counts_sequence": "{argument} must be a sequence of whole numbers, got {got!r}",
    "counts_length": "{argument} must have one number of elements per rank: expected {expected}, got {got}",
    "counts_negative": "{argument} must be elements, 0 or more for each rank: got {got} for rank {index}",
    "counts_sum": "{argument} must add up to the {expected} elements of '{other}', got {got!r}",
    "dtype_of": "{argument} must have the dtype of '{other}', {expected}, got {got}",
    "size_of": "{argument} must have as many elements as '{other}': expected {expected}, got {got}",
    "part_size": (
        "{argument} must have as many elements as this rank's part of '{other}': expected {expected}, got {got}"
    ),
    "own_part_size": (
        "{argument} must have as many elements from this rank as '{other}' has for it: expected {expected}, got {got}"
    ),
    "overlap": "{argument} must not overlap '{other}'",
    "overlap_partly": "{argument} overlaps '{other}' partly; give the same memory or memory apart",
    "overlap_part": "{argument} overlaps '{other}' and is not exactly this rank's part of it",
    "op_name": "{argument} must be one of {expected}, or a torch ReduceOp, got {got!r}",
    "op_dtype": "{argument}: {got} is not defined for {expected}",
    "factor_missing": "{argument} must be given for op 'premul_sum'",
    "factor_foreign": "{argument} belongs to op 'premul_sum', got op {got!r}",
    "timeout_number": "{argument} must be a number of seconds, got {got!r}",
    "timeout_positive": "{argument} must be positive, got {got:f}",
    "not_tensor": "{argument} must be a torch.Tensor, got {got}",
    "dense": "{argument} must be a dense CPU tensor, got device {got[0]}, layout {got[1]}, dtype {got[2]}",
    "device": "{argument} must be on the CPU, got device {got}",
    "dtype_known": "{argument} has dtype {got}, which unisono does not know",
    "contiguous": "{argument} must be contiguous, got shape {got[0]} with strides {got[1]}",
    "lazy": "{argument} is a lazily conjugated or negated view; call resolve_conj() or resolve_neg() first",
    "no_memory": "{argument} has no memory (a fake or meta tensor)",
    "matrix": "{argument} must be a CPU matrix of float16, bfloat16 or float32",
    "like": "{argument} must have the dtype and the number of elements of '{other}'",
    "inputs_and_factors": "{argument} must have at least one tensor, and '{other}' a number for each",
    "float32_size": "{argument} must be float32 of {expected} elements, got {got}",
    "matrix_size": "{argument} must be a matrix of {expected}, got {got}",
    "own_elements": "{argument} must have the {expected} elements this rank gets, got {got}",
    "shared": "{argument} is not in this process's shared memory",
    "outside_heap": "{argument} lies outside of that rank's heap, got {got}",
    "group_size": "a group has 1 to {expected} ranks, a name for each and a nonce of 16 bytes",
    # Broken in Python.
    "ranks_list": "{argument} must be a list of ranks, got {got!r}",
    "ranks_different": "{argument} must be different ranks from 0 to {expected}, got {got}",
    "ranks_of_all": "{argument} must be {expected} different ranks, got {got}",
    "ranks_with_own": "{argument} must contain this rank, {expected}, got {got}",
    "sparse_op": "allreduce of sparse tensors only works with ReduceOp.SUM, got {got}",
    "sparse_layout": "all_reduce takes dense and sparse COO tensors, got layout {got}",
    "tag_negative": "Tag must be nonnegative",
}

# The rules whose breach is an ArgumentTypeError; of all others it is an ArgumentValueError.
_TYPE_RULES = {
    "whole_number",
    "list_dtype",
    "counts_sequence",
    "dtype_of",
    "op_dtype",
    "timeout_number",
    "not_tensor",
    "ranks_list",
    "dtype_known",
    "matrix",
}


def make_argument_error(
    rule: str, argument: str, expected: Any = None, got: Any = None, other: str = "", index: int = -1
) -> ArgumentError:
    """Builds the exception for an argument that breaks a rule.

    ``other`` is another argument the rule is about, ``index`` a place in a list.
    """
    kind = ArgumentTypeError if rule in _TYPE_RULES else ArgumentValueError
    listed = ", ".join(expected) if isinstance(expected, list) else expected
    named = f"argument '{argument}'"
    text = _RULES[rule].format(argument=named, expected=listed, got=got, other=other, index=index)
    error = kind(text + _in_elements(expected, got) if rule == "counts_sum" else text)
    error.rule, error.argument, error.expected, error.got = rule, argument, expected, got
    return error


def _in_elements(elements: int, counts: Any) -> str:
    """What to pass instead of rows per rank, if that is what the counts look like."""
    rows = sum(counts) if isinstance(counts, (list, tuple)) else 0
    if rows <= 0 or elements % rows:
        return ""
    row = elements // rows
    return f"\n  counts are elements, not rows: for rows of {row} pass {[n * row for n in counts]}"


Failure = TypeVar("Failure", bound=UnisonoError)


def with_facts(error: Failure, op: str, group: str, rank: int, peers: Iterable[int]) -> Failure:
    """An error of a group made in Python, with what programs read of it."""
    error.op, error.group, error.rank, error.peers = op, group, rank, tuple(peers)
    return error


def lines_of_ranks(lines: Mapping[int, str]) -> str:
    """What every rank wanted, a line each; those that differ from most are marked."""
    usual, _ = Counter(lines.values()).most_common(1)[0]
    return "".join(f"\n  rank {r}   {line}" + ("" if line == usual else "   <- differs") for r, line in lines.items())


# In the order of `Code` in core/base/status.h.
_BY_CODE: tuple[type[UnisonoError], ...] = (
    UnisonoError,
    MismatchError,
    PeerLostError,
    CollectiveTimeoutError,
    AbortedError,
    AbortedError,
    ClosedError,
    ForkedError,
    HeapMemoryError,
    UnisonoError,
    SystemCallError,
    DeadlockError,
)


def make_error(
    code: int,
    op: str,
    seq: int,
    group: str,
    rank: int,
    peers: Sequence[int],
    text: str,
    lines: Sequence[str],
    first_cause: bool,
) -> UnisonoError:
    """Builds the exception for a failure of the core; called by ``_core`` only."""
    kind = _BY_CODE[code]
    if rank < 0:
        head = text
    elif seq == 0:
        head = f'group "{group}": {text}'
    else:
        head = f'{op} #{seq} in group "{group}": {text}'
    if first_cause and kind is not ClosedError and kind is not ForkedError:
        head += "\n  the group was given up by this error; make a new group to go on"
    if kind is MismatchError and lines:
        for r, line in enumerate(lines):
            head += f"\n  rank {r}   {line}" + ("   <- differs" if r in peers else "")
    else:
        for line in lines:
            head += "\n  " + line
    error = kind(head)
    error.op, error.seq, error.group, error.rank, error.peers = op, seq, group, rank, tuple(peers)
    return error
