"""The example in each rule file fires its rule, and the repaired one does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from auditor.asked import Command, command_of
from auditor.loading import from_object
from auditor.rulebook.facts import EACH
from auditor.rulebook.findings import classify, silenced
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule
from tests.rules.examples import Side, example
from tests.slow.agreement import Specimen, found_in
from tests.support.capturing import captured
from tests.support.findings import finding

RULES = load_rules()
APART = ("linalg", "recurrent")
"""Families with operations that can not even be traced in half precision; others would lose that trace with them."""
GROUPS = {
    **{name: [rule for rule in RULES if rule.family == name] for name in APART},
    "others": [rule for rule in RULES if rule.family not in (*APART, "measured", "settings")],
}


def fired(rules: list[Rule], *, fixed: bool) -> dict[str, set[str]]:
    """Codes that fire on each rule's example; captured as one model, which takes a tenth of the time."""
    parts: list[tuple[str, nn.Module, int]] = []
    inputs = []
    for rule in rules:
        model, tensors = example(rule, fixed=fixed)
        parts.append((rule.code, model, len(tensors)))
        inputs += tensors
    toy = captured(Side(parts), *inputs)
    found: dict[str, set[str]] = {rule.code: set() for rule in rules}
    for one in classify(toy.capture, toy.facts, RULES):
        found[one.owner.partition(".")[0]].add(one.rule)
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_every_example_fires_its_rule(group: str) -> None:
    found = fired(GROUPS[group], fixed=False)
    assert [code for code, codes in found.items() if code not in codes] == []


@pytest.mark.parametrize("group", GROUPS)
def test_a_repaired_example_does_not_fire_its_rule_and_has_less_to_say(group: str) -> None:
    repaired = [rule for rule in GROUPS[group] if rule.example and rule.example.fixed]
    before, after = fired(repaired, fixed=False), fired(repaired, fixed=True)
    assert [code for code, codes in after.items() if code in codes] == []
    assert [code for code, codes in after.items() if len(codes) > len(before[code])] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_that_warns_shows_a_repair(rule: Rule) -> None:
    assert rule.example is not None
    assert rule.example.fixed or rule.severity == "info" or rule.family == "measured"


def test_the_examples_of_measured_rules_are_found_unsafe_and_foreseen_by_no_other() -> None:
    for rule in RULES:
        if rule.family == "measured" and EACH not in rule.formats:
            found = found_in(Specimen(rule.code, lambda rule=rule: from_object(*example(rule)), failing=True), RULES)
            assert {(one.rule, one.agrees) for one in found} == {("MSR001", True), ("MSR002", True)}


def test_the_example_of_an_unused_ignore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (rule,) = (rule for rule in RULES if rule.code == "CFG001")
    assert rule.example is not None
    norm = finding("NRM001", "pow_1", owner="blocks.0.ln")
    file = tmp_path / "pyproject.toml"
    file.write_text(rule.example.code)
    found = command_of({}, Command)
    assert [item.rule for item in silenced((norm,), found.select, found.ignores, RULES)] == ["NRM001", "CFG001"]
    file.write_text(rule.example.fixed)
    assert silenced((norm,), (found := command_of({}, Command)).select, found.ignores, RULES) == ()
