"""What is said of criteria: every sentence on an audit on which it is true, its numbers held against the plan's."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import CriterionValue
from auditor.records.audit import Audit
from auditor.report.criteria import criteria_lines, missed_criteria, shown_value
from auditor.report.view import following, view
from auditor.report.words import percent
from tests.support.subjects import normal


class Head(nn.Module):
    """Positions in pixels beside logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.place, self.kind = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = torch.relu(self.body(x))
        return {"places": 500 + 100 * self.place(seen), "logits": self.kind(seen)}


@cache
def audited(*criteria: str) -> Audit:
    return auditor.audit(Head().eval(), normal(8, 6), device="cpu", criteria=criteria)


ASKED = ("places: max_abs <= 0.5", "logits: kl <= 0.001")


def made(value: float | None, limit: float = 0.5, holds: bool = True, share: float | None = 0.5) -> CriterionValue:
    return CriterionValue("y", "max_abs", "<=", limit, value, share, holds)


@pytest.mark.parametrize(
    ("value", "limit", "said"),
    [
        (0.25, 0.5, "0.25"),
        (0.123456, 0.5, "0.123"),
        (0.50004, 0.5, "0.50004"),
        (0.49999, 0.5, "0.49999"),
        (0.99996, 0.9, "0.99996"),
        (1e-9, 0.0, "1e-09"),
        (1.0, 0.5, "1"),
        (None, 0.5, "not there"),
    ],
)
def test_a_value_keeps_to_its_side_of_the_limit(value: float | None, limit: float, said: str) -> None:
    assert shown_value(made(value, limit)) == said
    assert shown_value(replace(made(None), share=None)) == "not finite"


def test_a_line_says_what_the_plan_and_the_format_without_it_came_to() -> None:
    audit = audited(*ASKED)
    for name, plan in audit.plans.items():
        lines = criteria_lines(plan, audit.baselines[name])
        values = plan.verification.criteria
        most = max(values, key=lambda one: one.share)
        for line, one, before in zip(lines, values, audit.baselines[name].criteria, strict=True):
            said = re.fullmatch(
                rf"{one.output}: {one.kind} (\S+), at most {one.limit:g}(: does not hold)?(, nearest to its limit)?"
                r"(; without the plan (\S+))?",
                line,
            )
            assert said is not None, line
            assert float(said[1]) == pytest.approx(one.value, rel=0.01)
            assert bool(said[2]) is not one.holds
            assert bool(said[3]) is (one is most and one.holds and one.share > 0)
            assert (said[5] is None) is (before.value == one.value)
            assert said[5] is None or float(said[5]) == pytest.approx(before.value, rel=0.01)


def test_what_does_not_hold_is_named() -> None:
    assert missed_criteria([made(0.25), made(0.75, holds=False)]) == "y: max_abs 0.75, at most 0.5: does not hold"
    assert missed_criteria([made(0.25)]) == ""
    audit = audited(*ASKED)
    plan = audit.plans["cast_bf16"]
    broken = replace(plan, verified=False, verification=replace(plan.verification, criteria=(made(0.75, holds=False),)))
    shown = next(p for p in view(replace(audit, plans={**audit.plans, "cast_bf16": broken})).plans if p.plan is broken)
    assert (shown.verdict, shown.detail) == ("over budget", "y: max_abs 0.75, at most 0.5: does not hold")


def test_the_recommendation_and_the_proof_speak_of_the_criteria() -> None:
    audit = audited(*ASKED)
    plan = audit.plans[audit.recommended]
    most = max(plan.verification.criteria, key=lambda one: one.share)
    assert f"measured error {most.share:.2g} within every criterion" in audit.recommendation
    proof = view(audit).proof
    assert f"all limits hold; the tightest uses {percent(most.share)}" in proof


def test_where_no_plan_holds_the_next_step_is_a_criterion() -> None:
    audit = audited("places: max_abs <= 1e-7")
    assert audit.recommended is None
    said = following(replace(audit, findings=(), subject=replace(audit.subject, random_weights=False)), Path("out"))
    assert said == "loosen a criterion: out/report.html says what each came to under every plan."
