"""The user's own score in words: of the FP32 model, of each plan, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..plan.clauses import apart
from ..records import Evaluation, Score
from ..records.audit import Audit
from .words import count

NEAR = 2.0
"""Standard errors from the limit within which other samples might tell otherwise."""


@dataclass(frozen=True)
class ScoreView:
    """headline: the function, and the FP32 model's score. plans: by name, the score of those that have one."""

    headline: str
    plans: Mapping[str, str]


def score_view(audit: Audit) -> ScoreView | None:
    """What there is to say of the user's own score; None where there was no function."""
    found = audit.evaluation
    if found is None:
        return None
    mean = f"the mean of {count(found.samples, 'number')}" if found.samples and found.samples > 1 else ""
    of = f"{found.of_mean} of {mean or 'it'}, " if found.of_mean else f"{mean}, " if mean else ""
    allowed = "it is not judged" if found.max_drop is None else f"a plan may be {_limit(found.max_drop)}"
    runs = [plan.score for plan in audit.plans.values() if plan.score is not None]
    again = f", and again under {count(len(runs), 'plan')}" if runs else ""
    headline = (
        f"{found.function} gives {found.score:.5g} in FP32, {of}in {count(found.calls, 'call')} of the model{again}; "
        f"{found.better} is better, and {allowed}."
    )
    return ScoreView(headline, {name: _words(found, p.score) for name, p in audit.plans.items() if p.score is not None})


def _words(found: Evaluation, score: Score) -> str:
    if score.failure is not None:
        return f"no score: {score.failure}"
    assert score.value is not None
    assert score.difference is not None
    drop = -score.difference if found.better == "higher" else score.difference
    drop += 0.0  # no negative zero
    size, limit = apart(abs(drop), found.max_drop) if found.max_drop and drop > 0 else (f"{abs(drop):.2g}", "")
    error = "" if score.standard_error is None else f" (standard error {score.standard_error:.2g})"
    change = f"{size} {'worse' if drop > 0 else 'better'}{error}" if drop else f"as in FP32{error}"
    return f"{score.value:.5g}, {change}{_judged(found, score, drop, limit)}"


def _judged(found: Evaluation, score: Score, drop: float, limit: str) -> str:
    if score.passed is None or found.max_drop is None:
        return ""
    near = score.standard_error is not None and abs(drop - found.max_drop) < NEAR * score.standard_error
    doubt = "; so near the limit that other samples may tell otherwise" if near else ""
    verdict = "passes" if score.passed else f"fails, {limit or f'{found.max_drop:g}'} is allowed"
    return f": {verdict}{doubt}"


def _limit(max_drop: float) -> str:
    return f"at most {max_drop:g} worse" if max_drop else "no worse"


def advice(audit: Audit) -> str:
    """What to do where plans are left out for their score alone."""
    if any(
        plan.score is not None and plan.score.passed is False and not plan.score.failure
        for plan in audit.plans.values()
    ):
        return "Allow a larger drop with --max-drop, or ask for smaller errors with --max-error."
    return "The function gives no score under them: the plans below say why."
