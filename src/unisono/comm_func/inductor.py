"""Tells torch's compiler, inductor, to keep collectives in their order.

The operators have an ordered effect, which keeps them from being left out. In torch 2.13 it does not keep their order:
the lowering notes "after the previous one" under the name of a buffer, the scheduler looks under the name of an
operation, so nothing is found, and calls that do not depend on each other may change places, on one rank and not on
another. ``EffectfulKernel`` depends on its predecessor by itself; here the operators are lowered to that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

_taught = False


def teach(operators: Iterable[Any]) -> None:
    """Registers the lowerings, once inductor is loaded; called while a graph is traced, before it is lowered."""
    global _taught
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if _taught or lowering is None or not hasattr(lowering, "register_lowering"):
        return
    _taught = True
    for operator in operators:
        overload = operator._opoverload
        lowering.register_lowering(overload, type_promotion_kind=None)(_in_order(overload))


def _in_order(overload: Any) -> Callable[..., Any]:
    def lower(*arguments: Any) -> Any:
        from torch._inductor import ir

        made = ir.EffectfulKernel.create(overload, *arguments)
        return torch.utils._pytree.tree_map_only(ir.IRNode, ir.TensorBox.create, made)

    return lower
