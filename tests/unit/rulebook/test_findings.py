"""Conditions over facts, findings in their order and words, and what measurements and users make of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from auditor.numerics.formats import FORMATS, narrower
from auditor.records import Finding, Verdict
from auditor.records.measure import Ignore
from auditor.rulebook.conditions import Condition, describe, evaluate, facts_used
from auditor.rulebook.facts import NodeFacts
from auditor.rulebook.findings import apply_selection, classify, compare_with_verdicts
from auditor.rulebook.gather import gather
from auditor.rulebook.load import load_rules
from tests.support.capturing import Function, captured, facts_of
from tests.support.findings import finding as made
from tests.support.replaying import Model

RULES = load_rules()
UNSAFE, SAFE, UNTESTED = Verdict("unsafe", "overflow"), Verdict("safe", "fine"), Verdict("untested", "not reached")


def finding(
    rule: str, node: str, owner: str = "", severity: str = "warning", formats: tuple[str, ...] = ("fp16",)
) -> Finding:
    return made(rule, node, owner=owner, severity=severity, formats=formats)


def codes(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(item.rule, item.node) for item in findings]


def test_the_measurement_wins() -> None:
    rules = [finding("NRM001", name) for name in ("agrees", "differs", "untested", "unknown")]
    verdicts = {"agrees": {"fp16": UNSAFE}, "differs": {"fp16": SAFE}, "untested": {"fp16": UNTESTED}}
    found = compare_with_verdicts(rules, verdicts)
    assert [(item.agrees, item.severity) for item in found] == [
        (True, "warning"),
        (False, "info"),
        (None, "warning"),
        (None, "warning"),
    ]


def test_an_unsafe_node_that_no_rule_foresaw_is_reported() -> None:
    verdicts = {"a": {"fp16": UNSAFE}, "b": {"fp16": UNSAFE}, "c": {"fp16": UNSAFE}, "d": {"fp16": UNSAFE}}
    found = compare_with_verdicts(
        [
            finding("NRM001", "a", "block.norm"),
            finding("MSR001", "a", "block.norm"),  # explained by the line above
            finding("MSR001", "b", "block.norm"),  # its module is explained
            finding("NRM003", "c", "block.other", severity="info"),
            finding("MSR001", "c", "block.other"),  # an info explains nothing
            finding("MSR001", "d", "block"),  # a module is not explained by its child
        ],
        verdicts,
    )
    assert codes(found) == [("NRM001", "a"), ("NRM003", "c"), ("MSR001", "c"), ("MSR001", "d")]


def test_speed_gradients_and_ranks_are_neither_borne_out_nor_refuted_and_explain_nothing() -> None:
    rules = [replace(finding(code, "a", "head"), measurable=False) for code in ("TRN001", "COL001", "HWR001")]
    rules.append(finding("MSR001", "a", "head"))
    assert [(item.rule, item.agrees) for item in compare_with_verdicts(rules, {"a": {"fp16": UNSAFE}})] == [
        ("TRN001", None),
        ("COL001", None),
        ("HWR001", None),
        ("MSR001", True),
    ]
    assert [item.severity for item in compare_with_verdicts(rules[:3], {"a": {"fp16": SAFE}})] == ["warning"] * 3


def test_one_format_does_not_explain_the_other() -> None:
    verdicts = {"a": {"fp16": UNSAFE, "bf16": UNSAFE}}
    found = compare_with_verdicts(
        [finding("NRM001", "a"), finding("MSR001", "a"), finding("MSR002", "a", formats=("bf16",))], verdicts
    )
    assert codes(found) == [("NRM001", "a"), ("MSR002", "a")]


@pytest.mark.parametrize("in_fp16", [SAFE, UNTESTED])
def test_a_finding_hides_only_the_formats_in_which_it_is_confirmed(in_fp16: Verdict) -> None:
    verdicts = {"total": {"fp16": in_fp16, "bf16": UNSAFE}, "product": {"fp16": UNSAFE, "bf16": UNSAFE}}
    found = compare_with_verdicts(
        [
            finding("RED003", "total", "bank", formats=("fp16", "bf16")),  # confirmed in BF16 only
            finding("MSR001", "product", "bank"),
            finding("MSR002", "product", "bank", formats=("bf16",)),
        ],
        verdicts,
    )
    assert codes(found) == [("RED003", "total"), ("MSR001", "product")]


def test_facts_of_the_measurement_fire_their_rules() -> None:
    toy = captured(Function(lambda x: x.tanh().cos()), torch.ones(2, 4))
    verdicts = {"tanh": {"fp16": UNSAFE, "bf16": SAFE}, "cos": {"fp16": SAFE, "bf16": UNSAFE}}
    facts = gather(toy.capture, toy.ranges, verdicts)
    found = compare_with_verdicts(classify(toy.capture, facts, RULES), verdicts)
    assert codes(found) == [("MSR001", "tanh"), ("MSR002", "cos")]
    assert found[0].message == "tanh is unsafe in FP16, since overflow"
    assert all(item.agrees for item in found)
    assert not [item for item in classify(toy.capture, toy.facts, RULES) if item.rule.startswith("MSR")]


def test_select_and_ignore_go_by_the_beginning_of_a_code() -> None:
    found = (finding("NRM001", "a", "block.norm"), finding("NRM003", "a", "block.norm"), finding("SFT001", "b", "head"))
    assert apply_selection(found, (), (), RULES) == found
    assert codes(apply_selection(found, ("NRM",), (), RULES)) == [("NRM001", "a"), ("NRM003", "a")]
    assert codes(apply_selection(found, (), (Ignore("NRM"),), RULES)) == [("SFT001", "b")]
    assert codes(apply_selection(found, (), (Ignore("NRM003", "block.*"),), RULES)) == [
        ("NRM001", "a"),
        ("SFT001", "b"),
    ]


def test_an_unused_ignore_is_a_finding() -> None:
    found = (finding("NRM001", "a", "block.norm"),)
    stale = Ignore("NRM001", "blocks.*", "checked by hand", "pyproject.toml:7")
    kept, unused = apply_selection(found, (), (stale,), RULES)
    assert kept == found[0]
    assert (unused.rule, unused.severity, unused.source, unused.node) == ("CFG001", "warning", "pyproject.toml:7", "")
    assert unused.message == "this entry of [tool.auditor] matches no finding: NRM001 in 'blocks.*'"
    assert unused.evidence["reason"] == "checked by hand"


def test_a_used_ignore_is_none_and_the_finding_itself_can_be_ignored() -> None:
    found = (finding("NRM001", "a"),)
    assert apply_selection(found, (), (Ignore("NRM001"),), RULES) == ()
    assert apply_selection((), (), (Ignore("NRM001"), Ignore("CFG001")), RULES) == ()
    assert apply_selection((), ("SFT",), (Ignore("NRM001"),), RULES) == ()


# Findings: their order, their words, and that nothing is run to make them.


def classify_toy(m: Any, x: Tensor) -> Tensor:
    x = m.head(x).masked_fill(x > 0, -1e9)
    return torch.log(torch.softmax(x, dim=-1))


TOY = captured(Model(classify_toy, head=nn.Linear(4, 4)), torch.ones(2, 4))


def test_findings_come_in_graph_order_then_by_code() -> None:
    findings = classify(TOY.capture, TOY.facts, RULES)
    assert [(finding.node, finding.rule) for finding in findings] == [
        ("masked_fill", "CON001"),
        ("softmax", "SFT001"),
        ("log", "SFT005"),
    ]
    assert findings == classify(TOY.capture, TOY.facts, tuple(reversed(RULES)))


def test_a_finding_speaks_in_the_users_terms() -> None:
    (finding,) = (item for item in classify(TOY.capture, TOY.facts, RULES) if item.rule == "CON001")
    assert finding.message == "the constant -1e+09 does not fit FP16, whose largest number is 65504"
    assert (finding.severity, finding.formats, finding.owner) == ("error", ("fp16",), "")
    assert finding.source.startswith("test_findings.py:")
    assert finding.evidence == {
        "constants_beyond": tuple(fmt for fmt in narrower() if FORMATS[fmt].largest < 1e9),
        "upcast": False,
        "constant_largest": -1e9,
    }
    assert finding.agrees is None
    assert "masked_fill" in finding.advice


def scores() -> nn.Module:
    return Function(lambda q: torch.softmax(q @ q.transpose(-1, -2) / 8.0, -1))


def test_the_most_specific_rule_speaks_with_the_severity_of_those_it_supersedes() -> None:
    toy = captured(scores(), torch.full((1, 2, 4), 300.0))  # 4 * 300 * 300 = 360000 > 65504
    (found,) = (item for item in classify(toy.capture, toy.facts, RULES) if item.node == "matmul")
    assert (found.rule, found.severity, found.confidence, found.declared) == ("ATT001", "error", "high", "warning")
    alone = [rule for rule in RULES if rule.code != "ATT001"]
    assert [item.rule for item in classify(toy.capture, toy.facts, alone) if item.node == "matmul"] == ["ATT002"]
    small = captured(scores(), torch.ones(1, 2, 4))
    (found,) = (item for item in classify(small.capture, small.facts, RULES) if item.node == "matmul")
    assert (found.rule, found.severity, found.confidence) == ("ATT001", "warning", "low")


def test_a_finding_carries_what_reporters_need_of_its_rule() -> None:
    (finding,) = (item for item in classify(TOY.capture, TOY.facts, RULES) if item.rule == "CON001")
    (rule,) = (rule for rule in RULES if rule.code == "CON001")
    assert (finding.declared, finding.references, finding.measurable) == (rule.severity, rule.references, True)


def test_findings_speak_of_no_format_that_the_audit_is_not_about() -> None:
    def function(x: Tensor, position: Tensor) -> Tensor:
        angle = position.to(x.dtype)[:, None] * x
        return angle.sin().cumsum(0).clamp(max=1 - 1e-6) - torch.fft.fft(x).abs()

    toy = facts_of(function, torch.ones(300, 2), torch.arange(300))
    both = classify(toy.capture, toy.facts, RULES)
    assert {"POS001", "POS004", "RED003", "CON003", "LIN002"} & {item.rule for item in both}
    for formats, other in ((("bf16",), "FP16"), (("fp16",), "BF16"), (("fp8_e4m3",), "FP16")):
        found = classify(toy.capture, toy.facts, RULES, formats)
        assert all(set(item.formats) <= set(formats) for item in found)
        assert [item.rule for item in found if other in item.message] == []
    for item in classify(toy.capture, toy.facts, RULES, ("bf16",)):
        assert "FP16" not in item.why + item.advice, item.rule
        assert not item.message.rstrip().endswith((";", ":", ",")), item.rule


# Conditions over facts: how they evaluate where facts are known and where not, and how they read.

FACTS = replace(
    NodeFacts(**dict.fromkeys(NodeFacts.__dataclass_fields__)),
    op="aten.sum.default",
    upcast=False,
    reduction_length=100,
    consumers=("aten.mul.Tensor",),
    constants=(),
    headroom_bits={"fp16": 3.0, "bf16": 120.0},
    verdict={},
)


def leaf(fact: str, **comparisons: object) -> Condition:
    return Condition("fact", fact, comparisons)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (leaf("reduction_length", above=100), False),
        (leaf("reduction_length", at_least=100), True),
        (leaf("reduction_length", below=100), False),
        (leaf("reduction_length", at_most=100), True),
        (leaf("reduction_length", above=10, below=50), False),
        (leaf("op", matches="aten.sum.*"), True),
        (leaf("op", equals="aten.sum"), False),
        (leaf("upcast", equals=False), True),
        (leaf("consumers", contains="aten.mul*"), True),
        (leaf("consumers", contains="mul"), False),
        (leaf("constants", present=True), False),
        (leaf("eps", present=False), True),
        (leaf("reduction_length", present=True, above=100), False),
        (leaf("eps", above=0), None),
        (leaf("headroom_bits.fp16", below=4), True),
        (leaf("headroom_bits.bf16", below=4), False),
        (leaf("headroom_bits.fp8_e4m3", below=4), None),
        (leaf("headroom_bits.fp8_e4m3", present=False), True),
        (leaf("verdict.fp16", equals="unsafe"), None),
        (Condition("not", parts=(leaf("eps", above=0),)), None),
        (Condition("any", parts=(leaf("eps", above=0), leaf("upcast", equals=False))), True),
        (Condition("any", parts=(leaf("eps", above=0), leaf("upcast", equals=True))), None),
        (Condition("all", parts=(leaf("eps", above=0), leaf("upcast", equals=True))), False),
        (Condition("all", parts=()), True),
    ],
)
def test_conditions(condition: Condition, expected: bool | None) -> None:
    assert evaluate(condition, FACTS) is expected


@given(st.floats(allow_nan=True), st.sampled_from(["above", "at_least", "below", "at_most"]))
def test_a_comparison_with_nan_never_holds(bound: float, comparison: str) -> None:
    nan = replace(FACTS, output_max_abs=float("nan"))
    assert evaluate(leaf("output_max_abs", **{comparison: bound}), nan) is False


def test_a_condition_in_words() -> None:
    condition = Condition(
        "all",
        parts=(
            leaf("reduction_length", above=8),
            Condition("any", parts=(leaf("upcast", equals=False), leaf("op", matches="a*"))),
        ),
    )
    assert describe(condition) == "`reduction_length` is above 8 elements, and (`upcast` is false or `op` matches a*)"
    assert list(facts_used(condition)) == ["reduction_length", "upcast", "op"]


def test_what_is_known_reads_apart_from_what_holds() -> None:
    leaves = [leaf("eps", present=False), leaf("output_max_abs", present=True), leaf("constants", present=False)]
    assert [describe(item) for item in leaves] == [
        "`eps` is unknown",
        "`output_max_abs` is known",
        "`constants` is empty",
    ]
