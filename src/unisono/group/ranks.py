"""Ranks as a user writes them, one or a list: read and checked here for every function that makes or asks groups."""

from __future__ import annotations

import operator
from typing import Any

from ..base.errors import make_argument_error


def check_rank(argument: str, rank: int, size: int) -> int:
    """A rank of a group of this size."""
    if not 0 <= rank < size:
        raise make_argument_error("rank_range", argument, size - 1, rank)
    return rank


def read_ranks(argument: str, given: Any) -> list[int]:
    """The numbers of a list of ranks, whichever they are."""
    try:
        return [operator.index(rank) for rank in given]
    except TypeError:
        raise make_argument_error("ranks_list", argument, got=given) from None


def different_ranks(argument: str, given: Any, size: int) -> list[int]:
    """A list that names some ranks of a group of this size, none of them twice."""
    ranks = read_ranks(argument, given)
    if not _are_different(ranks) or any(rank >= size for rank in ranks):
        raise make_argument_error("ranks_different", argument, size - 1, ranks)
    return ranks


def numbers_elsewhere(argument: str, given: Any, size: int) -> list[int]:
    """The numbers that all ranks of a group of this size have in another group, whose size is not known."""
    ranks = read_ranks(argument, given)
    if len(ranks) != size or not _are_different(ranks):
        raise make_argument_error("ranks_of_all", argument, size, ranks)
    return ranks


def _are_different(ranks: list[int]) -> bool:
    return len(set(ranks)) == len(ranks) and min(ranks, default=0) >= 0
