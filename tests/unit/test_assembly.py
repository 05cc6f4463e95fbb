"""What the records of the stages become in the audit."""

from __future__ import annotations

from auditor.assembly import _rules_by_node
from auditor.records import Finding


def finding(rule: str, node: str) -> Finding:
    return Finding(rule, "a-rule", node, "", "aten.exp.default", None, "info", "high", ("fp16",), "", "", "")


def test_a_node_names_every_rule_that_fired_on_it() -> None:
    fired = [finding("EXP001", "exp"), finding("SFT001", "softmax"), finding("RNG001", "exp")]
    assert _rules_by_node(fired) == {"exp": ("EXP001", "RNG001"), "softmax": ("SFT001",)}
