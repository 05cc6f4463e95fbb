"""Runs that are Inf or NaN in words; sentences are short, and say so too where the operation is not known."""

from dataclasses import replace

from auditor.records import NonFinite, Verdict, Verification
from auditor.report.reporters import REPORTERS, html
from auditor.report.view import ReportView
from tests.unit.report.factory import make_audit

ROOT, BEGINS = ("sqrt", "norm", "aten.sqrt.default", "unet.py:28"), ("sub", "norm", "aten.sub.Tensor", "unet.py:27")
FIRST = NonFinite(*ROOT, "NaN", "underflow", *BEGINS, ("RED004",))
UNKNOWN = Verification(None, False)


def audit(**baselines: Verification):
    made = make_audit()
    plans = {name: replace(plan, verification=None) for name, plan in made.plans.items()}
    return replace(made, baselines={**made.baselines, **baselines}, plans=plans)


def test_a_format_is_only_safe_alone_where_a_run_of_it_is_not_finite():
    safe = Verdict("safe", "")
    made = audit(autocast_fp16=UNKNOWN, cast_fp16=UNKNOWN)
    nodes = tuple(replace(node, verdicts={"fp16": safe, "bf16": safe}, errors={}) for node in made.nodes)
    made = replace(made, nodes=nodes)
    fp16, bf16 = (tally.sentence for tally in ReportView(made).tallies)
    assert fp16.endswith("is unsafe or sensitive when tested alone.")
    assert bf16.endswith("is unsafe or sensitive.")
    page = html(made)
    assert "In FP16 no single operation produces Inf or NaN, but the whole model in low precision does." in page
    assert "In BF16 no value that is finite in FP32 becomes Inf or NaN." in page


def test_a_run_that_turns_non_finite_by_underflow_does_not_make_the_format_overflow():
    vanished = replace(UNKNOWN, nonfinite=FIRST)
    made = audit(autocast_fp16=vanished, cast_fp16=vanished)
    safe, unsafe = Verdict("safe", ""), Verdict("unsafe", "", "range")
    first = replace(
        made.nodes[0], node=replace(made.nodes[0].node, name="sqrt"), verdicts={"fp16": unsafe, "bf16": safe}
    )
    made = replace(made, nodes=(replace(first, errors={}),))
    assert ReportView(made).tallies[0].limit == "underflow (BF16 has FP32's range)"


def test_a_run_of_no_plan_is_passed_over():
    """A plan.json that was edited by hand may hold runs under names that no plan of it has."""
    made, stray = replace(audit(), recommended=None), audit(exotic_fp16=UNKNOWN, magic=Verification(1e-9, True))
    stray = replace(stray, recommended=None)
    for name in ("text", "md", "github", "sarif"):
        assert REPORTERS[name](stray) == REPORTERS[name](made), name
    assert html(stray)
