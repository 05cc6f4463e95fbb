"""The plan to use, and the sentence that says why: hand-made plans in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from auditor.plan.recommend import best_for, outcome, recommend
from auditor.records import Memory, Plan, Reason, ScopeChoice, Timed, Times, Verification

ROOT = {"": ScopeChoice("fp16")}
BASE = Plan("autocast_fp16", "autocast", "fp16", ROOT, 0.001, 0.9, 2.0, measured_error=0.002, verified=True)
FP32 = Memory(100, 100)


def plans(*several: Plan) -> dict[str, Plan]:
    return {plan.name: plan for plan in several}


def named(name: str, **changes: Any) -> Plan:
    strategy, fmt = name.split("_")
    return replace(BASE, name=name, strategy=strategy, format=fmt, **changes)


def test_the_fastest_is_for_inference_and_what_trains_for_training() -> None:
    both = plans(named("cast_bf16", predicted_speedup=2.69), replace(BASE, predicted_speedup=1.69))
    name, reason = recommend(both, 0.01)
    assert name == "cast_bf16"
    assert reason.endswith(
        "For inference: BF16 with cast weights (`cast_bf16`), 2.69x; for training: FP16 under autocast (`autocast_fp16`), 1.69x."
    )
    assert recommend(both, 0.01, "training")[0] == "autocast_fp16"


def test_of_two_as_fast_the_one_that_also_trains_then_the_closer_one() -> None:
    assert recommend(plans(named("cast_fp16", predicted_speedup=2.01), BASE), 0.01)[0] == "autocast_fp16"
    assert recommend(plans(BASE, named("autocast_bf16", predicted_speedup=3.0)), 0.01)[0] == "autocast_bf16"
    assert recommend(plans(BASE, named("autocast_bf16", measured_error=0.001)), 0.01)[0] == "autocast_bf16"


@pytest.mark.parametrize(("faster", "winner"), [(1.97, "fp16"), (2.02, "fp16"), (2.07, "bf16"), (4.0, "bf16")])
def test_within_the_noise_of_predicted_speeds_the_smaller_error_wins(faster: float, winner: str) -> None:
    close = replace(BASE, predicted_speedup=1.97, measured_error=0.0007)
    for speed in (1.0, 3.0):  # wherever a rounding of the speeds would lie
        pair = [
            replace(close, predicted_speedup=1.97 * speed),
            named("autocast_bf16", predicted_speedup=faster * speed, measured_error=0.0064),
        ]
        for order in (pair, pair[::-1]):
            assert recommend(plans(*order), 0.01)[0] == f"autocast_{winner}"


def test_for_memory_and_flops_the_faster_of_two_as_good_is_taken() -> None:
    for objective in ("memory", "flops"):
        alike = {"objective": objective, "memory": Memory(50, 50), "fp32_memory": FP32}
        fast = named("cast_bf16", predicted_speedup=2.5, measured_error=0.005, **alike)
        assert recommend(plans(replace(BASE, **alike), fast), 0.01)[0] == "cast_bf16"
        slower = replace(fast, predicted_speedup=2.01)
        assert recommend(plans(replace(BASE, **alike), slower), 0.01)[0] == BASE.name


def test_what_is_not_verified_or_not_low_is_not_recommended() -> None:
    assert recommend(plans(replace(BASE, verified=False), named("cast_fp16")), 0.01)[0] == "cast_fp16"
    nothing = replace(BASE, low_precision_flops=0.0, predicted_speedup=1.0)
    assert recommend(plans(nothing, named("cast_bf16")), 0.01)[0] == "cast_bf16"


def test_each_objective_has_its_best() -> None:
    slow = named("cast_fp16", predicted_speedup=1.5, low_precision_flops=0.95, memory=Memory(50, 50), fp32_memory=FP32)
    fast = replace(BASE, memory=Memory(100, 80), fp32_memory=FP32)
    for objective, best, worth in (
        ("time", "autocast_fp16", "2.00x"),
        ("memory", "cast_fp16", "50% of the memory"),
        ("flops", "cast_fp16", "95% of the FLOPs low"),
    ):
        name, reason = recommend(plans(*(replace(p, objective=objective) for p in (slow, fast))), 0.01)
        assert name == best
        assert f"(`{best}`), {worth}" in reason.partition("For inference: ")[2].partition(";")[0]


def test_nothing_trains() -> None:
    name, reason = recommend(plans(named("cast_fp16")), 0.01, "training")
    assert name is None
    assert "for inference, FP16 with cast weights (`cast_fp16`) holds it at 2.00x" in reason
    assert best_for(plans(named("cast_fp16")), "training") is None
    assert recommend(plans(named("cast_fp16")), 0.01)[1].endswith("for training: none was asked for.")
    broken = replace(BASE, verified=False)
    assert recommend(plans(named("cast_fp16"), broken), 0.01)[1].endswith("for training: none holds.")


def test_plans_that_hold_and_do_not_train_are_not_said_to_fail() -> None:
    for alone in ("cast_fp16", "graph_fp16"):
        chosen, reason = recommend(plans(named(alone)), 0.01, "training")
        assert chosen is None
        assert reason.startswith("No plan for training was asked for: those of strategy autocast are for it. ")
        assert f"for inference, FP16 {'as a graph' if alone.startswith('graph') else 'with cast weights'}" in reason
        assert "no plan holds" not in reason


def test_nothing_holds() -> None:
    name, reason = recommend(plans(replace(BASE, verified=False, measured_error=0.5)), 0.01)
    assert name is None
    assert "no plan holds an error of 0.01" in reason
    assert "the best that was reached is 0.5, by FP16 under autocast (`autocast_fp16`)" in reason
    still = named("cast_fp16", scopes={"": ScopeChoice("fp32")}, low_precision_flops=0.0, measured_error=0.0)
    assert recommend(plans(replace(still, predicted_speedup=1.0)), 0.01) == (
        None,
        "Run it in FP32: no plan holds an error of 0.01 with anything low.",
    )
    assert recommend(plans(replace(BASE, verified=False, measured_error=None)), 0.01)[0] is None
    assert recommend({}, 0.01)[0] is None


@pytest.mark.parametrize(("objective", "what"), [("time", "time"), ("memory", "memory"), ("flops", "FP32 FLOPs")])
def test_nothing_gains(objective: str, what: str) -> None:
    idle = (Reason("no-gain", "lowering it saves no time", ("",)),)
    whole = replace(BASE, scopes={"": ScopeChoice("fp32")}, low_precision_flops=0.0, predicted_speedup=1.0)
    found = plans(replace(whole, reasons=idle, least=(), objective=objective))
    assert outcome(found) == "saves nothing"
    assert recommend(found, 0.01) == (
        None,
        f"Run it in FP32: low precision holds an error of 0.01, but there is no {what} to gain by it.",
    )
    unsafe = (Reason("unsafe", "x is unsafe: it overflows", ("",)),)
    assert outcome(plans(replace(whole, reasons=unsafe))) == "out of reach"


def test_all_low_is_said_to_hold_only_where_a_run_was() -> None:
    """Alone each holds the budget: whether all of them do together is another run."""
    idle = (Reason("no-gain", "lowering it alone saves no time", ("a", "b"), adds=0.004, ran=True),)
    whole = replace(
        BASE, scopes={"": ScopeChoice("fp32")}, low_precision_flops=0.0, predicted_speedup=1.0, reasons=idle
    )
    said = "Run it in FP32: what holds an error of 0.01 in low precision saves no time."
    for least in (None, ("b",), ("a", "b")):
        assert recommend(plans(replace(whole, least=least)), 0.01) == (None, said)
    assert "but there is no time to gain" in recommend(plans(replace(whole, least=())), 0.01)[1]
    predicted = replace(whole, reasons=(replace(idle[0], ran=False),), least=("a", "b"))
    assert "no plan holds" in recommend(plans(predicted), 0.01)[1]


def test_where_nothing_runs_low_nobody_says_that_low_precision_holds() -> None:
    raised = (Reason("strategy", "autocast runs softmax in FP32 by itself", operations=("softmax",)),)
    idle = replace(BASE, low_precision_flops=0.0, predicted_speedup=1.0, measured_error=0.0, reasons=raised)
    assert outcome(plans(idle)) == "lowers nothing"
    assert recommend(plans(idle), 0.01) == (None, "Run it in FP32: nothing in it runs low under autocast.")
    both = plans(idle, named("cast_bf16"))
    assert recommend(both, 0.01)[1].endswith("for training: nothing runs low under autocast.")


def test_a_plan_that_holds_and_saves_nothing_says_so() -> None:
    more, less = (replace(BASE, objective="memory", memory=Memory(100, n), fp32_memory=FP32) for n in (100, 99))
    for plan, words in (
        (replace(BASE, predicted_speedup=0.97), "FP32, predicted to save no time."),
        (replace(BASE, predicted_speedup=1.0), "FP32, predicted to save no time."),
        (replace(BASE, predicted_speedup=1.01), "nothing has to stay FP32."),
        (more, "FP32, predicted to save no memory."),
        (less, "nothing has to stay FP32."),
        (replace(BASE, objective="flops", predicted_speedup=0.97), "nothing has to stay FP32."),
    ):
        assert words in recommend(plans(plan), 0.01)[1]


def test_a_mixture_that_is_slower_than_fp32_is_not_recommended() -> None:
    scopes = {**ROOT, "norm": ScopeChoice("fp32")}
    mixed = replace(BASE, scopes=scopes, predicted_speedup=0.97, reasons=(Reason("unsafe", "x is unsafe", ("norm",)),))
    said = "Run it in FP32: what holds an error of 0.01 in low precision saves no time."
    assert recommend(plans(mixed), 0.01) == (None, said)
    assert recommend(plans(mixed), 0.01, "training") == (None, said)
    assert recommend(plans(replace(mixed, objective="flops")), 0.01)[0] == mixed.name
    both = plans(mixed, named("cast_fp16"))
    assert recommend(both, 0.01)[0] == "cast_fp16"
    assert recommend(both, 0.01)[1].endswith("for training: none that holds saves time.")
    name, reason = recommend(both, 0.01, "training")
    assert (name, reason) == (
        None,
        f"{said} That is about training: for inference, FP16 with cast weights (`cast_fp16`) holds it at 2.00x.",
    )


def test_fp32_beside_which_a_part_could_be_low_is_not_said_to_fail() -> None:
    unsafe = Reason("unsafe", "x is unsafe: it overflows", ("body",))
    part = Reason("no-gain", "lowering it saves no time", ("head",), adds=0.001, ran=True)
    whole = replace(BASE, scopes={"": ScopeChoice("fp32")}, low_precision_flops=0.0, predicted_speedup=1.0)
    said = "Run it in FP32: what holds an error of 0.01 in low precision saves no time."
    assert recommend(plans(replace(whole, reasons=(unsafe, part))), 0.01) == (None, said)
    for other in (replace(part, adds=0.0), replace(part, kind="inherited")):
        assert "no plan holds" in recommend(plans(replace(whole, reasons=(unsafe, other))), 0.01)[1]


def test_a_format_is_said_to_have_nothing_only_under_the_strategy_that_has_nothing() -> None:
    chosen, other = named("cast_bf16", predicted_speedup=3.0), named("autocast_fp16")
    unsafe = (Reason("unsafe", "x is unsafe: it overflows", ("",)),)
    idle = replace(named("cast_fp16"), scopes={"": ScopeChoice("fp32")}, low_precision_flops=0.0, predicted_speedup=1.0)
    idle = replace(idle, reasons=unsafe)
    nothing = "has nothing low that gains anything within the budget"
    assert f"; FP16 with cast weights {nothing}." in recommend(plans(chosen, idle, other), 0.01)[1]
    assert f"; FP16 {nothing}." in recommend(plans(chosen, idle), 0.01)[1]
    broken = replace(idle, verified=False)
    assert "; FP16 with cast weights does not hold the budget." in recommend(plans(chosen, broken, other), 0.01)[1]
    assert "; FP16 does not hold the budget." in recommend(plans(chosen, broken), 0.01)[1]


def test_a_plan_that_raised_is_not_said_to_miss_the_budget() -> None:
    chosen, ran = named("cast_bf16", predicted_speedup=3.0), Verification(None, False, "audited", "emulated")
    refused = replace(named("cast_fp16"), verified=False, verification=replace(ran, failure="full has a literal"))
    assert "; FP16 fails to run." in recommend(plans(chosen, refused), 0.01)[1]
    endless = replace(refused, verification=ran)
    assert "; FP16 does not hold the budget." in recommend(plans(chosen, endless), 0.01)[1]


def test_the_sentence_holds_the_evidence() -> None:
    island = {**ROOT, "norm": ScopeChoice("fp32")}
    rival = named("autocast_bf16", verified=False, measured_error=0.5)
    _, reason = recommend(plans(replace(BASE, scopes=island), rival), 0.01)
    for word in ("FP16 under autocast", "0.002", "0.01", "90%", "1 module stays FP32", "BF16 does not hold the budget"):
        assert word in reason


@pytest.mark.parametrize(
    ("islands", "words"),
    [
        ((), "nothing has to stay FP32"),
        (("norm",), "1 module stays FP32"),
        (("norm", "head"), "2 modules stay FP32"),
    ],
)
def test_what_stays_fp32_is_counted(islands: tuple[str, ...], words: str) -> None:
    kept = replace(BASE, scopes={**ROOT, **{path: ScopeChoice("fp32") for path in islands}})
    assert f"{words}. For" in recommend(plans(kept), 0.01)[1]


def on_a_gpu(low: float, median: float, high: float, share: float = 0.6, decides: bool = True) -> Timed:
    """Times of a plan beside an FP32 that takes 1 s, give or take 0.1."""
    times = Times(median, low, high, 20, 1 / median, 0.9 / high, 1.1 / low)
    return Timed(eager=times, memory=60, memory_share=share, decides=decides)


def test_measured_times_decide_where_they_are_a_gpus() -> None:
    predicted = named("cast_fp16", predicted_speedup=4.0, timed=on_a_gpu(0.78, 0.8, 0.82))
    measured = replace(BASE, timed=on_a_gpu(0.58, 0.6, 0.62))
    name, reason = recommend(plans(predicted, measured), 0.01)
    assert name == "autocast_fp16"
    assert "for training: FP16 under autocast (`autocast_fp16`), 1.67x measured." in reason
    on_a_cpu = [replace(plan, timed=replace(plan.timed, decides=False)) for plan in (predicted, measured) if plan.timed]
    assert recommend(plans(*on_a_cpu), 0.01)[0] == "cast_fp16"


def test_what_repeats_do_not_tell_apart_is_as_fast() -> None:
    closer = replace(BASE, measured_error=0.001, timed=on_a_gpu(0.57, 0.64, 0.7))
    faster = named("autocast_bf16", measured_error=0.002, timed=on_a_gpu(0.55, 0.58, 0.6))
    assert recommend(plans(closer, faster), 0.01)[0] == "autocast_fp16"
    apart = replace(closer, timed=on_a_gpu(0.61, 0.64, 0.7))
    assert recommend(plans(apart, faster), 0.01)[0] == "autocast_bf16"


def test_a_plan_that_was_measured_to_be_slower_than_fp32_gains_nothing() -> None:
    slower = replace(BASE, timed=on_a_gpu(1.15, 1.2, 1.3))
    assert recommend(plans(slower), 0.01)[0] is None
    assert outcome(plans(slower)) == "saves nothing"
    untold = replace(BASE, timed=on_a_gpu(1.05, 1.2, 1.3))  # within the spread of both
    name, reason = recommend(plans(untold), 0.01)
    assert name == "autocast_fp16" and ", measured to save no time" in reason


def test_measured_memory_decides_where_memory_is_to_be_saved() -> None:
    asked = {"objective": "memory", "memory": Memory(50, 50), "fp32_memory": FP32}
    less = replace(BASE, **asked, timed=on_a_gpu(0.9, 0.9, 0.9, share=0.5))
    more = named("cast_fp16", **asked, timed=on_a_gpu(0.5, 0.5, 0.5, share=0.7))
    name, reason = recommend(plans(less, more), 0.01)
    assert name == "autocast_fp16" and "50% of the memory measured" in reason
