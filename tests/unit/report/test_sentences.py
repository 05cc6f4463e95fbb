"""Sentences with numbers that say nothing, or that hide what was asked for: what is said instead."""

from dataclasses import replace

import pytest

from auditor.features.generation.report import generation_lines, generation_section
from auditor.records import Verdict
from auditor.records.generation import CachedTensor, CachePlan, Generation, PartShare, StoredCache, TokenComparison
from auditor.records.plan import CriterionValue, MemoryUse
from auditor.records.quantization import QuantizedPlan
from auditor.report.view import ReportView
from auditor.reporters import LINES, text
from tests.unit.report.factory import make_audit


def tokens(**values):
    return TokenComparison(kl=4e-7, flips=0.0, **values)


def generated(audit, one):
    """The audit, with tokens that every plan decoded."""
    plans = {name: replace(plan, generated=one) for name, plan in audit.plans.items()}
    return replace(audit, plans=plans, generation=Generation(20, 64, 1280))


@pytest.mark.parametrize(
    ("flips", "said"), [(3.25e-7, "(fewer than 0.01 predicted)"), (0.0, "(0 predicted)"), (1.234, "(1.23 predicted)")]
)
def test_a_prediction_of_no_meaning_is_a_bound(flips, said):
    audit = generated(make_audit(12), tokens(predicted_flips=flips, parts=(PartShare("head", 0.5, 3, flips / 2),)))
    assert said in generation_lines(audit)[0]
    lifts = any("With this part in FP32" in line for line in generation_lines(audit))
    assert lifts is (flips > 0.01)
    assert "e-07" not in str(generation_section(audit))


def test_the_only_operation_is_not_counted_against_none():
    audit = make_audit(12, formats=("bf16",))
    verdict = {"bf16": Verdict("safe", "")}
    audit = replace(audit, nodes=tuple(replace(node, verdicts=verdict) for node in audit.nodes[:1]))
    (tally,) = ReportView(audit).tallies
    assert tally.sentence == "BF16: the only operation is neither unsafe nor sensitive."


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (14_900_000, "14.9MB, as in FP32"),
        (14_940_000, "14.9MB, as in FP32"),
        (7_000_000, "7MB instead of 14.9MB in FP32"),
    ],
)
def test_equal_memory_is_not_instead_of_the_same(own, said):
    audit = make_audit(12)
    name = audit.recommended
    plan = replace(audit.plans[name], memory=MemoryUse(own, 0), fp32_memory=MemoryUse(14_900_000, 0))
    (view,) = (one for one in ReportView(replace(audit, plans={**audit.plans, name: plan})).plans if one.recommended)
    assert view.memory == said
    assert f"Predicted memory: {said}." in " ".join(text(replace(audit, plans={name: plan})).split())


def test_answers_that_an_option_asked_for_come_first_and_whole():
    schemes = ("int8", "fp8", "nvfp4")
    plans = tuple(
        QuantizedPlan(
            name=name,
            schemes=(name,),
            layers={"head": name},
            groups=(),
            effective_bits=bits,
            model_bits=bits,
            left_out=(),
            weights_bytes=10**9,
            weights_share=bits / 16,
            time_share=0.6,
            predicted_error=1e-3,
            single_errors=2e-3,
            calibration_error=0.1 / 2**bits,  # fewer bits, a larger error: no plan dominates another
            held_out_error=None,
            verified_by="torchao",
            generated=tokens(predicted_flips=None),
        )
        for name, bits in zip(schemes, (8.0, 7.5, 4.5), strict=True)
    )
    audit = replace(generated(make_audit(60), tokens(predicted_flips=0.5)), quantized_plans=plans)
    shown = text(audit, width=100)
    first = "\n".join(shown.splitlines()[:24])
    assert len(shown.splitlines()) <= LINES + 8  # the answers stay, whatever else is asked for
    for title in ("INT8 plan", "FP8 plan", "NVFP4 plan"):
        assert f"{title}: 1 of 1 layer quantized" in first
        assert f"{title}: KL divergence" in first
    assert "FP16 under autocast: KL divergence" in first
    assert shown.index("Verdict") < shown.index("Quantized") < shown.index("Tokens") < shown.index("To do")


@pytest.mark.parametrize(
    ("count", "high", "limit", "said"),
    [
        (
            16,
            60.0,
            0.99,
            "of 16 generated tokens, the 95 % interval of flips reaches 60 per 1,000, above the limit of 10:",
        ),
        (5000, 2.4, 0.99, ""),
        (16, 60.0, 0.9, ""),
    ],
)
def test_a_limit_that_few_tokens_cannot_check_is_doubted_beside_the_verdict(count, high, limit, said):
    audit = make_audit(12)
    plan = audit.plan
    value = CriterionValue("logits", "top1", ">=", limit, 1.0, 0.0, holds=True)
    one = tokens(flips_high=high)
    plan = replace(plan, generated=one, verification=replace(plan.verification, criteria=(value,)))
    audit = replace(audit, plans={**audit.plans, plan.name: plan}, generation=Generation(1, count, count))
    proof = ReportView(audit).proof
    assert said in proof
    assert ("95 %" in proof) is bool(said)


def test_a_terminal_that_omits_lines_shows_the_recommended_caches():
    """A screen with far more than fits keeps the cache in one format, and the cache with a format per layer."""
    cache = StoredCache("fp8_e4m3", 0.0, 128.0, 0.0, tokens())
    layers = (CachedTensor("layer 0 keys", (0,), "bf16"), CachedTensor("layer 0 values", (0,), "int8"))
    mixed = CachePlan("int8", "tensor", layers, 12.0, 0.0, 96.0, tokens())
    audit = generated(make_audit(60), tokens(predicted_flips=0.5))
    made = Generation(20, 64, 1280, caches=(cache,), recommended_cache="fp8_e4m3", cache_plan=mixed)
    page = text(replace(audit, generation=made), width=100, most=10)
    shown = " ".join(page.split())
    assert "more results, in report.html" in shown
    assert "FP8 E4M3 is the smallest format within the limits if the model runs in" in shown
    assert "has layer 0 keys in BF16 and all others in INT8" in shown
