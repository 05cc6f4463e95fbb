"""The plan to use, and the sentence that says why: hand-made plans in."""

from dataclasses import replace
from typing import Any

import pytest

from auditor.plan.recommend import best_for, outcome, recommend
from auditor.records import CriterionValue, MemoryUse, Plan, Reason, ScopeChoice, TimeAndMemory, Times, Verification

ROOT = {"": ScopeChoice("fp16")}
BASE = Plan("autocast_fp16", "autocast", "fp16", ROOT, 0.001, 0.9, 2.0, verification=Verification(0.002, True))
WHOLE = replace(BASE, scopes={"": ScopeChoice("fp32")}, low_precision_flops=0.0, predicted_speedup=1.0)
MIXED = replace(BASE, scopes={**ROOT, "norm": ScopeChoice("fp32")})
SLOW = replace(MIXED, predicted_speedup=0.97, reasons=(Reason("unsafe", "x is unsafe", ("norm",)),))
FP32 = MemoryUse(100, 100)
UNSAFE = Reason("unsafe", "x is unsafe: it overflows", ("",))
IDLE = Reason("no-gain", "running only this in low precision saves no time", ("a", "b"), adds=0.004, ran=True)


def plans(*several: Plan) -> dict[str, Plan]:
    return {plan.name: plan for plan in several}


def named(name: str, **changes: Any) -> Plan:
    strategy, fmt = name.split("_")
    return replace(BASE, name=name, strategy=strategy, format=fmt, **changes)


def needing(plan: Plan, objective: str, activations: int = 50) -> Plan:
    return replace(plan, objective=objective, memory=MemoryUse(50, activations), fp32_memory=FP32)


@pytest.mark.parametrize(
    ("several", "use", "winner"),
    [
        ((named("cast_bf16", predicted_speedup=2.69), BASE), "inference", "cast_bf16"),
        ((named("cast_bf16", predicted_speedup=2.69), BASE), "training", "autocast_fp16"),
        ((named("cast_fp16", predicted_speedup=2.01), BASE), "inference", "autocast_fp16"),
        ((BASE, named("autocast_bf16", predicted_speedup=3.0)), "inference", "autocast_bf16"),
        ((BASE, named("autocast_bf16", verification=Verification(0.001, True))), "inference", "autocast_bf16"),
        ((replace(BASE, verification=Verification(0.002)), named("cast_fp16")), "inference", "cast_fp16"),
        ((WHOLE, named("cast_bf16")), "inference", "cast_bf16"),
        ((SLOW, named("cast_fp16")), "inference", "cast_fp16"),
        ((SLOW, named("cast_fp16")), "training", None),
        ((replace(SLOW, objective="flops"),), "inference", "autocast_fp16"),
        ((SLOW,), "inference", None),
        ((named("cast_fp16"),), "training", None),
        ((replace(BASE, verification=Verification(None)),), "inference", None),
        ((), "inference", None),
    ],
)
def test_the_best_for_a_use(several: tuple[Plan, ...], use: str, winner: str | None) -> None:
    for order in (several, several[::-1]):
        assert recommend(plans(*order), 0.01, use)[0] == winner


@pytest.mark.parametrize(("faster", "winner"), [(1.97, "fp16"), (2.02, "fp16"), (2.07, "bf16"), (4.0, "bf16")])
def test_within_the_noise_of_predicted_speeds_the_smaller_error_wins(faster: float, winner: str) -> None:
    for speed in (1.0, 3.0):  # wherever a rounding of the speeds would lie
        closer = replace(BASE, predicted_speedup=1.97 * speed, verification=Verification(0.0007, True))
        other = named("autocast_bf16", predicted_speedup=faster * speed, verification=Verification(0.0064, True))
        assert recommend(plans(closer, other), 0.01)[0] == f"autocast_{winner}"


@pytest.mark.parametrize("objective", ["memory", "flops"])
def test_for_memory_and_flops_the_faster_of_two_as_good_is_taken(objective: str) -> None:
    fast = needing(named("cast_bf16", predicted_speedup=2.5, verification=Verification(0.005, True)), objective)
    for other, winner in ((fast, "cast_bf16"), (replace(fast, predicted_speedup=2.01), BASE.name)):
        assert recommend(plans(needing(BASE, objective), other), 0.01)[0] == winner


