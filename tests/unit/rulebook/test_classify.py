"""Findings: their order, their words, and that nothing is run to make them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from tests.support.capturing import captured, facts_of

RULES = load_rules()


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x).masked_fill(x > 0, -1e9)
        return torch.log(torch.softmax(x, dim=-1))


TOY = captured(Toy(), torch.ones(2, 4))


def test_findings_come_in_graph_order_then_by_code() -> None:
    findings = classify(TOY.capture, TOY.facts, RULES)
    assert [(finding.node, finding.rule) for finding in findings] == [
        ("linear", "BND001"),
        ("linear", "BND002"),
        ("masked_fill", "CON001"),
        ("softmax", "SFT001"),
        ("log", "SFT005"),
    ]
    assert findings == classify(TOY.capture, TOY.facts, tuple(reversed(RULES)))


def test_a_finding_speaks_in_the_users_terms() -> None:
    (finding,) = (item for item in classify(TOY.capture, TOY.facts, RULES) if item.rule == "CON001")
    assert finding.message == "the literal -1e+09 does not fit FP16, whose largest number is 65504"
    assert (finding.severity, finding.formats, finding.owner) == ("error", ("fp16",), "")
    assert finding.source is not None
    assert finding.source.startswith("test_classify.py:")
    assert finding.evidence == {
        "constants_beyond": ("fp16", "fp8_e4m3", "fp8_e5m2"),
        "upcast": False,
        "constant_largest": -1e9,
    }
    assert finding.agrees is None
    assert "masked_fill" in finding.advice


class Scores(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return torch.softmax(q @ q.transpose(-1, -2) / 8.0, -1)


def test_the_most_specific_rule_speaks_with_the_severity_of_those_it_supersedes() -> None:
    toy = captured(Scores(), torch.full((1, 2, 4), 300.0))  # 4 * 300 * 300 = 360000 > 65504
    (found,) = (item for item in classify(toy.capture, toy.facts, RULES) if item.node == "matmul")
    assert (found.rule, found.severity, found.confidence, found.declared) == ("ATT001", "error", "high", "warning")
    alone = [rule for rule in RULES if rule.code != "ATT001"]
    assert [item.rule for item in classify(toy.capture, toy.facts, alone) if item.node == "matmul"] == ["ATT002"]
    small = captured(Scores(), torch.ones(1, 2, 4))
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
