"""Criteria and the user's score in words: values, the tightest limit, and suggestions."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.reasons import tell_apart
from ..records import CriterionValue, Evaluation, Plan, Proposal, Score, Verification
from ..records.audit import Audit
from .words import count

SHARES = "Errors are values divided by their limits, for the tightest criterion: 1 is the limit."
"""The meaning of a plan's errors where criteria are set."""
NEAR = 2.0
"""Distance from a score's limit, in standard errors, below which other samples may give another result."""


def criteria_lines(plan: Plan, baseline: Verification | None) -> tuple[str, ...]:
    """A line for each criterion of a plan: exceeded limits first, then by the share used."""
    ran = plan.verification
    values = ran.criteria if ran is not None and not ran.failure else ()
    most = max(values, key=lambda one: one.share or 0.0) if len(values) > 1 else None
    before = {(one.output, one.kind): one for one in baseline.criteria} if baseline and not baseline.failure else {}
    lines = []
    for one in sorted(values, key=lambda one: (one.holds, -(one.share or 0.0))):
        nearest = ", nearest to its limit" if one is most and one.share and one.holds else ""
        was = before.get((one.output, one.kind), one)
        without = f"; without the plan {shown_value(was)}" if was.value != one.value else ""
        lines.append(f"{_limit_line(one)}{nearest}{without}")
    return tuple(lines)


def missed_criteria(values: Sequence[CriterionValue]) -> str:
    """The criteria whose limit is exceeded, with their values."""
    return "; ".join(_limit_line(one) for one in values if not one.holds)


def _limit_line(one: CriterionValue) -> str:
    allowed = "at most" if one.sign == "<=" else "at least"
    broken = "" if one.holds else ": limit exceeded"
    told = "" if one.predicted is None else f" ({one.predicted:.3g} predicted)"
    return f"{one.output}: {one.kind} {shown_value(one)}{told}, {allowed} {one.limit:.12g}{broken}"


def shown_value(one: CriterionValue) -> str:
    """The value, with enough digits to show whether it exceeds the limit or differs from the end of a scale."""
    if one.value is None:
        return "not finite" if one.share is None else "not there"
    for digits in range(3, 17):
        text = f"{one.value:.{digits}g}"
        near = float(text)
        same = [(near < mark, near > mark) == (one.value < mark, one.value > mark) for mark in (one.limit, 0.0, 1.0)]
        if all(same):
            return text
    return repr(one.value)


def proposal_words(offer: Proposal) -> str:
    """A suggested criterion, with the option that sets it."""
    if offer.holds:
        allowing = offer.criterion.replace("<= 0", "<= X")
        return (
            f"By default no entry of {offer.output} may differ from FP32's ({offer.because}): --criterion '{allowing}' allows a "
            "share X of them."
        )
    return f"Output {offer.output!r}: {offer.because}. To set a limit: --criterion '{offer.criterion}'"


def score_headline(audit: Audit) -> str:
    """The user's scoring function and the FP32 model's score; nothing without one."""
    base = audit.evaluation
    if base is None:
        return ""
    mean = f"the mean of {count(base.samples, 'number')}" if base.samples and base.samples > 1 else ""
    of = f"{base.of_mean} of {mean or 'it'}, " if base.of_mean else f"{mean}, " if mean else ""
    worse = f"at most {base.max_drop:g} worse" if base.max_drop else "no worse"
    allowed = "the score rejects no plan" if base.max_drop is None else f"a plan may be {worse}"
    runs = sum(plan.score is not None for plan in audit.plans.values())
    again = f", and again under {count(runs, 'plan')}" if runs else ""
    return (
        f"{base.function} gives {base.score:.5g} in FP32, {of}in {count(base.calls, 'call')} of "
        f"the model{again}; {base.better} is better, and {allowed}."
    )


def score_words(base: Evaluation | None, score: Score | None) -> str:
    """The score under a plan; nothing without one."""
    if base is None or score is None:
        return ""
    if score.failure is not None:
        return f"no score: {score.failure}"
    assert score.value is not None
    assert score.difference is not None
    drop = -score.difference if base.better == "higher" else score.difference
    drop += 0.0  # no negative zero
    size, limit = tell_apart(abs(drop), base.max_drop) if base.max_drop and drop > 0 else (f"{abs(drop):.2g}", "")
    error = "" if score.standard_error is None else f" (standard error {score.standard_error:.2g})"
    change = f"{size} {'worse' if drop > 0 else 'better'}{error}" if drop else f"as in FP32{error}"
    said = f"{score.value:.5g}, {change}"
    if score.passed is None or base.max_drop is None:
        return said
    near = score.standard_error is not None and abs(drop - base.max_drop) < NEAR * score.standard_error
    doubt = "; so close to the limit that other samples may give another result" if near else ""
    verdict = "passes" if score.passed else f"fails: at most {limit or format(base.max_drop, 'g')} is allowed"
    return f"{said}: {verdict}{doubt}"


def advice(audit: Audit) -> str:
    """What to do where plans are rejected only for their score."""
    scores = [plan.score for plan in audit.plans.values() if plan.score is not None]
    if any(score.passed is False and not score.failure for score in scores):
        return "Allow a larger drop with --max-drop, or ask for smaller errors with --max-error."
    return "The function returns no score under these plans; the reasons are listed with the plans."