@pytest.mark.parametrize(
    ("objective", "best", "worth"),
    [
        ("time", "autocast_fp16", "2.00x"),
        ("memory", "cast_fp16", "50% of the memory"),
        ("flops", "cast_fp16", "95% of the FLOPs in low precision"),
    ],
)
def test_each_objective_has_its_best(objective: str, best: str, worth: str) -> None:
    slow = needing(named("cast_fp16", predicted_speedup=1.5, low_precision_flops=0.95), objective)
    name, reason = recommend(plans(slow, needing(BASE, objective, 130)), 0.01)
    assert name == best
    assert f"(`{best}`), {worth}" in reason.partition("For inference: ")[2].partition(";")[0]


def test_the_sentence_holds_the_evidence() -> None:
    both = plans(named("cast_bf16", predicted_speedup=2.69), replace(MIXED, predicted_speedup=1.69))
    uses = "For inference: BF16 with cast weights (`cast_bf16`), 2.69x; for training: FP16 under autocast (`autocast_fp16`), 1.69x."
    held = "measured error 0.002 within the error budget of 0.01, 90% of the FLOPs in low precision"
    assert recommend(both, 0.01)[1] == f"BF16 with cast weights: {held}, nothing kept in FP32. {uses}"
    assert recommend(both, 0.01, "training")[1] == f"FP16 under autocast: {held}, 1 module kept in FP32. {uses}"
    more = replace(MIXED, scopes={**MIXED.scopes, "head": ScopeChoice("fp32")})
    assert "2 modules kept in FP32." in recommend(plans(more), 0.01)[1]
    ran = Verification(0.02, True, "audited", "emulated")
    varying = replace(BASE, verification=replace(ran, noise=0.01, floor=0.03))
    assert "measured error 0.02 within the 0.03 by which FP32 runs differ" in recommend(plans(varying), 0.01)[1]
    criterion = CriterionValue("logits", "labels", "<=", 0.01, 0.0, 0.0, True)
    criteria = replace(BASE, verification=replace(ran, criteria=(criterion,)))
    assert "within the limit of every criterion" in recommend(plans(criteria), 1.0)[1]


@pytest.mark.parametrize(
    ("plan", "found", "words"),
    [
        (
            replace(BASE, verification=Verification(0.5)),
            "out of reach",
            "reachable error is 0.5, in FP16 under autocast",
        ),
        (replace(WHOLE, reach=0.03), "out of reach", "the smallest reachable error is 0.03"),
        (
            replace(WHOLE, reach=0.001),
            "out of reach",
            "is within the error budget of 0.01 (0.001), but its few low-precision operations are unsafe on their own",
        ),
        (replace(WHOLE, reasons=(UNSAFE,)), "out of reach", "no plan with low precision is within the error budget"),
        (replace(WHOLE, reasons=(UNSAFE, replace(IDLE, adds=0.0))), "out of reach", "no plan with low precision"),
        (replace(WHOLE, reasons=(UNSAFE, IDLE)), "out of reach", "no plan with low precision"),
        (replace(WHOLE, reasons=(replace(IDLE, adds=None),), least=()), "saves nothing", "saves no time"),
        (replace(WHOLE, reasons=(replace(IDLE, ran=False),), least=("b",)), "saves nothing", "no time"),
        (replace(WHOLE, reasons=(replace(IDLE, ran=False),), least=("a", "b")), "out of reach", "no plan"),
        (replace(WHOLE, reasons=(IDLE,), least=(), objective="flops"), "saves nothing", "saves no FP32 FLOPs"),
        (SLOW, "saves nothing", "saves no time"),
        (replace(WHOLE, scopes=ROOT), "lowers nothing", "runs any operation in low precision"),
    ],
)
def test_why_there_is_none(plan: Plan, found: str, words: str) -> None:
    """All low is said to hold only where a run was, and low precision only where something ran low."""
    assert outcome(plans(plan), "inference") == found
    name, reason = recommend(plans(plan), 0.01)
    assert name is None and words in reason
    assert best_for(plans(plan), "inference") is None
    is_within = found != "out of reach" or (plan.reach or 1.0) <= 0.01
    assert reason.startswith("Keep the model in FP32: ") == (not is_within)


