"""Findings: the nodes that each rule's match and conditions point at. Pure; no tensor is run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..facts import FACTS, NodeFacts, value_at
from ..formats.table import auditable
from ..records import Capture, Finding
from ..rulebook import Matcher, Rule, evaluate, facts_used
from ..rulebook.message import FORMATS, ByFormat, about, facts_shown, filled
from ..rulebook.rule import CONFIDENCES, SEVERITIES

TRAINING = "training"
"""The family of rules that speak of gradients."""


def classify(
    capture: Capture,
    facts: Mapping[str, NodeFacts],
    rules: Sequence[Rule],
    formats: Collection[str] | None = None,
    trains: bool = True,
) -> tuple[Finding, ...]:
    """Findings in graph order, then by code; `agrees` is left for the measurement to fill.

    formats: the audit's, all by default: findings speak of no other. trains: whether the audit asks about training.
    Of the rules that fire on one operation, those that another of them supersedes say nothing.
    """
    matcher = Matcher(capture, facts)
    order = {name: index for index, name in enumerate(capture.nodes)}
    findings = [
        _finding(rule, capture, facts[name], name, spoken, why)
        for rule in rules
        if rule.status != "retired" and (trains or rule.family != TRAINING)
        if (spoken := _spoken(rule, formats))
        for why in [about(rule.why, formats or auditable(), auditable())]
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


def _spoken(rule: Rule, formats: Collection[str] | None) -> tuple[str, ...]:
    """The formats of a rule that an audit is about. What runs in no audited format, such as TF32, runs beside them all."""
    return tuple(name for name in rule.formats if formats is None or name in formats or name not in auditable())


def _addresses(message: str, formats: Sequence[str]) -> list[str]:
    """Of the facts that a message shows; of those kept by format, in each of the formats."""
    found = []
    for name in facts_shown(message):
        in_all = name in FACTS and FACTS[name].by_format
        found += [f"{name}.{fmt}" for fmt in formats] if in_all else [name] if name != FORMATS else []
    return found


def _shown(facts: NodeFacts, formats: Sequence[str], address: str) -> Any:
    """What a message shows of a fact: in each of the formats, where it is kept by format and none is named."""
    if address in FACTS and FACTS[address].by_format:
        return ByFormat({name: value_at(facts, f"{address}.{name}") for name in formats})
    return value_at(facts, address)


def _finding(rule: Rule, capture: Capture, facts: NodeFacts, name: str, formats: tuple[str, ...], why: str) -> Finding:
    node = capture.nodes[name]
    used = dict.fromkeys([*facts_used(rule.when), *_addresses(rule.message, formats)])
    shown = partial(_shown, facts, formats)
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
        formats=formats,
        message=filled(rule.message, shown, formats),
        why=why,
        advice=rule.advice,
        evidence={fact: value_at(facts, fact) for fact in used},
        references=rule.references,
        declared=rule.severity,
        measurable=rule.measurable,
    )
