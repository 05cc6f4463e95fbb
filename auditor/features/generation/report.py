"""Compares the tokens that plans generate with FP32's: tables of plans, model parts and caches, and a chart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...artefact.strategies import plan_title
from ...records.audit import Audit
from ...records.generation import Generation, StoredCache, TokenComparison
from ...report.blocks import Block, Chart, Grid, Prose
from ...report.charts import line_chart
from ...report.plans import plans_shown, quantized_title
from ...report.words import count, in_bytes, label, or_blank, percent, ratio
from ..page import Page
from .caches import cache_plan_grids, cache_plan_words, cache_title, vllm_words

DISTANCES = ("KL mean", "KL 99 %", "KL max", "Same top", "RMS dp")
HEADS = ("Plan", *DISTANCES, "Flips", "95 %", "Flips predicted", "First flip", "First predicted", "10th pct.")
PARTS = "Parts of the model, by kind of operation. The head computes the logits, the router chooses experts, and the cache stores keys and values. Share: the part's share of the predicted squared error of the logit differences between the likeliest tokens. Flips if FP32: predicted flips per 1,000 tokens with the part in FP32"
CACHES = "The FP32 model with its key-value cache stored in each format, with a scale per tensor unless said otherwise. Flips: per 1,000 tokens. Saturated: share of entries beyond the range of their scale. Columns with a number of tokens: memory of the cache for a text of this length"
LENGTHS = (2048, 32768, 131072)
"""Text lengths in tokens for which the report gives the memory of the cache."""


FEW_FLIPS = 0.01
"""Number of predicted flips per 1,000 tokens below which a prediction says no more than that there are few."""


class Decoded(NamedTuple):
    """Title of a plan, its comparison with FP32, and the CSS class of its curve; empty without a curve."""

    title: str
    generated: TokenComparison
    style: str = ""


def generation_lines(audit: Audit) -> tuple[str, ...]:
    """Lines for a terminal: the results that it never omits, see `_always_shown`, with the recommended caches after the
    recommended plan's; the other plans; the part of the model that adds most error; the prompts and tokens."""
    if audit.generation is None:
        return ()
    lines = [f"{title}: {_figures(generated)}" for title, generated, _ in _decoded_plans(audit)]
    first = _asked_plans(audit)
    caches = (*_cache_words(audit), *_vllm_words(audit))
    return (*lines[:first], *caches, *lines[first:], *lift_words(audit), _about(audit.generation))


def generation_section(audit: Audit) -> list[Block]:
    """The report's section on generated tokens; empty for an audit without generation."""
    if audit.generation is None:
        return []
    decoded = _decoded_plans(audit)
    if not decoded:
        return [Prose("", ("No plan was verified, so no plan generated tokens.",), "empty")]
    about = (
        "Each plan decodes with its own cache, and gets the token that FP32 chose after each step. KL: divergence of the next token's probabilities "
        "from FP32's in nats, as mean, 99th percentile and maximum over tokens. Same top: share of tokens with FP32's likeliest choice. RMS dp: root mean square change in the "
        "probability of FP32's token. Flips: choices per 1,000 tokens that differ from FP32's. 95 %: confidence interval of Flips. First flip: number of "
        "tokens up to and including the first flip, median over prompts. First predicted: prediction of this median. 10th pct.: 10th percentile over prompts."
    )
    caches = (*_cache_words(audit), *_vllm_words(audit))
    parts = tuple(
        (title, one.part, percent(one.share), f"{one.operations:,}", or_blank(one.flips, _per_thousand))
        for title, generated, _ in decoded
        for one in generated.parts
    )
    return [
        Prose("", (_about(audit.generation), *lift_words(audit), *caches), "lead"),
        Prose("", (about,), "about"),
        Grid(HEADS, tuple(_row(one.title, one.generated) for one in decoded)),
        Grid(("Plan", "Part", "Share", "Operations", "Flips if FP32"), parts, texts=2, caption=PARTS),
        _caches(audit.generation),
        *cache_plan_grids(audit.generation.cache_plan),
        *_chart(audit.generation, decoded),
    ]


def _caches(made: Generation) -> Grid:
    """A table of formats for the key-value cache: differences from FP32, and memory by text length."""
    rows = []

    def sizes(one: StoredCache, times: int = 1) -> Iterator[str]:
        return (_size(one, length, times) for length in LENGTHS)

    for one in (*made.caches, *made.scaled_caches):
        title = label(one.stored) if one.scale == "tensor" else cache_title(one.stored, one.scale)
        kl = (ratio(x or 0.0) for x in (one.generated.kl, one.generated.kl_99))
        rows.append((title, *kl, *_flips(one.generated), percent(one.saturated), *sizes(one)))
        if one.stored == "bf16":
            rows.insert(0, ("FP32", *[""] * 5, *sizes(one, 2)))
    heads = ("Cache", "KL mean", "KL 99 %", "Flips", "95 %", "Saturated", *(f"{n:,} tokens" for n in LENGTHS))
    return Grid(heads, tuple(rows), caption=CACHES)


def _size(one: StoredCache, length: int, times: int = 1) -> str:
    """Memory of a cache for a text of `length` tokens, in words. times: factor, such as 2 for FP32 instead of BF16."""
    return in_bytes(times * (one.fixed_bytes + one.bytes_per_token * length))