def test_a_model_that_raises_in_low_precision_is_not_said_to_be_within_the_budget() -> None:
    raised = {"autocast_fp16": Verification(None, failure="index_add has inputs of different dtypes")}
    _, reason = recommend(plans(SLOW), 0.01, baselines=raised)
    assert "the model raises an error in low precision" in reason
    assert "is within" not in reason


def test_what_blocks_everything_low_is_said_where_slower_plans_are_within_the_limits() -> None:
    blocked = CriterionValue("mask", "flips", "<=", 0.001, 93 / 65536, 1.4, holds=False, entries=65536)
    all_low = {"autocast_fp16": Verification(1.4, criteria=(blocked,))}
    _, reason = recommend(plans(SLOW), 1.0, baselines=all_low)
    assert (
        "saves no time. In FP16 under autocast, with nothing kept in FP32: 93 of 65,536 entries of `mask` change"
        in reason
    )
    assert "--criterion 'mask: flips <= 0.002'" in reason


def test_where_no_plan_trains_the_one_for_inference_is_named() -> None:
    only = plans(named("cast_fp16"))
    assert (outcome(only, "training"), best_for(only, "training")) == ("not asked for", None)
    name, reason = recommend(only, 0.01, "training")
    assert name is None and "No plan for training was requested" in reason
    assert "For inference: FP16 with cast weights (`cast_fp16`), 2.00x" in reason


def on_a_gpu(low: float, median: float, high: float, share: float = 0.6, decides: bool = True) -> TimeAndMemory:
    """Times of a plan beside an FP32 that takes 1 s, give or take 0.1."""
    times = Times(median, low, high, 20, 1 / median, 0.9 / high, 1.1 / low)
    return TimeAndMemory(eager=times, memory=60, memory_share=share, decides=decides)


def test_measured_times_decide_where_they_are_a_gpus() -> None:
    predicted = named("cast_fp16", predicted_speedup=4.0, timed=on_a_gpu(0.78, 0.8, 0.82))
    measured = replace(BASE, timed=on_a_gpu(0.58, 0.6, 0.62))
    name, reason = recommend(plans(predicted, measured), 0.01)
    assert name == "autocast_fp16"
    assert "for training: FP16 under autocast (`autocast_fp16`), 1.67x measured." in reason
    on_a_cpu = [replace(plan, timed=replace(plan.timed, decides=False)) for plan in (predicted, measured) if plan.timed]
    assert recommend(plans(*on_a_cpu), 0.01)[0] == "cast_fp16"


def test_what_repeats_do_not_tell_apart_is_as_fast() -> None:
    closer = replace(BASE, verification=Verification(0.001, True), timed=on_a_gpu(0.57, 0.64, 0.7))
    faster = named("autocast_bf16", verification=Verification(0.002, True), timed=on_a_gpu(0.55, 0.58, 0.6))
    assert recommend(plans(closer, faster), 0.01)[0] == "autocast_fp16"
    apart = replace(closer, timed=on_a_gpu(0.61, 0.64, 0.7))
    assert recommend(plans(apart, faster), 0.01)[0] == "autocast_bf16"


def test_a_plan_that_was_measured_to_be_slower_than_fp32_gains_nothing() -> None:
    slower = replace(BASE, timed=on_a_gpu(1.15, 1.2, 1.3))
    assert (recommend(plans(slower), 0.01)[0], outcome(plans(slower))) == (None, "saves nothing")
    untold = replace(BASE, timed=on_a_gpu(1.05, 1.2, 1.3))  # within the spread of both
    assert recommend(plans(untold), 0.01)[0] == "autocast_fp16"


def test_measured_memory_decides_where_memory_is_to_be_saved() -> None:
    less = replace(needing(BASE, "memory"), timed=on_a_gpu(0.9, 0.9, 0.9, share=0.5))
    more = replace(needing(named("cast_fp16"), "memory"), timed=on_a_gpu(0.5, 0.5, 0.5, share=0.7))
    name, reason = recommend(plans(less, more), 0.01)
    assert name == "autocast_fp16" and "50% of the memory measured" in reason


def test_what_is_kept_are_the_modules_that_reasons_name() -> None:
    kept = replace(MIXED, scopes={**MIXED.scopes, "head": ScopeChoice("fp32")})
    assert kept.kept_modules == ("norm", "head")  # as far as a file without reasons says
    reasons = (
        Reason("unsafe", "x is unsafe: it overflows", ("norm", "norm.inner")),
        Reason("not-floating", "has no floating-point operations", ("head",)),
        Reason("strategy", "autocast always runs softmax in FP32", operations=("softmax",)),
    )
    assert replace(kept, reasons=reasons).kept_modules == ("norm", "norm.inner")


