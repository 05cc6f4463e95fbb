"""No threshold of a rule moves unnoticed: at each one, a case just below it and a case just above it."""

from __future__ import annotations

import pytest

from auditor.rulebook.load import load_rules
from tests.rules.thresholds import Entry, departure, entries, line_for, neighbours, thresholds

RULES = load_rules()
FOUND = thresholds(RULES)
ENTRIES = entries()


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_threshold_stands_between_two_neighbours(entry: Entry) -> None:
    assert departure(FOUND, entry) == []


def test_every_threshold_has_its_line() -> None:
    known = {(entry.code, entry.key) for entry in ENTRIES}
    missing = {f"[{item.code}]\n{line_for(item)}" for item in FOUND if (item.code, item.key) not in known}
    assert not missing, "add to tests/rules/thresholds.toml:\n" + "\n".join(sorted(missing))


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_line_leaves_no_room_and_gives_its_reason(entry: Entry) -> None:
    fact = entry.key.split(": ")[-1].split()[0]
    assert neighbours(entry, fact)
    assert entry.why


@pytest.mark.parametrize("code", sorted({rule.code for rule in RULES}))
def test_no_condition_of_a_rule_compares_twice_under_one_key(code: str) -> None:
    """A line of thresholds.toml must mean one number; nodes of a chain that differ have names that differ."""
    bounds: dict[str, set[float]] = {}
    for item in FOUND:
        if item.code == code:
            bounds.setdefault(item.key, set()).add(item.bound)
    assert [key for key, values in bounds.items() if len(values) > 1] == []
