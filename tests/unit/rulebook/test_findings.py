"""Rules against measurements, and against what the user silences; every case is worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from auditor.config import Ignore
from auditor.records import Finding, Verdict
from auditor.rulebook.findings import classify, confronted, silenced
from auditor.rulebook.gather import gather
from auditor.rulebook.load import load_rules
from tests.support.capturing import captured
from tests.support.findings import finding as made

RULES = load_rules()
UNSAFE, SAFE, UNTESTED = Verdict("unsafe", "overflow"), Verdict("safe", "fine"), Verdict("untested", "not reached")


def finding(
    rule: str, node: str, owner: str = "", severity: str = "warning", formats: tuple[str, ...] = ("fp16",)
) -> Finding:
    return made(rule, node, owner=owner, severity=severity, formats=formats)


def unmeasurable(rule: str, node: str, owner: str) -> Finding:
    return replace(finding(rule, node, owner), measurable=False)


def codes(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(item.rule, item.node) for item in findings]


def test_the_measurement_wins() -> None:
    rules = [finding("NRM001", name) for name in ("agrees", "differs", "untested", "unknown")]
    verdicts = {"agrees": {"fp16": UNSAFE}, "differs": {"fp16": SAFE}, "untested": {"fp16": UNTESTED}}
    found = confronted(rules, verdicts)
    assert [(item.agrees, item.severity) for item in found] == [
        (True, "warning"),
        (False, "info"),
        (None, "warning"),
        (None, "warning"),
    ]


def test_an_unsafe_node_that_no_rule_foresaw_is_reported() -> None:
    verdicts = {"a": {"fp16": UNSAFE}, "b": {"fp16": UNSAFE}, "c": {"fp16": UNSAFE}, "d": {"fp16": UNSAFE}}
    found = confronted(
        [
            finding("NRM001", "a", "block.norm"),
            finding("MSR001", "a", "block.norm"),  # explained by the line above
            finding("MSR001", "b", "block.norm"),  # its module is explained
            finding("NRM004", "c", "block.other", severity="info"),
            finding("MSR001", "c", "block.other"),  # an info explains nothing
            finding("MSR001", "d", "block"),  # a module is not explained by its child
        ],
        verdicts,
    )
    assert codes(found) == [("NRM001", "a"), ("NRM004", "c"), ("MSR001", "c"), ("MSR001", "d")]


def test_speed_gradients_and_ranks_are_neither_borne_out_nor_refuted_and_explain_nothing() -> None:
    rules = [unmeasurable(code, "a", "head") for code in ("TRN001", "COL001", "HWR001")]
    rules.append(finding("MSR001", "a", "head"))
    assert [(item.rule, item.agrees) for item in confronted(rules, {"a": {"fp16": UNSAFE}})] == [
        ("TRN001", None),
        ("COL001", None),
        ("HWR001", None),
        ("MSR001", True),
    ]
    assert [item.severity for item in confronted(rules[:3], {"a": {"fp16": SAFE}})] == ["warning"] * 3


def test_one_format_does_not_explain_the_other() -> None:
    verdicts = {"a": {"fp16": UNSAFE, "bf16": UNSAFE}}
    found = confronted(
        [finding("NRM001", "a"), finding("MSR001", "a"), finding("MSR002", "a", formats=("bf16",))], verdicts
    )
    assert codes(found) == [("NRM001", "a"), ("MSR002", "a")]


class Toy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().cos()


def test_facts_of_the_measurement_fire_their_rules() -> None:
    toy = captured(Toy(), torch.ones(2, 4))
    verdicts = {"tanh": {"fp16": UNSAFE, "bf16": SAFE}, "cos": {"fp16": SAFE, "bf16": UNSAFE}}
    facts = gather(toy.capture, toy.ranges, verdicts)
    found = confronted(classify(toy.capture, facts, RULES), verdicts)
    assert codes(found) == [("MSR001", "tanh"), ("MSR002", "cos")]
    assert found[0].message == "the measurement finds tanh unsafe in FP16: overflow"
    assert all(item.agrees for item in found)
    assert not [item for item in classify(toy.capture, toy.facts, RULES) if item.rule.startswith("MSR")]


def test_select_and_ignore_go_by_the_beginning_of_a_code() -> None:
    found = (finding("NRM001", "a", "block.norm"), finding("NRM004", "a", "block.norm"), finding("SFT001", "b", "head"))
    assert silenced(found, (), (), RULES) == found
    assert codes(silenced(found, ("NRM",), (), RULES)) == [("NRM001", "a"), ("NRM004", "a")]
    assert codes(silenced(found, (), (Ignore("NRM"),), RULES)) == [("SFT001", "b")]
    assert codes(silenced(found, (), (Ignore("NRM004", "block.*"),), RULES)) == [
        ("NRM001", "a"),
        ("SFT001", "b"),
    ]


def test_an_unused_ignore_is_a_finding() -> None:
    found = (finding("NRM001", "a", "block.norm"),)
    stale = Ignore("NRM001", "blocks.*", "checked by hand", "pyproject.toml:7")
    kept, unused = silenced(found, (), (stale,), RULES)
    assert kept == found[0]
    assert (unused.rule, unused.severity, unused.source, unused.node) == ("CFG001", "warning", "pyproject.toml:7", "")
    assert unused.message == "nothing in this audit matches this entry of [tool.auditor]: NRM001 in 'blocks.*'"
    assert unused.evidence["reason"] == "checked by hand"


def test_a_used_ignore_is_none_and_the_finding_itself_can_be_ignored() -> None:
    found = (finding("NRM001", "a"),)
    assert silenced(found, (), (Ignore("NRM001"),), RULES) == ()
    assert silenced((), (), (Ignore("NRM001"), Ignore("CFG001")), RULES) == ()
    assert silenced((), ("SFT",), (Ignore("NRM001"),), RULES) == ()