MASK = CriterionValue("mask", "flips", "<=", 0.0, 2 / 65536, 2.0, False, entries=65536)
OTHER = CriterionValue("the other outputs", "rel_l2", "<=", 0.01, 0.0123, 1.23, False)


@pytest.mark.parametrize(
    ("blocking", "words"),
    [
        (MASK, "2 of 65,536 entries of `mask` change, and the limit is `mask: flips <= 0`"),
        (MASK, "to allow this: --criterion 'mask: flips <= 0.001'"),
        (replace(MASK, value=1 / 65536), "1 of 65,536 entries of `mask` changes"),
        (replace(MASK, value=0.3, entries=10), "3 of 10 entries of `mask` change, and the limit is"),
        (replace(MASK, value=0.3, entries=10), "--criterion 'mask: flips <= 0.3'"),
        (OTHER, "rel_l2 of the other outputs is 0.0123, and the limit is 0.01; to allow this: --max-error 0.02"),
        (replace(OTHER, value=None), "rel_l2 of the other outputs is not finite, and the limit is 0.01"),
    ],
)
@pytest.mark.parametrize("low", [True, False])
def test_the_limit_that_blocks_is_named_with_the_option_that_allows_it(
    blocking: CriterionValue, words: str, low: bool
) -> None:
    run = Verification(2.0, criteria=(blocking,))
    plan = replace(BASE, verification=run) if low else replace(WHOLE, reach=2.0)
    name, reason = recommend(plans(plan), 1.0, baselines={plan.name: run})
    assert name is None and words in reason
    assert "smallest reachable" not in reason
    assert ("nothing kept in FP32" in reason) is not low


def test_of_many_limits_that_block_the_most_violated_are_named() -> None:
    masks = [replace(MASK, output=f"mask{index}", share=2.0 + index) for index in range(4)]
    run = Verification(5.0, criteria=tuple(masks))
    reason = recommend(plans(replace(BASE, verification=run)), 1.0, baselines={BASE.name: run})[1]
    assert reason.index("`mask3: flips <= 0`") < reason.index("`mask2: flips <= 0`")
    assert "`mask1" not in reason
    assert reason.endswith("; and 2 more limits are exceeded.")


@pytest.mark.parametrize("error", [0.00011, 0.01])
def test_an_error_within_the_budget_is_never_the_smallest_reachable(error: float) -> None:
    name, reason = recommend(plans(replace(BASE, verification=Verification(error))), 0.01)
    assert name is None and "reachable" not in reason


def test_a_plan_whose_prediction_contradicts_few_measurements_is_not_preferred() -> None:
    """Predicted above the budget, measured far below it, on one batch: other inputs may exceed the budget."""
    one = Verification(0.004, True, batches=1, allowed=0.01)
    doubtful = named("cast_fp16", predicted_speedup=3.0, predicted_error=0.02, verification=one)
    assert doubtful.is_doubtful
    assert recommend(plans(BASE, doubtful), 0.01)[0] == BASE.name
    assert recommend(plans(doubtful), 0.01)[0] == doubtful.name
    for other in (
        replace(doubtful, verification=replace(one, batches=8)),
        replace(doubtful, predicted_error=0.009),
        replace(doubtful, predicted_error=0.019, verification=replace(one, measured_error=0.0099)),
    ):
        assert not other.is_doubtful
        assert recommend(plans(BASE, other), 0.01)[0] == other.name


def test_a_format_that_changes_nothing_is_not_called_unsafe() -> None:
    """Autocast runs every operation in FP32: the run without a plan is exact, which says nothing about the format."""
    over = plans(replace(BASE, verification=Verification(0.5)), named("cast_fp16", verification=Verification(0.5)))
    _, reason = recommend(over, 0.01, baselines={BASE.name: Verification(0.0, True)})
    assert "FP16 under autocast changes nothing, since every operation then runs in FP32" in reason
    _, reason = recommend(over, 0.01, baselines={BASE.name: Verification(0.002, True)})
    assert (
        "is within the error budget of 0.01 on these inputs (0.002), but it runs operations that are unsafe" in reason
    )
