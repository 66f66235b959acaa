"""vLLM's communicator for CPU ranks, with the calls of different sizes that mixture-of-experts models need.

vLLM loads :func:`register` by the entry point ``vllm.general_plugins`` in every process. Its own communicator for CPUs
has no ``all_gatherv`` and ``reduce_scatterv``; everything else stays vLLM's. Needs no unisono group: the calls work on
the groups that vLLM makes, which are gloo's, or unisono's under ``unisono run``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.platforms import current_platform

from . import rows


class Communicator(CpuCommunicator):  # type: ignore[misc]
    """vLLM's CpuCommunicator with uneven gathers and reduce-scatters."""

    def all_gatherv(
        self, input_: Tensor | list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Tensor | list[Tensor]:
        """See :func:`unisono.serving.rows.all_gatherv`."""
        return rows.all_gatherv(self.device_group, input_, dim, sizes)

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """See :func:`unisono.serving.rows.reduce_scatterv`."""
        return rows.reduce_scatterv(self.device_group, input_, dim, sizes)


def register() -> None:
    """Has vLLM's CPU platform use :class:`Communicator`; does nothing on others."""
    if current_platform.is_cpu():
        name = f"{Communicator.__module__}.{Communicator.__qualname__}"
        type(current_platform).get_device_communicator_cls = classmethod(lambda cls: name)
