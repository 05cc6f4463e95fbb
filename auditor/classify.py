"""Findings: the nodes that each rule's match and conditions point at. Pure; no tensor is run."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from .facts import NodeFacts
from .records import Capture, Finding
from .rulebook import Matcher, Rule, evaluate, facts_used


def classify(capture: Capture, facts: Mapping[str, NodeFacts], rules: Sequence[Rule]) -> tuple[Finding, ...]:
    """Findings in graph order, then by code; `agrees` is left for the measurement to fill."""
    matcher = Matcher(capture, facts)
    order = {name: index for index, name in enumerate(capture.nodes)}
    findings = [
        _finding(rule, capture, facts[name], name)
        for rule in rules
        if rule.status != "retired"
        for name in matcher.find(rule.match)
        if evaluate(rule.when, facts[name]) is True
    ]
    return tuple(sorted(findings, key=lambda finding: (order[finding.node], finding.rule)))


def _finding(rule: Rule, capture: Capture, facts: NodeFacts, name: str) -> Finding:
    node = capture.nodes[name]
    template = _Template()
    shown = [field for _, field, _, _ in template.parse(rule.message) if field]
    return Finding(
        rule=rule.code,
        name=rule.name,
        node=name,
        owner=node.owner,
        op=node.op,
        source=node.source,
        severity=rule.severity,
        confidence=rule.confidence,
        formats=rule.formats,
        message=template.vformat(rule.message, (), vars(facts)),
        why=rule.why,
        advice=rule.advice,
        evidence={fact: getattr(facts, fact) for fact in dict.fromkeys([*facts_used(rule.when), *shown])},
    )


class _Template(string.Formatter):
    """str.format in which an unknown fact reads "unknown", whatever its format says."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "unknown" if value is None else str(super().format_field(value, format_spec))
