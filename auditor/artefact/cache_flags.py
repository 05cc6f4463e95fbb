"""A key-value cache with a format per layer as options of vLLM, with notes on what vLLM stores otherwise."""

from __future__ import annotations

from ..records.generation import CachePlan

STRATEGIES = {"tensor": "tensor", "head": "attn_head"}
"""{scale: its strategy in compressed-tensors}; vLLM reads per-head scales with the Flash Attention backend."""


def vllm_flags(plan: CachePlan) -> str:
    """Options of `vllm serve` for the cache; "" if vLLM has no such cache, or all keys and values stay in BF16.

    Source: vLLM's docs/features/quantization/quantized_kvcache.md (version 0.25).
    """
    has_layers = all(one.layers for one in plan.tensors)
    if plan.stored != "fp8_e4m3" or not has_layers or len(plan.kept) == len(plan.tensors):
        return ""
    skipped = sorted({layer for one in plan.kept for layer in one.layers})
    flags = "--kv-cache-dtype fp8"
    if skipped:
        flags += f" --kv-cache-dtype-skip-layers {' '.join(map(str, skipped))}"
    return flags


def vllm_notes(plan: CachePlan) -> list[str]:
    """Sentences on what vLLM does otherwise than the audited cache, and on where its scales come from."""
    if plan.stored == "int8":
        return ["vLLM has no INT8 cache with fixed scales: its int8_per_token_head has a scale per token and head."]
    if not vllm_flags(plan):
        return []
    notes = []
    kept = {(layer, one.name.rpartition(" ")[2]) for one in plan.kept for layer in one.layers}
    halves = sorted({layer for layer, _ in kept if len({part for each, part in kept if each == layer}) == 1})
    if halves:
        numbers = ", ".join(map(str, halves))
        notes.append(f"vLLM skips whole layers, so both keys and values of layer {numbers} stay in 16 bits.")
    if plan.scale == "one":
        notes.append("vLLM's scales are 1 by default.")
    else:
        scheme = f'kv_cache_scheme=QuantizationArgs(num_bits=8, type="float", strategy="{STRATEGIES[plan.scale]}")'
        notes.append(
            f"The scales come from the checkpoint: llm-compressor writes them with {scheme}; without, they are 1."
        )
    return notes
