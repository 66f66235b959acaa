"""Every setting of unisono: one line each, read once from the environment when the package is imported.

>>> from unisono import settings
>>> settings.timeout_s > 0
True
"""

from __future__ import annotations

import os


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper(), 1)
    try:
        return float(text[:-1] if scale != 1 else text) * scale
    except ValueError:
        raise ValueError(f"{name} must be a number (with K, M, G or T behind it if you like), got {text!r}") from None


#: Seconds a call may take before CollectiveTimeoutError, unless the group or the call says otherwise.
timeout_s: float = _number("UNISONO_TIMEOUT", 300.0)
#: Most bytes of one process's heap, rounded up to a power of two; 0: as much as the machine has. Same on all ranks.
heap_max: int = int(_number("UNISONO_HEAP_MAX", 0))
#: Most bytes of this process's heap in use that a fork copies, so that the child keeps them as they were.
fork_copy_max: int = int(_number("UNISONO_FORK_COPY_MAX", 256 << 20))
#: Microseconds to spin for an answer before giving the processor away; -1: the built-in value.
spin_us: int = int(_number("UNISONO_SPIN", -1))
#: Reduction kernels: "scalar", "avx2" or "avx512"; empty: the best this CPU has. Results do not depend on it.
isa: str = os.environ.get("UNISONO_ISA", "")
#: How many Ascend devices unisono.ascend emulates; more if torchrun starts more ranks on this host.
npus: int = int(_number("UNISONO_NPUS", 8))
#: Matrix products of the fused matmuls: "core" or "torch"; empty: by dtype and rows, see fused/gemm.py.
gemm: str = os.environ.get("UNISONO_GEMM", "")
if gemm not in ("", "core", "torch"):
    raise ValueError(f"UNISONO_GEMM must be core, torch or empty, got {gemm!r}")
