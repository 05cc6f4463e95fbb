"""The user's own score stands in every report, with the numbers of plan.json, and comes back from the files."""

from __future__ import annotations

from dataclasses import replace

from auditor.records import Audit, Evaluation, Score
from auditor.report.criteria import advice, score_headline
from auditor.report.reporters import REPORTERS
from tests.unit.report.factory import make_audit

FP32 = Evaluation("scores.py:accuracy", "higher", 0.01, 0.986111, 360, None, 6)
SCORES = (
    Score(0.983333, -0.0027778, 0.0027778, True),
    Score(0.95, -0.036111, 0.0099, False),
    Score(None, passed=False, failure="it <b>raised</b>"),
)


def audit() -> Audit:
    made = make_audit(6)
    scores = dict(zip(made.plans, SCORES, strict=False))
    plans = {name: replace(plan, score=scores.get(name)) for name, plan in made.plans.items()}
    return replace(made, evaluation=FP32, plans=plans)


def test_every_report_has_the_scores() -> None:
    found = audit()
    for name in ("text", "md", "html"):
        flat = " ".join(REPORTERS[name](found).replace("\\", "").split())
        assert "scores.py:accuracy gives 0.98611 in FP32" in flat
        assert "0.98333, 0.0028 worse (standard error 0.0028): passes" in flat
        assert "0.95, 0.036 worse (standard error 0.0099): fails, 0.01 is allowed" in flat
    assert "it <b>raised</b>" not in REPORTERS["html"](found)


def test_a_function_of_the_mean_is_named() -> None:
    of_mean = replace(audit(), evaluation=replace(FP32, of_mean="exp"))
    assert "gives 0.98611 in FP32, exp of the mean of 360 numbers, in 6 calls" in score_headline(of_mean)
    single = replace(audit(), evaluation=replace(FP32, samples=None))
    assert "gives 0.98611 in FP32, in 6 calls" in score_headline(single)
    assert score_headline(make_audit(6)) == ""


def test_the_advice_is_about_the_limit_only_where_a_score_is_beyond_it() -> None:
    found = audit()
    assert "--max-drop" in advice(found)
    failed = {name: replace(plan, score=SCORES[2]) for name, plan in found.plans.items()}
    assert advice(replace(found, plans=failed)) == "The function gives no score under them: the plans below say why."