def lift_words(audit: Audit) -> Iterator[str]:
    """The part of the model that adds most error, and the flips predicted with this part in FP32; nothing without
    predictions."""
    for title, generated, _ in _decoded_plans(audit)[:1]:
        best = next((part for part in generated.parts if part.flips is not None), None)
        if best is not None and generated.predicted_flips is not None and generated.predicted_flips >= FEW_FLIPS:
            yield (
                f"In {title}, the model part '{best.part}' ({count(best.operations, 'operation')}) causes {percent(best.share)} of the predicted squared error of the "
                f"logit differences between the likeliest tokens. With this part in FP32, {best.flips:.3g} "
                f"flips per 1,000 tokens are predicted instead of {generated.predicted_flips:.3g}."
            )


def _cache_words(audit: Audit) -> Iterator[str]:
    """The recommended cache in one format, and with a format per layer, with flips and memory; nothing without a
    recommendation."""
    made, plan = audit.generation, audit.plans.get(audit.recommended or "")
    if made is None:
        return
    for best in (one for one in made.caches if one.stored == made.recommended_cache):
        yield (
            f"For the key-value cache, {label(best.stored)} is the smallest format within the limits if the model runs in "
            f"{'FP32' if plan is None else plan_title(plan)}. A cache in {label(best.stored)} adds {best.generated.flips or 0:.3g} "
            f"flips per 1,000 tokens, and takes {_size(best, LENGTHS[1])} for {LENGTHS[1]:,} tokens."
        )
    yield from cache_plan_words(made.cache_plan)


def _vllm_words(audit: Audit) -> Iterator[str]:
    """The options of vLLM for the recommended cache with a format per layer."""
    if audit.generation is not None:
        yield from vllm_words(audit.generation.cache_plan)


def _decoded_plans(audit: Audit) -> list[Decoded]:
    """Plans that decoded, or failed to: first the recommended plan, then plans of quantization schemes, then others."""
    recommended = list[Decoded]()
    others = list[Decoded]()
    for plan in audit.plans.values():
        if plan.generated is not None:
            one = Decoded(plan_title(plan), plan.generated, f"{plan.format} {plan.strategy}")
            (recommended if plan.name == audit.recommended else others).append(one)
    quantized = plans_shown(audit)
    schemes = [Decoded(quantized_title(plan), plan.generated, "") for plan in quantized if plan.generated is not None]
    return [*recommended, *schemes, *others]


def _about(made: Generation) -> str:
    how = f"sampled at temperature {made.temperature:g}" if made.temperature else "always with the likeliest token"
    return (
        f"The FP32 model continued {count(made.prompts, 'prompt')} by {count(made.steps, 'token')} each, "
        f"{how}. The comparison counts {made.tokens:,} tokens, up to the end of each text."
    )


def _figures(generated: TokenComparison) -> str:
    if generated.failure is not None:
        return f"did not decode: {generated.failure}"
    predicted = "" if generated.predicted_flips is None else f" ({_per_thousand(generated.predicted_flips)} predicted)"
    first = f"; first flip at token {n}" if (n := generated.first_flip) else "; at least half of the prompts never flip"
    flips = f"{_flips(generated)[0]} flips per 1,000 tokens{predicted}{first * bool(generated.flips)}"
    return f"KL divergence from FP32 {ratio(generated.kl)} nats per token, {flips}"


def _per_thousand(flips: float) -> str:
    """Predicted flips per 1,000 tokens; a number without meaning, such as 3e-7, becomes a bound."""
    return f"{flips:.3g}" if flips == 0 or flips >= FEW_FLIPS else f"fewer than {FEW_FLIPS:g}"


def _flips(generated: TokenComparison) -> tuple[str, str]:
    """Flips per 1,000 tokens, and their 95 % interval, in words."""
    low, high = generated.flips_low or 0, generated.flips_high or 0
    return f"{generated.flips or 0:.3g}", f"{low:.2g} to {high:.2g}"


def _row(title: str, generated: TokenComparison) -> tuple[str, ...]:
    if generated.failure is not None:
        return (title, f"did not decode: {generated.failure}", *[""] * (len(HEADS) - 2))
    firsts = (generated.first_flip, generated.predicted_first_flip, generated.first_flip_10)
    first, expected, tenth = ("none" if x is None else f"{x:,}" for x in firsts)
    return (
        title,
        *(or_blank(x, ratio) for x in (generated.kl, generated.kl_99, generated.kl_most)),
        or_blank(generated.same_top, percent),
        or_blank(generated.rms_probability, ratio),
        *_flips(generated),
        or_blank(generated.predicted_flips, _per_thousand),
        first,
        or_blank(generated.predicted_flips, lambda _: expected),
        tenth,
    )


def _chart(made: Generation, decoded: list[Decoded]) -> Iterator[Chart]:
    """Chart: KL divergence from FP32 by position after the prompt, one curve per plan."""
    steps, curves = made.steps, []
    for title, generated, style in decoded:
        last = len(generated.kl_by_position) - 1
        points = [(i * steps / last, kl) for i, kl in enumerate(generated.kl_by_position) if kl > 0 and last]
        curves += [(style, title, points)] if points and style else []
    about = "Mean KL divergence from FP32 (logarithmic) by position after the prompt."
    ticks = ((steps * share / 4, f"{round(steps * share / 4):,}") for share in range(5))
    return line_chart("Divergence by position", about, curves, steps, "tokens after the prompt", ticks, -99)


def _asked_plans(audit: Audit) -> int:
    """How many of the first plans were asked for: the recommended plan, and each plan of quantization schemes."""
    return 1 + len(audit.quantized_plans)


def _always_shown(audit: Audit) -> int:
    """How many of the first lines a terminal never omits: those of the asked plans, and of the recommended caches."""
    return _asked_plans(audit) + len([*_cache_words(audit)])


PAGE = Page(
    "Tokens",
    "Tokens",
    lambda audit: generation_lines(audit)[:1],
    generation_section,
    label="Tokens",
    lines=generation_lines,
    always_shown=_always_shown,
)
