"""Decoding under plans compared with FP32: the table, shares of the model's parts, and divergence by position."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..records import Plan
from ..records.audit import Audit
from ..records.generation import PartShare, StoredCache, TokenComparison
from .blocks import BOTTOM, LEFT, RIGHT, Block, Chart, Grid, Prose
from .charts import scale
from .words import count, in_bytes, label, percent, plan_title, power, ratio

HEIGHT, INSET = 260, 8
HEADS = (
    "Plan",
    "KL mean",
    "KL 99 %",
    "KL most",
    "Same top",
    "RMS dp",
    "Flips",
    "95 %",
    "Predicted",
    "First flip",
    "10 %",
)


def generation_lines(audit: Audit) -> list[Block]:
    """For the terminal, which may leave out the last: the recommended plan and others, the part to keep in FP32 first, the setup."""
    if audit.generation is None:
        return []
    plans = sorted(_decoded_plans(audit), key=lambda pair: pair[0].name != audit.recommended)
    lines = [f"{plan_title(plan)}: {_figures(generated)}" for plan, generated in plans]
    lift = lift_words(audit)
    return [Prose("Tokens", (*lines, *([lift] if lift else []), _about(audit)))]


def generation_section(audit: Audit) -> list[Block]:
    """The report's section on tokens; nothing for an audit without generation."""
    if audit.generation is None:
        return []
    decoded = _decoded_plans(audit)
    if not decoded:
        return [Prose("", ("No plan was verified, so no plan generated tokens.",), "empty")]
    about = (
        "Each plan decodes with its own cache, and gets FP32's token after each step. KL: "
        "divergence from FP32 in nats per token. RMS dp: change in the probability of FP32's "
        "token. Flips: differing choices per 1,000 tokens, with a 95 % interval. First flip: "
        "tokens after the prompt until then, for the median prompt and the worst 10 %."
    )
    lift = lift_words(audit)
    parts = [row for plan, generated in decoded for row in _parts(plan, generated)]
    return [
        Prose("", (_about(audit), *([lift] if lift else [])), "lead"),
        Prose("", (about,), "about"),
        Grid(HEADS, tuple(_row(plan, generated) for plan, generated in decoded)),
        *(
            [Grid(("Plan", "Part", "Share", "Operations", "Flips without"), tuple(parts), texts=2, caption=PARTS)]
            if parts
            else []
        ),
        *_caches(audit),
        *([chart] if (chart := _chart(audit)) else []),
    ]


PARTS = "Model parts: share of the margins' squared error, and predicted flips per 1,000 tokens with the part in FP32"
CACHES = "Key-value cache of the FP32 model in fewer bits: its flips per 1,000 tokens, and the memory of one text"
LENGTHS = (2048, 32768, 131072)
"""Tokens of a text whose cache is priced."""


def _caches(audit: Audit) -> list[Block]:
    """How the cache may be stored, and what each way costs."""
    assert audit.generation is not None
    rows = []

    def sizes(one: StoredCache, times: int = 1) -> Iterator[str]:
        return (in_bytes(times * (one.fixed_bytes + one.bytes_per_token * length)) for length in LENGTHS)

    for one in audit.generation.caches:
        found = one.generated
        flips = f"{found.flips or 0:.3g}", f"{found.flips_low or 0:.2g} to {found.flips_high or 0:.2g}"
        kl = (ratio(x or 0.0) for x in (found.kl, found.kl_99))
        rows.append((label(one.stored), *kl, *flips, percent(one.saturated), *sizes(one)))
        if one.stored == "bf16":
            rows.insert(0, ("FP32", *[""] * 5, *sizes(one, 2)))
    heads = ("Cache", "KL mean", "KL 99 %", "Flips", "95 %", "Saturated", *(f"{n:,} tokens" for n in LENGTHS))
    return [Grid(heads, tuple(rows), caption=CACHES)] if rows else []


def lift_words(audit: Audit) -> str:
    """The part that should stay FP32 first; nothing without predictions."""
    plan = audit.plans.get(audit.recommended or "") or next((plan for plan, _ in _decoded_plans(audit)), None)
    generated = plan.generated if plan is not None else None
    best = _best(generated) if generated is not None else None
    if plan is None or generated is None or best is None or generated.predicted_flips is None or best.flips is None:
        return ""
    return (
        f"Under {plan_title(plan)}, {percent(best.share)} of the error that flips tokens comes "
        f"from: {best.part} ({count(best.operations, 'operation')}). In FP32, {best.flips:.3g} "
        f"flips per 1,000 tokens are predicted instead of {generated.predicted_flips:.3g}."
    )


