"""SGLang's GroupCoordinator with the gathers and reduce-scatters that unisono's plug-in gives it for CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.plugins import load_plugins

from tests.clients.case import Case, batch

ENVIRONMENT = "sglang"
# SGLang's wheel is for CUDA; without its dependencies, and with those that parallel_state imports, it is enough.
PIP_OPTIONS = ["--no-deps"]
REQUIREMENTS = ["sglang==0.5.23"]
BESIDE = [
    "numpy", "requests", "psutil", "pydantic", "transformers==5.19.0", "orjson", "pybase64", "triton", "pillow",
    "fastapi", "starlette", "msgspec", "pyzmq", "ipython", "aiohttp", "tqdm", "setproctitle", "apache-tvm-ffi==0.1.11",
]  # fmt: skip
PROBE = "from sglang.srt.distributed import parallel_state"
SHOWN = ["sglang"]
BY_NAME = False
RANKS = (2, 3)
VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1"}


def uneven(case: Case) -> Any:
    """What MoE with data-parallel attention calls, which SGLang has for NCCL only."""
    case.begin()
    load_plugins()
    rank, size = dist.get_rank(), dist.get_world_size()
    gpus = dict.fromkeys(["use_pynccl", "use_custom_allreduce", "use_mscclpp", "use_torch_symm_mem_allreduce"], False)
    group = parallel_state.init_model_parallel_group([list(range(size))], rank, "gloo", group_name="tp", **gpus)
    case.confirm(group.cpu_group)
    found = []
    for sizes in ([500, 1, 256], [0, 3, 0], [4, 4, 4]):
        sizes = sizes[:size]
        parts = [batch(r, 0, 64, sizes[r]) for r in range(size)]
        mine, ids = parts[rank], torch.full((sizes[rank], 8), rank, dtype=torch.int32)
        gathered = group.all_gatherv([mine, ids, mine.bfloat16()], sizes=sizes)
        assert torch.equal(gathered[0], torch.cat(parts)) and gathered[1].dtype == torch.int32
        output = torch.empty(sum(sizes), 64)
        group.all_gatherv(mine, sizes=sizes, output=output)
        assert torch.equal(output, gathered[0])
        part = torch.empty(sizes[rank], 64)
        group.reduce_scatterv(output, output=part, sizes=sizes)
        assert torch.equal(part, size * mine)
        found += [*gathered, part, group.reduce_scatterv(output, sizes=sizes)]
    sizes = [500, 1, 256][:size]
    tokens, logits = batch(rank, 0, 512, sizes[rank]), batch(rank, 0, 16, sizes[rank])

    def step() -> None:
        both = group.all_gatherv([tokens, logits], sizes=sizes)
        group.reduce_scatterv(both[0], sizes=sizes)

    case.time(step, 20)
    return {"found": found}


CASES = {"all_gatherv and reduce_scatterv, tokens 500, 1, 256": uneven}
