"""Findings: the nodes that each rule's match and conditions point at. Pure; no tensor is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..facts import NodeFacts, value_at
from ..records import Capture, Finding
from ..rulebook import Matcher, Rule, evaluate, facts_used
from ..rulebook.message import facts_shown, filled
from ..rulebook.rule import CONFIDENCES, SEVERITIES


def classify(capture: Capture, facts: Mapping[str, NodeFacts], rules: Sequence[Rule]) -> tuple[Finding, ...]:
    """Findings in graph order, then by code; `agrees` is left for the measurement to fill.

    Of the rules that fire on one operation, those that another of them supersedes say nothing.
    """
    matcher = Matcher(capture, facts)
    order = {name: index for index, name in enumerate(capture.nodes)}
    findings = [
        _finding(rule, capture, facts[name], name)
        for rule in rules
        if rule.status != "retired"
        for name in matcher.find(rule.match)
        if evaluate(rule.when, facts[name]) is True
    ]
    kept = _most_specific(findings, {rule.code: rule for rule in rules})
    return tuple(sorted(kept, key=lambda finding: (order[finding.node], finding.rule)))


def _most_specific(findings: list[Finding], rules: Mapping[str, Rule]) -> list[Finding]:
    """The findings that none on the same node supersedes, each as severe and as sure as the surest it stands for."""
    by_node: dict[str, dict[str, Finding]] = {}
    for finding in findings:
        by_node.setdefault(finding.node, {})[finding.rule] = finding
    kept = []
    for fired in by_node.values():
        superseded = {code for finding in fired.values() for code in rules[finding.rule].supersedes}
        for code, finding in fired.items():
            if code not in superseded:
                group = [finding, *(fired[other] for other in rules[code].supersedes if other in fired)]
                kept.append(_strongest(group))
    return kept


def _strongest(group: Sequence[Finding]) -> Finding:
    severity = max((finding.severity for finding in group), key=SEVERITIES.index)
    confidence = max((finding.confidence for finding in group), key=CONFIDENCES.index)
    return replace(group[0], severity=severity, confidence=confidence)


def _finding(rule: Rule, capture: Capture, facts: NodeFacts, name: str) -> Finding:
    node = capture.nodes[name]
    used = dict.fromkeys([*facts_used(rule.when), *facts_shown(rule.message)])
    return Finding(
        rule=rule.code,
        name=rule.name,
        node=name,
        owner=node.owner,
        op=node.op,
        source=node.source,
        called_from=node.called_from,
        severity=rule.severity,
        confidence=rule.confidence,
        formats=rule.formats,
        message=filled(rule.message, partial(value_at, facts)),
        why=rule.why,
        advice=rule.advice,
        evidence={fact: value_at(facts, fact) for fact in used},
        references=rule.references,
        declared=rule.severity,
        measurable=rule.measurable,
    )
