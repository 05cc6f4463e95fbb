"""Every prediction of every rule against the measurement; prints the table that benchmarks/results/agreement.md holds."""

from functools import cache
from pathlib import Path

import pytest

from auditor.rulebook.facts import EACH
from auditor.rulebook.load import load_rules
from benchmarks.agreement import Agreement, agreement, specimens, table

pytestmark = pytest.mark.slow

RULES = tuple(rule for rule in load_rules() if EACH not in rule.formats)


@cache
def result() -> Agreement:
    return agreement(specimens(), RULES)


def test_every_model_can_be_confronted() -> None:
    print(table(result(), RULES))
    assert result().raised == {}


def test_every_failing_case_is_foreseen() -> None:
    assert result().unforeseen == ()


def test_a_warning_of_more_than_low_confidence_is_borne_out_in_its_own_example() -> None:
    claims = [rule.code for rule in RULES if rule.severity == "warning" and rule.confidence != "low"]
    assert [code for code in claims if result().own.get(code) == "safe"] == []
    errors = [rule.code for rule in RULES if rule.severity == "error"]
    assert [code for code in errors if result().own.get(code) not in ("unsafe", "", None)] == []


def test_the_document_holds_these_numbers(root: Path) -> None:
    rows = [line for line in table(result(), RULES).splitlines() if line.startswith("| ")]
    text = (root / "benchmarks" / "results" / "agreement.md").read_text(encoding="utf-8")
    assert [row for row in rows if row not in text] == [], (
        "run `PYTHONPATH=tests/stubs python -m benchmarks.agreement > benchmarks/results/agreement.md`"
    )
