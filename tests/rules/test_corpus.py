"""The failures of the corpus are foreseen: those that an operation, a literal or a dtype gives away, before any tensor is run."""

from __future__ import annotations

import pytest

from auditor.numerics.operations import operation
from auditor.records import Finding
from auditor.rulebook.findings import classify
from auditor.rulebook.gather import gather
from auditor.rulebook.load import load_rules
from tests.corpus.case import Case
from tests.corpus.catalogue import CASES
from tests.support.capturing import captured

RULES = tuple(rule for rule in load_rules() if rule.severity != "info" and rule.family != "measured")
STATIC = [case for case in CASES if case.evidence == "static"]


def foreseen(case: Case, *, ranges: bool) -> list[Finding]:
    """Warnings and errors on a culprit, about a format in which the case fails; without ranges no tensor is run."""
    model, inputs = case.build()
    toy = captured(model, *inputs)
    held = {place.name for place in toy.capture.placeholders if place.kind != "input"}
    weights = {name: span for name, span in toy.ranges.items() if name in held}
    facts = toy.facts if ranges else gather(toy.capture, weights)
    return [
        finding
        for finding in classify(toy.capture, facts, RULES)
        if set(finding.formats) & set(case.formats) and is_culprit(finding, case)
    ]


def is_culprit(finding: Finding, case: Case) -> bool:
    names = {operation(finding.op).name, "to" if finding.op.startswith("aten._to_copy.") else ""}
    return any(op in names and finding.owner.startswith(owner) for op, owner in case.culprits)


@pytest.mark.parametrize("case", STATIC, ids=lambda case: case.name)
def test_static_failures_are_foreseen_without_running_anything(case: Case) -> None:
    assert foreseen(case, ranges=False)


@pytest.mark.parametrize("case", [case for case in CASES if case not in STATIC], ids=lambda case: case.name)
def test_the_others_are_foreseen_from_the_magnitudes_of_one_run_in_fp32(case: Case) -> None:
    assert foreseen(case, ranges=True)
