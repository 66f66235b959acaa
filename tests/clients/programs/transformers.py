"""transformers: tp_plan="auto" asks for gloo by name, so it runs as it is and unisono is chosen by `unisono run`."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers

from tests.clients.case import Case

REQUIREMENTS = ["transformers"]
BESIDE = ["accelerate"]  # which tp_plan asks for
BY_NAME = False
RANKS = (2, 3)
TOLERANCE = 1e-5
TOKENS = 24
SMALL = {  # everything that is cut divides by 2 and by 3, which tensor parallelism asks for
    "hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12,
    "num_key_value_heads": 6, "vocab_size": 1002, "max_position_embeddings": 128,
}  # fmt: skip


def _generate(case: Case, config: Any, seed: int = 0) -> Any:
    case.begin()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder[0])
    dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto")
    case.confirm()
    model.eval()
    prompt = torch.arange(16).reshape(1, 16)
    sharded = sum(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    with torch.no_grad():
        logits = model(prompt).logits
        model.generate(prompt, max_new_tokens=2, do_sample=False)
        dist.barrier()
        begin = time.perf_counter()
        tokens = model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    case.milliseconds = 1000 * (time.perf_counter() - begin) / TOKENS
    return {"logits": logits, "tokens": tokens, "sharded": sharded}


CASES = {
    "Llama, tp_plan, one token": lambda case: _generate(case, transformers.LlamaConfig(**SMALL)),
    "Mixtral (6 experts), tp_plan, one token": lambda case: _generate(
        case, transformers.MixtralConfig(**SMALL, num_local_experts=6, num_experts_per_tok=2)
    ),
    "Qwen3-MoE (12 experts), tp_plan, one token": lambda case: _generate(
        case,
        transformers.Qwen3MoeConfig(
            **SMALL, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=192, head_dim=32
        ),
    ),
}
