"""Runs that are Inf or NaN in words; sentences are short, and say so too where the operation is not known."""

from __future__ import annotations

from dataclasses import replace

from auditor.records import Baseline, NonFinite, Verdict, Verification
from auditor.report.origins import nonfinite_runs
from auditor.report.reporters import html
from auditor.report.view import view
from tests.unit.report.factory import make_audit

FIRST = NonFinite(
    "sqrt",
    "norm",
    "aten.sqrt.default",
    "unet.py:28",
    "NaN",
    "cancellation",
    "sub",
    "norm",
    "aten.sub.Tensor",
    "unet.py:27",
    ("RED004",),
)
HERE = replace(FIRST, cause="overflow", begins=FIRST.node, begins_op=FIRST.op, rules=())
UNKNOWN = Baseline(None, False)
KNOWN = Baseline(None, False, nonfinite=FIRST)


def audit(**baselines: Baseline):
    made = make_audit()
    plans = {name: replace(plan, verification=None) for name, plan in made.plans.items()}
    return replace(made, baselines={**made.baselines, **baselines}, plans=plans)


def said(made) -> list[str]:
    return [run.said for run in nonfinite_runs(made)]


def test_strategies_with_one_cause_are_one():
    assert said(audit(autocast_fp16=KNOWN, cast_fp16=KNOWN)) == [
        "FP16 under autocast and with cast weights, without a plan: outputs turn NaN at sqrt in norm (unet.py:28). "
        "The cause is cancellation at sub in norm (unet.py:27); see RED004."
    ]


def test_what_has_another_cause_stands_apart():
    found = said(audit(autocast_fp16=KNOWN, cast_fp16=replace(UNKNOWN, nonfinite=HERE), cast_bf16=UNKNOWN))
    assert found[1] == (
        "FP16 with cast weights, without a plan: outputs turn NaN at sqrt in norm (unet.py:28). "
        "The cause is overflow of that operation."
    )
    assert found[2] == (
        "BF16 with cast weights, without a plan: outputs turn Inf or NaN. "
        "The recorded graph does not show at which operation."
    )


def test_a_plan_that_is_not_finite_was_run_and_says_so():
    made = audit(autocast_fp16=Baseline(0.1, True), cast_fp16=Baseline(0.1, True))
    ran = Verification(None, False, "audited", "emulated", nonfinite=FIRST)
    plan = replace(made.plans["cast_fp16"], measured_error=None, verified=False, verification=ran)
    made = replace(made, plans={**made.plans, plan.name: plan})
    assert said(made)[0].startswith("The plan FP16 with cast weights: outputs turn NaN at sqrt in norm (unet.py:28).")
    shown = next(one for one in view(made).plans if one.plan is plan)
    assert (shown.verdict, shown.detail) == ("non-finite", "an output is Inf or NaN where FP32 is finite")


def test_a_format_is_only_safe_alone_where_a_run_of_it_is_not_finite():
    safe = Verdict("safe", "")
    made = audit(autocast_fp16=UNKNOWN, cast_fp16=UNKNOWN)
    nodes = tuple(replace(node, verdicts={"fp16": safe, "bf16": safe}, errors={}) for node in made.nodes)
    made = replace(made, nodes=nodes)
    fp16, bf16 = view(made).contrast
    assert fp16.endswith("is unsafe or sensitive alone.")
    assert bf16.endswith("is unsafe or sensitive.")
    page = html(made)
    assert "In FP16 no operation alone makes Inf or NaN: the run of the whole model does." in page
    assert "In BF16 no value that is finite in FP32 becomes Inf or NaN." in page


def test_a_run_that_turns_non_finite_by_underflow_does_not_make_the_format_overflow():
    vanished = replace(UNKNOWN, nonfinite=replace(FIRST, cause="underflow"))
    made = audit(autocast_fp16=vanished, cast_fp16=vanished)
    safe, unsafe = Verdict("safe", ""), Verdict("unsafe", "", "range")
    first = replace(
        made.nodes[0], node=replace(made.nodes[0].node, name="sqrt"), verdicts={"fp16": unsafe, "bf16": safe}
    )
    made = replace(made, nodes=(replace(first, errors={}),))
    assert view(made).tallies[0].limit == "underflow (BF16 has FP32's range)"
