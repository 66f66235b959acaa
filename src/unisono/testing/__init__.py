"""Run a function on several ranks, each a process of its own, and get the results back.

    >>> import torch
    >>> from unisono.testing import RankPool, run_ranks
    >>> def double(group, x):
    ...     t = torch.full((4,), x)
    ...     group.all_reduce(t)
    ...     return t.tolist()
    >>> run_ranks(2, double, 21.0)
    [[42.0, 42.0, 42.0, 42.0], [42.0, 42.0, 42.0, 42.0]]

Nothing here waits for ever: a run that is not over by its deadline is ended, and the error shows where each
rank stood. No process, file or folder outlives a run, but for the fork server: one idle process, forked from so
that ranks need not import torch again, which ends with this process or by `stop_fork_server()`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Literal, TypeVar, overload

from unisono.testing.processes import ForkServer, RankFailure, Ranks

__all__ = ["RankFailure", "RankPool", "RanksFailed", "run_ranks", "stop_fork_server"]

T = TypeVar("T")


class RanksFailed(Exception):
    """At least one rank failed: `failures` has a `RankFailure` for each, `results` what others returned."""

    def __init__(self, size: int, failures: dict[int, RankFailure], results: dict[int, Any]) -> None:
        self.failures = failures
        self.results = results
        lines = [f"{len(failures)} of {size} ranks failed"]
        lines += [str(failures[rank]) for rank in sorted(failures)]
        super().__init__("\n\n".join(lines))


@overload
def run_ranks(
    n: int,
    fn: Callable[..., T],
    *args: Any,
    timeout_s: float = ...,
    grace_s: float = ...,
    group_timeout_s: float | None = ...,
    num_threads: int = ...,
    env: Mapping[str, str] | None = ...,
    check: Literal[True] = ...,
) -> list[T]: ...
@overload
def run_ranks(
    n: int,
    fn: Callable[..., T],
    *args: Any,
    timeout_s: float = ...,
    grace_s: float = ...,
    group_timeout_s: float | None = ...,
    num_threads: int = ...,
    env: Mapping[str, str] | None = ...,
    check: bool,
) -> list[T | RankFailure]: ...
def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float = 10.0,
    group_timeout_s: float | None = None,
    num_threads: int = 1,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[Any]:
    """Call `fn(group, *args)` on `n` new ranks and return what each of them returned, by rank.

        >>> def number(group):
        ...     return group.rank
        >>> run_ranks(2, number)
        [0, 1]

    `fn`, `args` and the results travel by pickle, so `fn` is a function at the top level of a module; one typed into a
    notebook or at the prompt goes by value, if cloudpickle is installed (`pip install "unisono[notebook]"`). A rank
    starts with this process's environment, folder, import path, stdout and stderr, and an empty
    stdin.

    If ranks fail, `RanksFailed` shows every rank's traceback, exit code or signal.

    Args:
        n: how many ranks
        fn: called on every rank with its group and `args`
        *args: the same on every rank
        timeout_s: the whole run ends after that
        grace_s: how long the others have to end by themselves after the first failure
        group_timeout_s: the limit of the group's calls; None: three quarters of `timeout_s`
        num_threads: threads of torch in a rank
        env: environment variables on top of this process's
        check: False: no `RanksFailed`; a `RankFailure` stands in a failed rank's place in the list

    Returns:
        What `fn` returned, by rank.
    """
    call = _pickle_call(fn, args)
    group_timeout_s = 0.75 * timeout_s if group_timeout_s is None else group_timeout_s
    return _run_once(Ranks(n, group_timeout_s, num_threads, env), call, timeout_s, grace_s, check)


class RankPool:
    """`n` ranks that stay, for many short calls: a run costs a message each way instead of a start.

        >>> import torch
        >>> def total(group, x):
        ...     t = torch.tensor([x])
        ...     group.all_reduce(t)
        ...     return t.item()
        >>> with RankPool(2) as pool:
        ...     pool.run(total, 1.0), pool.run(total, 2.0)
        ([2.0, 2.0], [4.0, 4.0])

    The ranks start at the first run and share one group. After a run in which any rank failed, or
    when one died in between, all of them are ended, and the next run starts new ones.
    """

    def __init__(
        self, n: int, *, group_timeout_s: float = 60.0, num_threads: int = 1, env: Mapping[str, str] | None = None
    ) -> None:
        self.size = n
        self._start: Callable[[], Ranks] = partial(Ranks, n, group_timeout_s, num_threads, env)
        self._ranks: Ranks | None = None

    def run(
        self, fn: Callable[..., T], *args: Any, timeout_s: float = 60.0, grace_s: float = 10.0, own_group: bool = False
    ) -> list[T]:
        """Call `fn(group, *args)` on every rank; as `run_ranks`, on the pool's group.

        With `own_group=True` the call gets a group of its own, closed after it: for calls that leave their
        group unusable.
        """
        call = _pickle_call(fn, args)
        if self._ranks is not None and self._ranks.any_ended():
            self.close()
        if self._ranks is None:
            self._ranks = self._start()
        try:
            return _check_results(self._ranks.call(call, timeout_s, grace_s, last=False, own_group=own_group))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks; the next run would start new ones."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def stop_fork_server() -> None:
    """End the process that ranks are forked from, and ranks that still run; the next run starts a new one."""
    ForkServer.stop()


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return _dumps_of(fn)((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"fn and its arguments go to the ranks by pickle, which failed: {error}\n"
            "  Define fn at the top level of a module, not as a lambda or inside a function, and pass "
            "what it needs as arguments."
        ) from error


def _dumps_of(fn: Callable[..., Any]) -> Callable[[Any], bytes]:
    """pickle's dumps; cloudpickle's for a function that lies in no file a rank could import: a notebook's, say."""
    code = getattr(fn, "__code__", None)
    if code is not None and not os.path.exists(code.co_filename):
        try:
            import cloudpickle
        except ImportError:
            pass  # the rank says that it cannot import the function, and what helps
        else:
            return cloudpickle.dumps  # type: ignore[no-any-return]
    return pickle.dumps


def _run_once(ranks: Ranks, call: bytes, timeout_s: float, grace_s: float, check: bool) -> list[Any]:
    """One call on ranks that end with it."""
    with closing(ranks):
        results = ranks.call(call, timeout_s, grace_s, last=True, own_group=False)
    for rank in ranks.ranks:
        if rank.exit_code != 0 and not isinstance(results[rank.number], RankFailure):
            results[rank.number] = rank.describe_end("after it answered")
    return _check_results(results) if check else results


def _check_results(results: list[Any]) -> list[Any]:
    failures = {rank: result for rank, result in enumerate(results) if isinstance(result, RankFailure)}
    if failures:
        raise RanksFailed(len(results), failures, {rank: r for rank, r in enumerate(results) if rank not in failures})
    return results
