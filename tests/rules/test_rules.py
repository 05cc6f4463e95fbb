"""Every shipped rule fires where it must, node by node, and stays silent where it must not fire."""

from __future__ import annotations

import re

import pytest
import torch

from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Match, Rule
from tests.rules import (
    cases_activations,
    cases_boundary,
    cases_linalg,
    cases_norms,
    cases_others,
    cases_positions,
    cases_recurrent,
    cases_reductions,
    cases_routing,
    cases_softmax,
    cases_systems,
)
from tests.rules.case import Case
from tests.support.capturing import captured

RULES = load_rules()
MODULES = (
    cases_norms,
    cases_softmax,
    cases_boundary,
    cases_linalg,
    cases_recurrent,
    cases_others,
    cases_reductions,
    cases_positions,
    cases_routing,
    cases_activations,
    cases_systems,
)
CASES = [case for module in MODULES for case in module.CASES]
FAMILIES = set(
    "norms softmax boundary linalg recurrent attention losses reductions constants positions routing activations "
    "collectives training hardware".split()
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_findings_name_exactly_the_expected_nodes(case: Case) -> None:
    toy = captured(case.model(), *case.inputs)
    found: dict[str, set[str]] = {rule.code: set() for rule in RULES}
    for finding in classify(toy.capture, toy.facts, RULES):
        found[finding.rule].add(finding.node)
    expected = dict(case.fires) | {code: set() for code in case.silent}
    assert {code: found[code] for code in expected} == expected


# What the rules of the other two families fire on, measurements and settings, is in tests/unit/rulebook/test_findings.py.
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.family in FAMILIES], ids=lambda rule: rule.code)
def test_every_rule_has_two_cases_of_each_kind(rule: Rule) -> None:
    assert sum(rule.code in case.fires for case in CASES) >= 2
    assert sum(rule.code in case.silent for case in CASES) >= 2


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_every_op_a_rule_names_exists(rule: Rule) -> None:
    for op in _ops(rule.match):
        if "*" not in op and op != "auditor.ignore":
            namespace, name, *overload = op.split(".")
            packet = getattr(getattr(torch.ops, namespace), name)
            assert not overload or overload[0] in packet.overloads()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_every_rule_cites_an_address_and_gives_code(rule: Rule) -> None:
    assert all(re.search(r"https://\S+$", reference) for reference in rule.references)
    assert "    " in rule.advice or rule.severity == "info"


def _ops(match: Match) -> list[str]:
    return [*match.ops, *(op for node in match.nodes.values() for op in node.ops)]
