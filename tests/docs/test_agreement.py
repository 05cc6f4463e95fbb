"""benchmarks/results/agreement.md against the rules: what a rule claims of itself follows from how it fared."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from auditor.rulebook.facts import EACH
from auditor.rulebook.load import load_rules

RULES = {rule.code: rule for rule in load_rules() if EACH not in rule.formats}
"""Those of no certain format speak of FP8 and what is registered, which the table leaves out."""
ENOUGH = 5
BOUNDS = {"high": (0.6, 1.0), "medium": (0.2, 1.0), "low": (0.0, 0.6)}
"""What share of a rule's predictions the measurement bears out, by the confidence in its file."""


@dataclass(frozen=True)
class Row:
    """A line of the table; fired, agreed: operations, over failing and sound models."""

    claims: tuple[str, str, str]
    fired: int
    agreed: int
    own: str


@pytest.fixture(scope="module")
def rows(root: Path) -> dict[str, Row]:
    text = (root / "benchmarks" / "results" / "agreement.md").read_text(encoding="utf-8")
    found = {}
    for line in re.findall(r"(?m)^\| [A-Z]{3}\d{3} \|.*$", text):
        code, name, severity, confidence, *shares, own = (cell.strip() for cell in line.strip("|").split("|"))
        counts = [tuple(map(int, share.split(" of "))) for share in shares if share]
        found[code] = Row((name, severity, confidence), sum(c[1] for c in counts), sum(c[0] for c in counts), own)
    return found


def test_it_speaks_of_the_rules_as_they_are(rows: dict[str, Row]) -> None:
    held = {code: (RULES[code].name, RULES[code].severity, RULES[code].confidence) for code in rows}
    assert {code: row.claims for code, row in rows.items()} == held


def test_severity_follows_from_what_happens_in_the_rules_own_example(rows: dict[str, Row]) -> None:
    asked = {"error": {"unsafe"}, "warning": {"unsafe", "sensitive"}}
    off = {
        code: (row.claims, row.own)
        for code, row in rows.items()
        if row.claims[1] != "info" and row.claims[2] != "low" and row.own not in asked[row.claims[1]]
    }
    assert off == {}


def test_confidence_follows_from_how_often_the_measurement_agrees(rows: dict[str, Row]) -> None:
    off = {
        code: f"{row.claims[2]}, and {row.agreed} of {row.fired} predictions hold"
        for code, row in rows.items()
        if row.fired >= ENOUGH and not BOUNDS[row.claims[2]][0] <= row.agreed / row.fired <= BOUNDS[row.claims[2]][1]
    }
    assert off == {}
