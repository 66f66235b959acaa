"""Keeps torch.compile away from functions that torch's C++ calls.

While a compiled function runs, dynamo looks at every Python frame that begins, also at one that C++ begins deep inside:
DDP's reducer asking the group for a broadcast. It would compile our methods, and fails at the process group in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._dynamo import eval_frame

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def keep_uncompiled(*what: type | Callable[..., Any]) -> None:
    """Has these functions, or all methods of these classes, and what they call, run as they are, always."""
    for thing in what:
        for member in vars(thing).values() if isinstance(thing, type) else (thing,):
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            code = getattr(function, "__code__", None)
            if code is not None:
                eval_frame.set_code_exec_strategy(code, _SKIP)
