"""vLLM's parallel_state with the communicator that unisono's plug-in gives its CPU platform."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from tests.clients.case import Case, batch

ENVIRONMENT = "vllm"
# vLLM's wheel is for CUDA; without its dependencies, and with those that parallel_state imports, it is enough.
PIP_OPTIONS = ["--no-deps"]
REQUIREMENTS = ["vllm==0.32.0"]
BESIDE = [
    "numpy<2.4", "regex", "cachetools", "psutil", "transformers>=5.16.1,<5.20", "pydantic", "pyzmq", "msgspec",
    "cloudpickle", "py-cpuinfo", "pillow", "einops", "pybase64", "cbor2", "setproctitle", "openai", "fastapi",
    "aiohttp", "blake3", "prometheus_client", "sentencepiece", "tiktoken", "compressed-tensors==0.17.0",
    "depyf==0.20.0", "ijson", "diskcache", "opentelemetry-api", "opentelemetry-sdk", "watchfiles", "python-json-logger",
    "partial-json-parser", "jsonschema", "mistral_common", "gguf", "lark==1.2.2", "llguidance", "numba==0.65.0",
    "protobuf", "anthropic", "oss-harmony", "lm-format-enforcer==0.11.3", "outlines_core==0.2.14", "mcp", "uvloop",
    "uvicorn", "xgrammar",
]  # fmt: skip
SHOWN = ["vllm"]
BY_NAME = False
RANKS = (2, 3)
VARIABLES = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}


def _group(case: Case, name: str) -> Any:
    load_general_plugins()
    assert current_platform.is_cpu()
    rank, size = dist.get_rank(), dist.get_world_size()
    group = parallel_state.init_model_parallel_group([list(range(size))], rank, "gloo", group_name=name)
    case.confirm(group.device_group)
    assert type(group.device_communicator).__module__ == "unisono.serving.vllm"
    return group


def coordinator(case: Case) -> Any:
    """What vLLM's GroupCoordinator had before."""
    case.begin()
    group = _group(case, "tp")
    x = batch(dist.get_rank(), 0, 512, 4)
    found = [group.all_reduce(x.clone()), group.all_gather(x, 0), group.all_gather(x, 1), group.broadcast(x.clone(), 1)]
    objects = group.broadcast_object({"rank": dist.get_rank()}, 0)
    case.time(lambda: group.all_reduce(x), 30)
    return {"found": found, "objects": objects}


def uneven(case: Case) -> Any:
    """What MoE with data parallelism needs: different numbers of tokens, also none, several tensors in one call."""
    case.begin()
    group = _group(case, "dp")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for sizes in ([500, 1, 256], [0, 3, 0], [4, 4, 4]):
        sizes = sizes[:size]
        whole = [batch(r, 0, 64, sizes[r]) for r in range(size)]
        hidden, ids = whole[rank], torch.full((sizes[rank], 8), rank, dtype=torch.int32)
        gathered = group.all_gatherv([hidden, ids, hidden.bfloat16()], 0, sizes)
        assert torch.equal(gathered[0], torch.cat(whole)) and gathered[1].dtype == torch.int32
        assert torch.equal(group.all_gatherv(hidden.t(), 1, sizes), torch.cat(whole).t())
        part = group.reduce_scatterv(gathered[0], 0, sizes)
        assert torch.equal(part, size * hidden)
        aside = group.reduce_scatterv(gathered[0].t().contiguous(), -1, sizes)
        assert torch.equal(aside, part.t())
        found += [*gathered, part]
    even = group.all_gatherv(batch(rank, 1, 8, 2))
    sizes = [500, 1, 256][:size]
    tokens, logits = batch(rank, 0, 512, sizes[rank]), batch(rank, 0, 16, sizes[rank])

    def step() -> None:
        both = group.all_gatherv([tokens, logits], 0, sizes)
        group.reduce_scatterv(both[0], 0, sizes)

    case.time(step, 20)
    return {"found": found, "even": even}


CASES = {
    "GroupCoordinator; all_reduce of 8 KiB": coordinator,
    "all_gatherv and reduce_scatterv, tokens 500, 1, 256": uneven,
}
