"""Every shipped rule fires where it must, node by node, and is silent where it must not fire; its own example is one case of each."""

import re

import pytest
import torch

from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule
from tests.rules import cases, more_cases
from tests.rules.cases import Case
from tests.support.capturing import captured

RULES = load_rules()
CASES = (*cases.CASES, *more_cases.CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_findings_name_exactly_the_expected_nodes(case: Case) -> None:
    torch.manual_seed(0)
    toy = captured(case.model(), *case.inputs)
    found: dict[str, set[str]] = {rule.code: set() for rule in RULES}
    for finding in classify(toy.capture, toy.facts, RULES):
        found[finding.rule].add(finding.node)
    expected = dict(case.fires) | {code: set() for code in case.silent}
    assert {code: found[code] for code in expected} == expected


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_every_op_a_rule_names_exists(rule: Rule) -> None:
    for op in [*rule.match.ops, *(op for node in rule.match.nodes.values() for op in node.ops)]:
        if "*" not in op and not op.startswith("auditor."):
            namespace, name, *overload = op.split(".")
            packet = getattr(getattr(torch.ops, namespace), name)
            assert not overload or overload[0] in packet.overloads()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_every_rule_cites_an_address_and_gives_code(rule: Rule) -> None:
    assert all(re.search(r"https://\S+$", reference) for reference in rule.references)
    assert "    " in rule.advice or rule.severity == "info"