def _best(generated: TokenComparison) -> PartShare | None:
    return next((part for part in generated.parts if part.flips is not None), None)


def _decoded_plans(audit: Audit) -> list[tuple[Plan, TokenComparison]]:
    return [(plan, plan.generated) for plan in audit.plans.values() if plan.generated is not None]


def _about(audit: Audit) -> str:
    made = audit.generation
    assert made is not None
    how = f"sampled at temperature {made.temperature:g}" if made.temperature else "always the likeliest"
    return (
        f"FP32 continued {count(made.prompts, 'prompt')} by {count(made.steps, 'token')} each, "
        f"{how}: {made.tokens:,} tokens count, up to the end of each text."
    )


def _figures(generated: TokenComparison) -> str:
    if generated.failure is not None or generated.kl is None or generated.flips is None:
        return f"did not decode: {generated.failure}"
    predicted = "" if generated.predicted_flips is None else f", {generated.predicted_flips:.3g} predicted"
    first = (
        f"first flip after {generated.first_flip} tokens" if generated.first_flip else "no flip in half of the prompts"
    )
    return f"KL {ratio(generated.kl)}, {generated.flips:.3g} flips per 1,000 tokens{predicted}; {first}"


def _row(plan: Plan, generated: TokenComparison) -> tuple[str, ...]:
    if (
        generated.failure is not None
        or generated.flips is None
        or generated.flips_low is None
        or generated.flips_high is None
    ):
        return (plan_title(plan), f"did not decode: {generated.failure}", *[""] * (len(HEADS) - 2))
    return (
        plan_title(plan),
        *("" if x is None else ratio(x) for x in (generated.kl, generated.kl_99, generated.kl_most)),
        "" if generated.same_top is None else percent(generated.same_top),
        "" if generated.rms_probability is None else ratio(generated.rms_probability),
        f"{generated.flips:.3g}",
        f"{generated.flips_low:.2g} to {generated.flips_high:.2g}",
        "" if generated.predicted_flips is None else f"{generated.predicted_flips:.3g}",
        *("none" if x is None else f"{x:,}" for x in (generated.first_flip, generated.first_flip_10)),
    )


def _parts(plan: Plan, generated: TokenComparison) -> list[tuple[str, ...]]:
    return [
        (
            plan_title(plan),
            one.part,
            percent(one.share),
            f"{one.operations:,}",
            "" if one.flips is None else f"{one.flips:.3g}",
        )
        for one in generated.parts
    ]


def _chart(audit: Audit) -> Chart | None:
    """KL of every plan by position after the prompt."""
    assert audit.generation is not None
    curves = [(plan, [x for x in generated.kl_by_position if x > 0]) for plan, generated in _decoded_plans(audit)]
    curves = [(plan, values) for plan, values in curves if len(values) > 1]
    if not curves:
        return None
    logs = [math.log10(x) for _, values in curves for x in values]
    decades = range(math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1) + 1)
    y = scale(decades[0], decades[-1], HEIGHT - BOTTOM, INSET)
    paths = []
    for plan, values in curves:
        x = scale(0, len(values) - 1, LEFT + INSET, RIGHT - INSET)
        points = "L".join(f"{x(i):g} {y(math.log10(value)):g}" for i, value in enumerate(values))
        paths.append((f"line {plan.format} {plan.strategy}", f"M{points}"))
    steps, most = audit.generation.steps, max(len(values) for _, values in curves) - 1
    place = scale(0, most, LEFT + INSET, RIGHT - INSET)
    return Chart(
        "Divergence by position",
        "Mean KL divergence from FP32, logarithmic, by tokens after the prompt; cast plans are dashed.",
        HEIGHT,
        tuple(paths),
        tuple(dict.fromkeys((plan.format, label(plan.format)) for plan, _ in curves)),
        "tokens after the prompt",
        tuple((place(most * share / 4), f"{round(steps * share / 4):,}") for share in range(5)),
        tuple((y(d), power(10, d)) for d in decades),
    )
