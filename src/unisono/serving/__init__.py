"""Inference servers on CPU ranks: what vLLM and SGLang ask of their communicators and have for GPUs only.

``rows`` is the calls, ``vllm`` and ``sglang`` are the plug-ins that those load by their entry points.
"""
