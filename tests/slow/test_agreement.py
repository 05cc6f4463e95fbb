"""Every prediction of every rule against the measurement; prints the table that docs/agreement.md holds."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from auditor.rulebook import load_rules
from tests.slow.agreement import Agreement, agreement, specimens, table

pytestmark = pytest.mark.slow

RULES = load_rules()
ENOUGH = 5
BOUNDS = {"high": (0.6, 1.0), "medium": (0.2, 1.0), "low": (0.0, 0.6)}
"""What share of a rule's predictions the measurement bears out, by the confidence in its file."""


@cache
def result() -> Agreement:
    return agreement(specimens(), RULES)


def test_every_model_can_be_confronted() -> None:
    print(table(result(), RULES))
    assert result().raised == {}


def test_every_failing_case_is_foreseen() -> None:
    assert result().unforeseen == ()


def test_confidence_says_how_often_the_measurement_agrees() -> None:
    shares = {
        rule: sum(tally.agreed.values()) / sum(tally.fired.values())
        for rule in RULES
        if sum((tally := result().tallies[rule.code]).fired.values()) >= ENOUGH
    }
    off = [
        f"{rule.code} says {rule.confidence}, and {share:.0%} of its predictions hold"
        for rule, share in shares.items()
        if not BOUNDS[rule.confidence][0] <= share <= BOUNDS[rule.confidence][1]
    ]
    assert off == []


def test_the_document_speaks_of_the_rules_as_they_are(root: Path) -> None:
    text = (root / "docs" / "agreement.md").read_text(encoding="utf-8")
    written = {row[0]: row[1:] for row in re.findall(r"(?m)^\| ([A-Z]{3}\d{3}) \| ([\w-]+) \| (\w+) \| (\w+) \|", text)}
    held = {rule.code: (rule.name, rule.severity, rule.confidence) for rule in RULES}
    assert {code: held[code] for code in written} == written
    assert {rule.code for rule in RULES if rule.severity != "info"} <= written.keys()
