"""Describes key-value caches with a format per layer: sentences for reports, and a table of the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...artefact.cache_flags import vllm_flags, vllm_notes
from ...numerics.formats import label
from ...records.generation import CachedTensor, CachePlan
from ...report.blocks import Grid
from ...report.words import count, in_bytes, or_blank, ratio

SCALES = {"tensor": "a scale per tensor", "head": "a scale per head", "one": "all scales 1"}
LISTED = 6
"""Maximum number of keys and values that a sentence names."""
LENGTH = 32768
"""Text length in tokens for which the memory is given."""

HEADS = ("Keys or values", "Stored", "KL alone", "Flips alone")
ABOUT = "The smallest cache within the limits, with a format for the keys and values of each layer. KL and flips alone: with only these keys or values in the smaller format, and all others in BF16; empty if no layer needed more bits"


def cache_title(stored: str, scale: str) -> str:
    """A one-byte cache in words: `FP8 E4M3, a scale per head`."""
    return f"{label(stored)}, {SCALES[scale]}"


def cache_plan_words(plan: CachePlan | None) -> Iterator[str]:
    """A sentence on the recommended cache with a format per layer; nothing without a plan."""
    if plan is None:
        return
    if len(plan.kept) == len(plan.tensors):
        yield f"No layer's keys or values can be stored in {cache_title(plan.stored, plan.scale)}, within the limits: all need BF16."
        return
    kept = f"{_listed(plan.kept)} in BF16 and all others in " if plan.kept else "all keys and values in "
    size = in_bytes(plan.fixed_bytes + LENGTH * plan.bytes_per_token)
    yield (
        f"With a format per layer, the smallest cache within the limits has {kept}{cache_title(plan.stored, plan.scale)}: "
        f"{plan.bits:.3g} bits per entry on average, {plan.generated.flips or 0:.3g} flips per 1,000 tokens, and {size} for {LENGTH:,} tokens."
    )


def vllm_words(plan: CachePlan | None) -> Iterator[str]:
    """The options of vLLM for a cache with a format per layer, and what they do otherwise; nothing without such a cache."""
    if plan is None or len(plan.kept) == len(plan.tensors):
        return
    flags = vllm_flags(plan)
    command = [f"In vLLM: vllm serve CHECKPOINT {flags}."] if flags else []
    yield " ".join((*command, *vllm_notes(plan)))


def _listed(kept: Sequence[CachedTensor]) -> str:
    names = ", ".join(one.name for one in kept[:LISTED])
    more = len(kept) - LISTED
    return f"{names} and {count(more, 'more')}" if more > 0 else names


def cache_plan_grids(plan: CachePlan | None) -> list[Grid]:
    """A table of every layer's keys and values: their format, and the divergence that they cause alone."""
    if plan is None:
        return []
    rows = tuple(
        (one.name, label(one.stored), or_blank(one.kl, ratio), or_blank(one.flips, lambda flips: f"{flips:.3g}"))
        for one in plan.tensors
    )
    return [Grid(HEADS, rows, texts=2, caption=ABOUT)]
