"""Every setting of unisono: one line each, read once from the environment when the package is imported.

>>> from unisono import settings
>>> settings.timeout_s > 0
True
"""

from __future__ import annotations

import os
import signal


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper(), 1)
    try:
        return float(text[:-1] if scale != 1 else text) * scale
    except ValueError:
        raise ValueError(f"{name} must be a number (with K, M, G or T behind it if you like), got {text!r}") from None


def _is_on(name: str) -> bool:
    return os.environ.get(name, "0").strip().lower() not in ("", "0", "false", "no", "off")


def _signal(name: str) -> int:
    text = os.environ.get(name, "").strip().upper()
    if not text:
        return 0
    known = {s.name.removeprefix("SIG"): int(s) for s in signal.Signals}
    number = int(text) if text.isdigit() else known.get(text.removeprefix("SIG"), 0)
    if number not in known.values():
        raise ValueError(f"{name} must be a signal such as USR2, got {text!r}")
    return number


#: Seconds a call may take before CollectiveTimeoutError, unless the group or the call says otherwise.
timeout_s: float = _number("UNISONO_TIMEOUT", 300.0)
#: Most bytes of one process's heap, rounded up to a power of two; 0: as much as the machine has. Same on all ranks.
heap_max: int = int(_number("UNISONO_HEAP_MAX", 0))
#: Most bytes of this process's heap in use that a fork copies for the child; what is more becomes ordinary memory.
fork_copy_max: int = int(_number("UNISONO_FORK_COPY_MAX", 256 << 20))
#: New tensors of torch's lie in shared memory, see unisono.share_new_tensors; also for programs that never import it.
share: bool = _is_on("UNISONO_SHARE")
#: The smallest of them, in bytes.
share_min_bytes: int = int(_number("UNISONO_SHARE_MIN_BYTES", 64 << 10))
#: New ones stay ordinary while more bytes than this of the heap are in use; 0: no limit.
share_max_bytes: int = int(_number("UNISONO_SHARE_MAX_BYTES", 0))
#: Microseconds to spin for an answer before giving the processor away; -1: the built-in value.
spin_us: int = int(_number("UNISONO_SPIN", -1))
#: Bytes from which on ranks read each other's ordinary tensors where they are, in one copy by the kernel; 0: never; -1:
#: as measured at first use.
single_copy: int = int(_number("UNISONO_SINGLE_COPY", -1))
#: Kernels: "scalar", "avx2", "avx512" or "avx512_bf16"; empty: the best this CPU has. No reduction depends on it, nor a
#: fused matmul in the tree order; others may in their last bits (docs/fused.md).
isa: str = os.environ.get("UNISONO_ISA", "")
#: A folder for the flight recorder: each rank writes what it last did there when a group fails; empty: nowhere.
trace_dir: str = os.environ.get("UNISONO_TRACE_DIR", "")
#: A signal, by name ("USR2") or number, upon which a process writes the same; needs UNISONO_TRACE_DIR. Empty: none.
trace_signal: int = _signal("UNISONO_TRACE_SIGNAL")
#: "info": tells once, on stderr, what unisono has put in the place of something else.
log: str = os.environ.get("UNISONO_LOG", "").lower()
#: Whether groups that are asked for as "gloo" are unisono's; see serve_gloo.
serve_gloo: bool = _is_on("UNISONO_GLOO")
#: How many Ascend devices unisono.ascend emulates; more if torchrun starts more ranks on this host.
npus: int = int(_number("UNISONO_NPUS", 8))
#: Matrix products of the fused matmuls: "core" or "torch"; empty: by dtype and rows, see fused/gemm.py.
gemm: str = os.environ.get("UNISONO_GEMM", "")
if gemm not in ("", "core", "torch"):
    raise ValueError(f"UNISONO_GEMM must be core, torch or empty, got {gemm!r}")
#: What carries data between hosts: "gloo", "mpi" (mpi4py), or another backend of torch.distributed.
hosts_engine: str = os.environ.get("UNISONO_HOSTS_ENGINE", "").strip().lower() or "gloo"
#: 1: between hosts partial sums of 16-bit types travel as float32, twice the bytes and one rounding in all.
hosts_fp32: bool = bool(_number("UNISONO_HOSTS_FP32", 0))
#: For tests: host numbers by rank, such as 0,0,1,1; ranks of one machine then behave as if they were on several.
pretend_hosts: str = os.environ.get("UNISONO_PRETEND_HOSTS", "").strip()
