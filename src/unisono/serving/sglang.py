"""SGLang's gathers and reduce-scatters of different sizes for CPU tensors, which it has for NCCL only.

SGLang loads :func:`register` by the entry point ``sglang.srt.plugins`` and applies what it registers. Tensors on other
devices go SGLang's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from . import rows

GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"


def all_gatherv(
    original: Callable[..., Any],
    coordinator: Any,
    input_: Tensor | list[Tensor],
    sizes: Sequence[int] | None = None,
    output: Tensor | None = None,
) -> Any:
    """SGLang's all_gatherv, around its own; see :func:`unisono.serving.rows.all_gatherv`."""
    if not _on_cpu(input_):
        return original(coordinator, input_, sizes, output)
    return rows.check_output(output, rows.all_gatherv(coordinator.cpu_group, input_, 0, sizes))


def reduce_scatterv(
    original: Callable[..., Any],
    coordinator: Any,
    input_: Tensor,
    output: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> Any:
    """SGLang's reduce_scatterv, around its own; see :func:`unisono.serving.rows.reduce_scatterv`."""
    if not _on_cpu(input_):
        return original(coordinator, input_, output, sizes)
    return rows.check_output(output, rows.reduce_scatterv(coordinator.cpu_group, input_, 0, sizes))


def register() -> None:
    """Registers both with SGLang, which puts them into its GroupCoordinator."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in (all_gatherv, reduce_scatterv):
        HookRegistry.register(f"{GROUP}.{hook.__name__}", hook, HookType.AROUND)


def _on_cpu(input_: Tensor | list[Tensor]) -> bool:
    tensor = input_ if isinstance(input_, Tensor) else input_[0]
    return tensor.device.type == "cpu"
